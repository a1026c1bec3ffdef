"""Nodes of this host for an AsyncClient: at_hand.py, awaited."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from kvstore.client.arguments import check_deadline
from kvstore.client.async_work import carry_out
from kvstore.client.at_hand import Nodes
from kvstore.client.effects import Operation, Work
from kvstore.client.forks import Process
from kvstore.client.operations import Operations, Timeout
from kvstore.protocol.frames import MAX_VALUE_BYTES

T = TypeVar("T")
R = TypeVar("R")


class RunAsync(Protocol):
    """Drives an operation to its end: AsyncDriver's."""

    def __call__(self, operation: Operation[R], /) -> Awaitable[R]: ...


class AsyncAtHand:
    """As AtHand, awaited. Tasks of one event loop may share it."""

    def __init__(self, operations: Operations, run: RunAsync) -> None:
        self.operations = operations
        self.run = run
        self._local = operations.local

    async def nodes(self, deadline_s: float | None) -> tuple[Nodes, Timeout]:
        if deadline_s is not None:
            check_deadline(deadline_s)
        local = self._local
        until_ns, nodes = local.at_hand
        if local.clock_ns() < until_ns:
            return (nodes if local.process == Process.number else ()), deadline_s
        deadline = self.operations.deadline(deadline_s)
        await self.run(self.operations.look_around(deadline))
        return (local.at_hand[1] if local.process == Process.number else ()), deadline

    async def again(self, timeout: Timeout, read: Callable[..., T | None], *what: Any) -> tuple[T | None, Timeout]:
        deadline = self.operations.deadline(timeout)
        await self.run(self.operations.map_wanted(deadline))
        return await carry_out(Work(partial(read, *what), MAX_VALUE_BYTES)), deadline
