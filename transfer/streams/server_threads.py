"""Threads that serve connections, one each at a time: as many as are set, and more for as long as those are held up.

A peer that takes what it asked for in drops holds a thread until its deadline. Were their number fixed, a few such peers would keep all
others waiting, who would take this side for dead.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

EXTRA_THREAD_DELAY_NS: Final = 50_000_000
"""What has waited for a thread for this long gets one more: well before its peer's `stall_timeout_s`."""
RETRY_NS: Final = 1_000_000_000
"""After the system had no thread: how long until it is asked again."""
log = logging.getLogger("kvstore.transfer")


class ServerThreads:
    """Thread-safe. `submit` and `close` never wait for what is served; `close` waits for its end."""

    def __init__(self, core_threads: int, max_threads: int) -> None:
        """`core_threads` threads stay, up to `max_threads` are made."""
        self._core_threads = core_threads
        self._max_threads = max_threads
        self._changed = threading.Condition()
        self._work_queue: deque[tuple[int, Callable[[], None]]] = deque()
        """What waits, and since when."""
        self._threads: set[threading.Thread] = set()
        self._available = 0
        """Threads that will take what is first in the line: idle ones and those that have just been made."""
        self._retry_ns = 0
        """No thread is made before this: the system had none."""
        self._is_closed = False

    def submit(self, work: Callable[[], None]) -> None:
        """Have a thread do this, in its turn. Nothing, once closed."""
        with self._changed:
            if self._is_closed:
                return
            now_ns = time.monotonic_ns()
            self._work_queue.append((now_ns, work))
            if self._available < len(self._work_queue) and len(self._threads) < self._core_threads and now_ns >= self._retry_ns:
                self._start()
            self._changed.notify()

    def next_ns(self) -> int | None:
        """When `run_due` is due; None: not before the next `submit`."""
        with self._changed:
            waits = len(self._work_queue) > self._available and len(self._threads) < self._max_threads
            return max(self._work_queue[self._available][0] + EXTRA_THREAD_DELAY_NS, self._retry_ns) if waits else None

    def run_due(self, now_ns: int) -> None:
        """Make a thread more for each that has waited for long."""
        with self._changed:
            overdue = sum(since_ns + EXTRA_THREAD_DELAY_NS <= now_ns for since_ns, _ in self._work_queue) - self._available
            for _ in range(min(overdue, self._max_threads - len(self._threads))):
                if now_ns >= self._retry_ns:
                    self._start()

    def _start(self) -> None:
        """One more, if the system has one."""
        thread = threading.Thread(target=self._run, name="kvstore-serve", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            log.error("the transfer engine has %d threads and gets no more for now: %s", len(self._threads), error)
            self._retry_ns = time.monotonic_ns() + RETRY_NS
            return
        self._threads.add(thread)
        self._available += 1

    def _run(self) -> None:
        with self._changed:
            self._available -= 1
        while (work := self._next()) is not None:
            work()
            del work  # with it goes its connection

    def _next(self) -> Callable[[], None] | None:
        """What is next. None: this thread is one too many, or all is over."""
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
        """Return when all that was submitted has been done."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            while self._threads:
                self._changed.wait()
