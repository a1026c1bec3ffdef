"""Answers that are asked for again and again, kept for some seconds: many readers cost what one does."""

import math
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, Final

MAX_KEPT = 64
FAILURE_S: Final = 1.0
"""For which it is kept that there is no answer: who asks a master that is silent again and again would have it asked without a pause."""


class Cached:
    """Thread-safe. Calls of one key at once are one call, and the others wait for it, whatever comes of it; other keys' do not."""

    def __init__(self, ttl_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s, self._clock = ttl_s, clock
        self._kept: dict[Hashable, tuple[float, Future[Any]]] = {}
        """Until when each is good; without an end while it is being asked for."""
        self._lock = threading.Lock()

    def get(self, key: Hashable, ask: Callable[[], Any]) -> Any:
        """What `ask` returned for this key lately, or returns now. Raises what it raises, or raised within FAILURE_S."""
        with self._lock:
            until_s, answer = self._kept.get(key, (0.0, Future[Any]()))
            is_asked = self._clock() < until_s
            if not is_asked:
                answer = Future()
                self._keep(key, math.inf, answer)
        if not is_asked:
            ttl_s = self._ttl_s
            try:
                answer.set_result(ask())
            except BaseException as error:
                answer.set_exception(error)
                ttl_s = min(ttl_s, FAILURE_S)
            with self._lock:
                self._keep(key, self._clock() + ttl_s, answer)
        return answer.result()

    def _keep(self, key: Hashable, until_s: float, answer: "Future[Any]") -> None:
        self._kept.pop(key, None)
        if len(self._kept) >= MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = (until_s, answer)
