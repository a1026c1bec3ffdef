"""Times at which a polled site was at rest: all nodes alive, and one owner of each partition. Pure functions.

A site can be disturbed without a fault, or after its end. etcd may elect a new leader once a partition has healed, or on a busy machine. An
owner then loses its lease. Until the nodes have registered with the next owner their blocks are misses, as after any failover. Such times
do not count as quiet, and those without a fault are counted.
"""

from collections.abc import Iterable, Sequence

from tests.faults.judging import Interval, Times


class Rest:
    def __init__(self) -> None:
        self._epochs: tuple[int, ...] | None = None
        self._calm_ns: int | None = None
        """When the last look began that found it as the one before had."""
        self.disturbed: list[Interval] = []
        """From a look that found it at rest to one that did not, or found another owner."""

    def looked(self, began_ns: int, ended_ns: int, epochs: tuple[int, ...] | None) -> None:
        """A look found the owners of these epochs, of each partition, and all their nodes; None: it did not."""
        if self._calm_ns is not None and (epochs is None or epochs != self._epochs):
            self.disturbed.append((self._calm_ns, ended_ns))
        if epochs is not None:
            self._epochs, self._calm_ns = epochs, began_ns


def unprovoked(disturbed: Sequence[Interval], faults: Iterable[Interval]) -> int:
    """Return the number of disturbances without a fault."""
    made = Times(faults)
    return sum(not made.meet(begin, end) for begin, end in Times(disturbed))
