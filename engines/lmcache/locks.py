"""Locks of an L2 adapter: which holds of the store stand for LMCache's locks, and when one of them may be released.

LMCache locks the objects that a lookup found, and unlocks each of them once it was loaded or is not wanted any more, in any order and with
those of other lookups. One lookup has one hold, which is released with the last of its objects.
"""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.client.holds import Hold


@dataclass(slots=True, eq=False)
class _Lookup:
    """What one lookup found."""

    hold: Hold
    until_ns: int
    names: set[bytes]
    """Not unlocked yet."""


class Locks:
    """Thread-safe. Locks whose hold is over are forgotten, so that a caller that never unlocks costs no memory for long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lookups: deque[_Lookup] = deque()
        """By age; those released are still among them."""
        self._of_name: dict[bytes, deque[_Lookup]] = {}

    def add(self, hold: Hold, names: Sequence[bytes], now_ns: int) -> None:
        """A lookup found these blocks and holds them."""
        lookup = _Lookup(hold, now_ns + hold.duration_ms * 1_000_000, set(names))
        with self._lock:
            while self._lookups and (self._lookups[0].until_ns <= now_ns or not self._lookups[0].names):
                self._forget(self._lookups.popleft())
            self._lookups.append(lookup)
            for name in lookup.names:
                self._of_name.setdefault(name, deque()).append(lookup)

    def unlock(self, names: Sequence[bytes]) -> list[Hold]:
        """One lock of each block is over, the oldest. Returns the holds that have none left: the caller releases them."""
        over = []
        with self._lock:
            for name in names:
                lookup = self._take(name)
                if lookup is not None:
                    lookup.names.discard(name)
                    if not lookup.names:
                        over.append(lookup.hold)
        return over

    def __len__(self) -> int:
        """Locks that are not over, as far as is known."""
        return sum(map(len, self._of_name.values()))

    def _take(self, name: bytes) -> _Lookup | None:
        lookups = self._of_name.get(name)
        if lookups is None:
            return None
        lookup = lookups.popleft()
        if not lookups:
            del self._of_name[name]
        return lookup

    def _forget(self, lookup: _Lookup) -> None:
        """Its hold has ended by itself."""
        for name in lookup.names:
            of_name = self._of_name[name]
            of_name.remove(lookup)
            if not of_name:
                del self._of_name[name]
        lookup.names.clear()
