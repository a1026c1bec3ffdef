"""Event loop of one thread: descriptors by epoll, timers by monotonic time, and callbacks from other threads.

Callbacks run one after another in the thread that called `run`; state owned by that thread needs no locks. asyncio's
loop costs four times as much a request, which is most of the time of a small one (benchmarks/RESULTS.md).
"""

import heapq
import itertools
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Final, TypeVar

from kvstore.protocol.errors import Closed, DeadlineExceeded
from kvstore.rpc.busy_poll import BusyPoll
from kvstore.rpc.deadline import format_seconds

T = TypeVar("T")

READABLE: Final = select.EPOLLIN
WRITABLE: Final = select.EPOLLOUT
MIN_CANCELLED: Final = 64
"""Cancelled timers below which the heap is not rebuilt."""
STARVED_PAUSE_S: Final = 0.01
"""Pause after a round that failed for lack of memory."""
MAX_EVENTS: Final = 256
"""Descriptors served in a round before timers and callbacks from other threads."""

FAILED: Final = "a callback of the event loop failed"

log = logging.getLogger("kvstore.transfer")


class Timer:
    """A scheduled callback; `callback` is None once it has run or was cancelled. `cancel` is O(1), amortised."""

    __slots__ = ("_on_cancel", "callback", "when_ns")

    def __init__(self, when_ns: int, callback: Callable[[], None], on_cancel: Callable[[], None]) -> None:
        self.when_ns = when_ns
        self.callback: Callable[[], None] | None = callback
        self._on_cancel = on_cancel

    def cancel(self) -> None:
        """Keep the callback from running. A no-op after it has run, or a second time."""
        if self.callback is not None:
            self.callback = None
            self._on_cancel()


class _Repeated:
    """A periodic callback. It stays in its list while it runs, so a failure, even a MemoryError, does not end it."""

    __slots__ = ("callback", "due_ns", "interval_ns")

    def __init__(self, due_ns: int, interval_ns: int, callback: Callable[[], None]) -> None:
        self.due_ns = due_ns
        self.interval_ns = interval_ns
        self.callback = callback


