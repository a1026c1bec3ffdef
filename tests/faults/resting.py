"""When a site was at rest, as one saw it who looked again and again: all nodes alive, and one owner of each partition. Pure.

Faults are not all that disturbs it, and some do later than they seem to. etcd may elect its leader anew once a partition has healed, or
where the machine has other things to do: an owner does not keep its lease then, and until nodes are with the next one what they hold is a
miss, as after any take-over. Such times are no quiet ones; how often there was no fault is told.
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
    """How often it was disturbed while there was no fault."""
    made = Times(faults)
    return sum(not made.meet(begin, end) for begin, end in Times(disturbed))
