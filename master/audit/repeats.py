"""Merges repeats of one event: the first is reported at once, those of the next minute as one with their number. Sans-I/O.

A client that tries a wrong token a thousand times a second makes two entries a minute.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
WINDOW_NS: Final = 60_000_000_000
MAX_KEYS: Final = 256
"""Different events within a window. Beyond these the last one of the window stands for all others."""


@dataclass(slots=True)
class _Window:
    ends_ns: int
    repeats: int = 0


class Repeats(Generic[K]):
    """Not thread-safe."""

    def __init__(self) -> None:
        self._windows: dict[K, _Window] = {}
        """By event, the oldest window first."""
        self._others: K | None = None
        self._other_repeats = 0

    def is_first(self, key: K, now_ns: int) -> bool:
        """Whether the event is to be reported now. Otherwise it is counted, and `due` reports it."""
        window = self._windows.get(key)
        if window is not None:
            window.repeats += 1
            return False
        if len(self._windows) >= MAX_KEYS:
            self._others = key
            self._other_repeats += 1
            return False
        self._windows[key] = _Window(now_ns + WINDOW_NS)
        return True

    def due(self, now_ns: int) -> Iterator[tuple[K, int]]:
        """Events whose window is over, with the number of repeats, at least 1."""
        for key, window in list(self._windows.items()):
            if window.ends_ns > now_ns:
                return
            del self._windows[key]
            if window.repeats:
                yield key, window.repeats
            if self._others is not None:
                other, count, self._others, self._other_repeats = self._others, self._other_repeats, None, 0
                yield other, count
