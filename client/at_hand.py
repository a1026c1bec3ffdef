"""What the nodes of this host show in shared memory, looked at before anybody is asked: how a blocking client's call for one key begins.

It does not read itself (local/reads.py): to read is a call of the client's own, for each call between costs a tenth of a get.
"""

from collections.abc import Callable
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


class AtHand:
    """For a blocking client. Threads may share it."""

    def __init__(self, operations: Operations, run: Run) -> None:
        self.operations = operations
        self.run = run
        self._local = operations.local

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

    def again(self, timeout: Timeout, read: Callable[..., T | None], *what: Any) -> tuple[T | None, Timeout]:
        """Map the slabs in which something was found: what `read(*what)`, of LocalReads, finds then, and the deadline, which has begun."""
        deadline = self.operations.deadline(timeout)
        self.run(self.operations.map_wanted(deadline))
        return read(*what), deadline
