"""Leases of Mooncake's API: what `is_exist` found stays for a while, and what a get session reads until its end.

Both are holds of the store. A hold for each `is_exist` would be thousands a second: all that are found in a quarter of the lease share one.
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.client.holds import Hold, new_hold

WINDOWS: Final = 4
"""Holds in which a lease is cut: an object stays for its lease, and at most so large a part of it longer."""
SESSION_S: Final = 60.0
"""Of a get session, whose blocks are looked up anew after half of it: what a node allows by default (max_lease_s)."""
RENEW_NS: Final = int(SESSION_S * 1e9 / 2)


class LookupLease:
    """Of the objects that are looked up. Thread-safe."""

    def __init__(self, lease_s: float) -> None:
        """0: there are none."""
        self._lease_s = lease_s
        self._window_ns = int(lease_s * 1e9 / WINDOWS)
        self._lock = threading.Lock()
        self._hold: Hold | None = None
        self._until_ns = 0

    def hold(self, now_ns: int) -> Hold | None:
        """In whose name a lookup holds what it finds."""
        if not self._lease_s:
            return None
        with self._lock:
            if self._hold is None or now_ns >= self._until_ns:
                self._hold, self._until_ns = new_hold(self._lease_s), now_ns + self._window_ns
            return self._hold


@dataclass(slots=True, eq=False)
class Reading:
    """Objects whose get session began with one call."""

    hold: Hold
    renew_ns: int
    keys: set[str]


class GetSessions:
    """Which objects have a get session, and what holds them. Not thread-safe: the caller has a lock."""

    def __init__(self) -> None:
        self._of_key: dict[str, Reading] = {}

    def begin(self, hold: Hold, keys: Sequence[str], now_ns: int) -> None:
        """These objects were found and are held. None of them has a session: `end` comes first."""
        self._of_key.update(dict.fromkeys(keys, Reading(hold, now_ns + RENEW_NS, set(keys))))

    def end(self, keys: Iterable[str]) -> list[Hold]:
        """The sessions of these objects are over. Returns the holds that have none left: to be released."""
        over = []
        for key in keys:
            reading = self._of_key.pop(key, None)
            if reading is not None:
                reading.keys.discard(key)
                if not reading.keys:
                    over.append(reading.hold)
        return over

    def due(self, keys: Iterable[str], now_ns: int) -> list[tuple[Hold, list[str]]]:
        """Of the sessions of these objects, those that are to be held on: their holds and objects. They are not due again soon."""
        found = {id(reading): reading for key in keys if (reading := self._of_key.get(key)) is not None and reading.renew_ns <= now_ns}
        for reading in found.values():
            reading.renew_ns = now_ns + RENEW_NS
        return [(reading.hold, sorted(reading.keys)) for reading in found.values()]

    def __contains__(self, key: str) -> bool:
        return key in self._of_key
