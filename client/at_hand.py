"""What the nodes of this host show in shared memory, looked at before anybody is asked: how a call for one key begins, by either client.

It does not read itself (local/reads.py) and asks only where nodes have to be looked for, or mapped.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from kvstore.client.arguments import check_deadline
from kvstore.client.effects import Operation
from kvstore.client.forks import Process
from kvstore.client.local.nodes import LocalNode
from kvstore.client.operations import Operations, Timeout

T = TypeVar("T")
R = TypeVar("R")
Nodes = tuple[LocalNode, ...]


class Run(Protocol):
    """Drives an operation to its end: Driver's."""

    def __call__(self, operation: Operation[R], /) -> R: ...


class RunAsync(Protocol):
    """As Run: AsyncDriver's."""

    def __call__(self, operation: Operation[R], /) -> Awaitable[R]: ...


class AtHand:
    """For a blocking client. Threads may share it."""

    def __init__(self, operations: Operations, run: Run) -> None:
        self.operations = operations
        self.run = run
        self._local = operations.local
        self._near = operations.near

    def nodes(self, deadline_s: float | None) -> tuple[Nodes, Timeout]:
        """The nodes of this host that can be read without asking; and the call's deadline, which has begun if they were looked for."""
        if deadline_s is not None:
            check_deadline(deadline_s)
        local = self._local
        until_ns, nodes = local.at_hand
        if local.clock_ns() < until_ns:
            return (nodes if local.process == Process.number else ()), deadline_s
        deadline = self.operations.deadline(deadline_s)
        self.run(self.operations.look_around(deadline))
        return (local.at_hand[1] if local.process == Process.number else ()), deadline

    def look(self, deadline_s: float | None, read: Callable[..., T | None], *what: Any) -> tuple[T | None, Timeout]:
        """What `read(nodes, *what)`, of LocalReads, finds at those nodes, tried again once what it lacked is mapped; None for nothing. The
        deadline as of `nodes`."""
        nodes, timeout = self.nodes(deadline_s)
        if not nodes:
            return None, timeout
        found = read(nodes, *what)
        if found is None and self._near.wanted:
            timeout = self.operations.deadline(timeout)
            self.run(self.operations.map_wanted(timeout))
            found = read(nodes, *what)
        return found, timeout


class AsyncAtHand:
    """As AtHand, awaited. Tasks of one event loop may share it."""

    def __init__(self, operations: Operations, run: RunAsync) -> None:
        self.operations = operations
        self.run = run
        self._local = operations.local
        self._near = operations.near

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

    async def look(self, deadline_s: float | None, read: Callable[..., T | None], *what: Any) -> tuple[T | None, Timeout]:
        nodes, timeout = await self.nodes(deadline_s)
        if not nodes:
            return None, timeout
        found = read(nodes, *what)
        if found is None and self._near.wanted:
            timeout = self.operations.deadline(timeout)
            await self.run(self.operations.map_wanted(timeout))
            found = read(nodes, *what)
        return found, timeout
