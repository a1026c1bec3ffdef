"""Answers that are asked for again and again, kept for some seconds: many readers cost what one does."""

import threading
import time
from collections.abc import Callable, Hashable
from typing import Any

MAX_KEPT = 64


class Cached:
    """Thread-safe. Calls of one key at once are one call, and the others wait for it."""

    def __init__(self, ttl_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s, self._clock = ttl_s, clock
        self._kept: dict[Hashable, tuple[float, Any]] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, ask: Callable[[], Any]) -> Any:
        """What `ask` returned for this key lately, or returns now. Raises what it raises, and keeps nothing then."""
        with self._lock:
            until_s, value = self._kept.get(key, (0.0, None))
            if self._clock() >= until_s:
                value = ask()
                self._kept.pop(key, None)
                if len(self._kept) >= MAX_KEPT:
                    del self._kept[next(iter(self._kept))]
                self._kept[key] = (self._clock() + self._ttl_s, value)
            return value
