"""Nodes of other hosts that take a client's small puts without a reservation: for each size the one that the master chose last, for
a second. Sans-I/O."""

import time
from collections.abc import Callable, Iterable
from typing import Final

from kvstore.protocol.errors import Full, QuotaExceeded, TierFailed, Unavailable

REFUSALS: Final = (Unavailable, Full, QuotaExceeded, TierFailed)
"""Errors of a target after which the put is reserved: another node may take it."""
TARGET_NS: Final = 1_000_000_000
"""Time after which the master places a size anew: it knows of free room, load and drains what clients do not."""


class PutTargets:
    """Target nodes by size class, a power of two each: at most one entry a bit of a size. Thread-safe: each step is one operation of a
    dictionary."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._chosen: dict[int, tuple[int, int]] = {}
        """(node id, time in ns at which it ends) by size class."""

    def learn(self, sizes: Iterable[int], node_id: int) -> None:
        """The master chose this node for values of these sizes."""
        until_ns = self._clock_ns() + TARGET_NS
        self._chosen.update((size_bytes.bit_length(), (node_id, until_ns)) for size_bytes in sizes)

    def node_id(self, size_bytes: int) -> int:
        """Node for a value of that size; 0: the master is to choose."""
        chosen = self._chosen.get(size_bytes.bit_length())
        return chosen[0] if chosen is not None and self._clock_ns() < chosen[1] else 0

    def forget(self, node_id: int) -> None:
        """The node refused a put or cannot be reached."""
        for size_class, (chosen, _) in list(self._chosen.items()):
            if chosen == node_id:
                self._chosen.pop(size_class, None)