class Reactor:
    """The event loop. `call_soon`, `call` and `stop` are thread-safe; everything else is for the loop's thread."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns, *, busy_poll: BusyPoll | None = None) -> None:
        """`busy_poll`: polling before a sleep (busy_poll.py); None or 0 us: none."""
        self._clock_ns = clock_ns
        self._busy_poll = busy_poll if busy_poll is not None and busy_poll.max_ns else None
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._timers: list[tuple[int, int, Timer]] = []
        """A heap. Cancelled timers stay until they are due or are more than half of it; most are deadlines of answered
        requests."""
        self._cancelled = 0
        self._repeated: list[_Repeated] = []
        self._repeat_ns: int | None = None
        """Time of the first due one; None without any."""
        self._serial = itertools.count()
        self._handed_over: deque[Callable[[], None]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, READABLE)
        self._stopping = False
        self._closed = False
        self._forgotten: set[int] = set()
        self._close_lock = threading.RLock()  # a signal handler may call `stop` while its own thread is inside
        self.after_events: list[Callable[[], None]] = []
        """Called after each round of events, to flush batches that formed during it."""

    def now_ns(self) -> int:
        return self._clock_ns()

    def register(self, fd: int, callback: Callable[[int], None], events: int = READABLE) -> None:
        """Call `callback(events)` whenever `fd` is ready. The caller owns the descriptor."""
        self._handlers[fd] = callback
        self._epoll.register(fd, events)

    def modify(self, fd: int, events: int) -> None:
        self._epoll.modify(fd, events)

    def unregister(self, fd: int) -> None:
        """Stop watching `fd`, which must still be open. An unregistered one is ignored."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)
            self._forgotten.add(fd)

    def call_at(self, when_ns: int, callback: Callable[[], None]) -> Timer:
        timer = Timer(when_ns, callback, self._on_cancel)
        heapq.heappush(self._timers, (when_ns, next(self._serial), timer))
        return timer

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        return self.call_at(self._clock_ns() + int(delay_s * 1e9), callback)

    def _on_cancel(self) -> None:
        self._cancelled += 1
        if self._cancelled > MIN_CANCELLED and 2 * self._cancelled > len(self._timers):
            self._timers = [entry for entry in self._timers if entry[2].callback is not None]
            heapq.heapify(self._timers)
            self._cancelled = 0

    def every(self, interval_s: float, callback: Callable[[], None]) -> None:
        """Call `callback` every `interval_s` while the reactor runs; after a late call the next one is a full interval
        later.
        """
        interval_ns = int(interval_s * 1e9)
        due_ns = self._clock_ns() + interval_ns
        self._repeated.append(_Repeated(due_ns, interval_ns, callback))
        self._repeat_ns = due_ns if self._repeat_ns is None else min(self._repeat_ns, due_ns)

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Run `callback` in the loop's thread in its next round. A no-op once the reactor is closed."""
        with self._close_lock:  # the descriptor's number may be another file's once closed
            if not self._closed:
                self._handed_over.append(callback)
                os.eventfd_write(self._wake_fd, 1)

    def call(self, function: Callable[[], T], *, deadline_s: float) -> T:
        """Run `function` in the loop's thread and return its result. For other threads only.

        Not for a thread whose signal handlers raise: an exception inside the future's code would leave its lock taken,
        and block the loop. Raises Closed, DeadlineExceeded (`function` is then not run, unless it had begun), and
        errors of `function`.
        """
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)

        if self._closed:
            raise Closed("the reactor is closed")
        self.call_soon(run)
        wait([future], deadline_s)
        if not future.done():
            future.cancel()
            raise DeadlineExceeded(f"the event loop did not answer within {format_seconds(deadline_s)}")
        return future.result()

    def run(self) -> None:
        """Serve until `stop`.

        A callback's exception is logged and does not end the loop, and neither does a MemoryError of the loop itself:
        unserved descriptors stay ready, and timers stay due.
        """
        while not self._stopping:
            try:
                self.run_once(self._wait_s())
            except MemoryError:
                time.sleep(STARVED_PAUSE_S)

    def run_once(self, timeout_s: float) -> None:
        """Run one round: events, callbacks of other threads, due timers, then `after_events`."""
        handlers, forgotten = self._handlers, self._forgotten
        forgotten.clear()
        for fd, events in self._epoll.poll(timeout_s, MAX_EVENTS) if self._busy_poll is None else self._poll(self._busy_poll, timeout_s):
            if fd == self._wake_fd:
                os.eventfd_read(self._wake_fd)
            elif fd not in forgotten:  # else closed earlier in this round; its number may be another connection's now
                try:  # `guarded`, inlined: the caches are cold after a sleep
                    handlers[fd](events)
                except Exception:
                    log.exception(FAILED)
        for _ in range(len(self._handed_over)):
            self.guarded(self._handed_over.popleft())
        self._run_timers()
        for callback in self.after_events:
            try:
                callback()
            except Exception:
                log.exception(FAILED)

    def _poll(self, busy: BusyPoll, timeout_s: float) -> list[tuple[int, int]]:
        """Return the pending events, or the first within the time."""
        poll, clock_ns = self._epoll.poll, time.monotonic_ns
        began_ns = clock_ns()
        if busy.is_on:
            end_ns = began_ns + min(busy.max_ns, int(timeout_s * 1e9))
            while not (ready := poll(0, MAX_EVENTS)) and clock_ns() < end_ns:
                pass
            if ready:
                busy.found()
                return ready
            if end_ns - began_ns < busy.max_ns:
                return ready  # a timer is due
            busy.missed()
            timeout_s -= busy.max_ns / 1e9
        ready = poll(timeout_s, MAX_EVENTS)
        if ready:
            busy.slept(clock_ns() - began_ns)
        return ready

    def _wait_s(self) -> float:
        if self._handed_over:
            return 0.0
        due_ns = self._repeat_ns
        if self._timers and (due_ns is None or self._timers[0][0] < due_ns):
            due_ns = self._timers[0][0]
        return 60.0 if due_ns is None else max(0.0, (due_ns - self._clock_ns()) / 1e9)

    def _run_timers(self) -> None:
        if not self._timers and self._repeat_ns is None:
            return
        now_ns = self._clock_ns()
        if self._repeat_ns is not None and self._repeat_ns <= now_ns:
            self._repeat(now_ns)
        while self._timers and self._timers[0][0] <= now_ns:
            timer = heapq.heappop(self._timers)[2]
            due, timer.callback = timer.callback, None
            if due is not None:
                self.guarded(due)
            else:
                self._cancelled -= 1

    def _repeat(self, now_ns: int) -> None:
        for repeated in self._repeated[:]:
            if repeated.due_ns <= now_ns:
                repeated.due_ns = now_ns + repeated.interval_ns
                self.guarded(repeated.callback)
        self._repeat_ns = min(repeated.due_ns for repeated in self._repeated)

    def guarded(self, callback: Callable[..., object], *args: Any) -> None:
        """Call `callback(*args)` and log its exception."""
        try:
            callback(*args)
        except Exception:
            log.exception(FAILED)

    def stop(self) -> None:
        """End `run` after the current round."""
        self._stopping = True
        self.call_soon(lambda: None)

    def close(self) -> None:
        """Close the reactor's own descriptors, not the registered ones. A second close is a no-op."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
            self._epoll.close()
            os.close(self._wake_fd)
