"""Thread pool that serves connections: a core number of threads, and extra ones while those are blocked.

A peer that reads its reply slowly blocks a thread until its deadline. With a fixed number of threads a few such peers
would stall all others, which would then take this side for dead.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

EXTRA_THREAD_DELAY_NS: Final = 50_000_000
"""Work that is queued for this long gets an extra thread: well before its peer's `stall_timeout_s`."""
RETRY_NS: Final = 1_000_000_000
"""Delay before the next attempt after the system refused a thread."""
log = logging.getLogger("kvstore.transfer")


class ServerThreads:
    """Thread pool with core and extra threads. Thread-safe. `submit` never blocks; `close` waits for the work to end."""

    def __init__(self, core_threads: int, max_threads: int) -> None:
        """`core_threads` stay; at most `max_threads` exist."""
        self._core_threads = core_threads
        self._max_threads = max_threads
        self._changed = threading.Condition()
        self._work_queue: deque[tuple[int, Callable[[], None]]] = deque()
        """(time queued, work)."""
        self._threads: set[threading.Thread] = set()
        self._available = 0
        """Threads that will take queued work: idle ones and new ones."""
        self._retry_ns = 0
        """No thread is started before this time."""
        self._is_closed = False

    def submit(self, work: Callable[[], None]) -> None:
        """Queue work for a thread. No-op once closed."""
        with self._changed:
            if self._is_closed:
                return
            now_ns = time.monotonic_ns()
            self._work_queue.append((now_ns, work))
            if self._available < len(self._work_queue) and len(self._threads) < self._core_threads and now_ns >= self._retry_ns:
                self._start()
            self._changed.notify()

    def next_ns(self) -> int | None:
        """Return when `run_due` is due; None: not before the next `submit`."""
        with self._changed:
            waits = len(self._work_queue) > self._available and len(self._threads) < self._max_threads
            return max(self._work_queue[self._available][0] + EXTRA_THREAD_DELAY_NS, self._retry_ns) if waits else None

    def run_due(self, now_ns: int) -> None:
        """Start an extra thread for each overdue item."""
        with self._changed:
            overdue = sum(since_ns + EXTRA_THREAD_DELAY_NS <= now_ns for since_ns, _ in self._work_queue) - self._available
            for _ in range(min(overdue, self._max_threads - len(self._threads))):
                if now_ns >= self._retry_ns:
                    self._start()

    def _start(self) -> None:
        """Start a thread, if the system allows it."""
        thread = threading.Thread(target=self._run, name="kvstore-serve", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            log.error("the transfer engine has %d threads and cannot start another: %s; retrying", len(self._threads), error)
            self._retry_ns = time.monotonic_ns() + RETRY_NS
            return
        self._threads.add(thread)
        self._available += 1

    def _run(self) -> None:
        with self._changed:
            self._available -= 1
        while (work := self._next()) is not None:
            work()
            del work  # drops its connection

    def _next(self) -> Callable[[], None] | None:
        """Return the next work, or None if this thread is surplus or the pool is closed and empty."""
        with self._changed:
            while not self._work_queue:
                if self._is_closed or len(self._threads) > self._core_threads:
                    self._threads.discard(threading.current_thread())
                    self._changed.notify_all()
                    return None
                self._available += 1
                self._changed.wait()
                self._available -= 1
            return self._work_queue.popleft()[1]

    def close(self) -> None:
        """Return when all submitted work is done."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            while self._threads:
                self._changed.wait()
