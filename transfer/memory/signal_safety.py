"""Protection of memory and state against exceptions raised by signal handlers.

CPython runs signal handlers in the main thread, between any two bytecodes and inside waits on its own locks. A handler
may raise there repeatedly, and neither `try` nor `finally` is safe from it. The contract: no call returns or raises
while a thread of ours still touches the caller's memory, and no change of shared state is left half done. Three tools:

- `Shield` covers a whole call, locks and state included. Handlers run promptly, inside a wrapper that defers their
  exceptions to the
  shield's exit. It does not wait for work that outlives it.
- `Gate` waits without limit until all threads inside have left. It defers nothing and works in a coroutine.
- `UninterruptibleEvent` waits, with a limit, until another thread sets it. It also holds if the handler raises on the
  way out of the call
  that began a request.

Gate and UninterruptibleEvent wait in one call of the C library, which no signal ends. As the first statement of a
`finally` it cannot be skipped: CPython checks for signals after calls, at backward jumps and on function entry, none of
which precedes it. Threads other than the main one receive no signals and need none of this.

Source: pyarrow's SignalStopHandler wraps handlers around its calls like a shield.
"""

import _signal  # type: ignore[import-not-found]
import _thread
import contextlib
import ctypes
import functools
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import compress
from types import FrameType, TracebackType
from typing import Any, Final, ParamSpec, TypeVar

_Lock: Final = ctypes.c_char * 256
"""Larger than a pthread_rwlock_t on any Linux; 56 bytes on x86-64."""
_libc = ctypes.CDLL(None)
_init, _enter, _shut, _leave = (getattr(_libc, f"pthread_rwlock_{name}") for name in ("init", "tryrdlock", "wrlock", "unlock"))
_init.argtypes = _libc.pthread_rwlock_timedwrlock.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
for _function in (_enter, _shut, _leave):
    _function.argtypes = (ctypes.c_void_p,)
P = ParamSpec("P")
T = TypeVar("T")
_SIGNALS: Final = sorted(map(int, signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}))
_handler_of: Final = _signal.getsignal
"""`signal.getsignal` without its enum look-up, which makes it twenty times slower; each shield queries every signal."""
_HAS_CLOCKWRLOCK: Final = hasattr(_libc, "pthread_rwlock_clockwrlock")
"""The C library can wait by the monotonic clock (glibc 2.30). Otherwise a step of the wall clock shortens or prolongs a
wait.
"""
_MAX_END_S: Final = float(1 << 40)
"""End of an event's wait without limit: 34,000 years."""


class Gate:
    """Barrier that waits for all threads inside: a reader-writer lock whose write lock is never released.

    `close_and_wait()` waits, uninterruptibly and without the GIL, until all threads inside have left; no thread enters
    afterwards. Call once, from one thread, as the first statement of a `finally`.
    """

    __slots__ = ("_address", "_lock", "close_and_wait")

    def __init__(self) -> None:
        self._lock = _Lock()
        self._address = ctypes.addressof(self._lock)
        _init(self._address, None)
        # A partial, not a method: a signal handler may raise on function entry.
        self.close_and_wait: Callable[[], object] = partial(_shut, self._address)

    def enter(self) -> bool:
        """Enter; returns False if the gate is closed. Any thread may `leave` for it: glibc and musl count readers
        without identifying them.
        """
        return not _enter(self._address)

    def leave(self) -> None:
        _leave(self._address)

    def run_inside(self, work: Callable[[], None]) -> bool:
        """Run `work` inside; returns False, without running it, if the gate is closed. For threads other than the main
        one.
        """
        if not self.enter():
            return False
        try:
            work()
        finally:
            self.leave()
        return True


def begin_thread(work: Callable[[], object]) -> None:
    """Run `work` in a daemon thread. One C call: `threading.Thread.start` waits on a condition, which an exception of a
    signal handler would leave in an inconsistent state.
    """
    _thread.start_new_thread(work, ())


class Shield:
    """Context manager that defers exceptions of signal handlers in the main thread. Nestable: the innermost shield
    defers them.

    On exit it raises the first deferred exception, in place of one raised inside; later ones are dropped. The outermost
    costs some 5 us in the main thread, an inner one 1 us, any almost nothing in other threads. Signal handlers
    installed by C code in place of Python's are replaced.
    """

    _innermost: "Shield | None" = None

    # Class attributes until they change: most shields see no signal, or are another thread's.
    raised: BaseException | None = None
    """The exception deferred to the exit."""
    thread_id = 0
    """Thread in which it is active; 0 if inactive."""
    _outer: "Shield | None" = None
    _cancel: Callable[[], object] | None = None

    def __enter__(self) -> "Shield":
        thread_id = threading.get_ident()
        if thread_id != threading.main_thread().ident:
            return self
        self._outer = Shield._innermost
        if self._outer is None:
            try:
                for number in compress(_SIGNALS, map(callable, map(_handler_of, _SIGNALS))):  # in C: a loop takes twice as long
                    if callable(handler := _handler_of(number)):  # recheck: another handler may just have run
                        _defer_signal(number, handler)
            except BaseException:
                _restore_handlers()
                raise
        self.thread_id = thread_id
        Shield._innermost = self  # last: without an active shield a wrapped handler's exception propagates
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self.thread_id:
            return
        try:
            Shield._innermost = self._outer
            self.thread_id = 0
            if self._outer is None:
                _restore_handlers()
        finally:
            raised, self.raised = self.raised, None
            if raised is not None:
                try:
                    raise raised
                finally:
                    del raised  # its traceback refers to this frame

    def cancels(self, cancel: Callable[[], object]) -> None:
        """Set the function that ends the work early. It is called once an exception is deferred, in another thread, as
        the main thread may hold any lock.
        """
        self._cancel = cancel
        if self.raised is not None:
            cancel()

    def defer(self, error: BaseException) -> None:
        """Defer an exception. Called by wrapped handlers."""
        if self.raised is None:
            self.raised = error
            if self._cancel is not None:
                # Not threading.Thread, which takes locks. Without a thread the work ends by its deadline.
                with contextlib.suppress(RuntimeError):
                    _thread.start_new_thread(self._cancel, ())


class _DeferringHandler:
    """Wrapper of a program's signal handler: calls it and defers its exception to the innermost shield."""

    __slots__ = ("handler",)

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self.handler(number, frame)
        except BaseException as error:
            shield = Shield._innermost
            if shield is None:  # the wrapper outlived its shield, which was itself interrupted on entry or exit
                raise
            shield.defer(error)
        handler = _handler_of(number)
        if Shield._innermost is not None and callable(handler):  # the handler may have installed another one
            _defer_signal(number, handler)


_replaced: Final[list[int]] = []
"""Signals that may have a wrapped handler."""


def _defer_signal(number: int, handler: Callable[[int, FrameType | None], Any]) -> None:
    if not isinstance(handler, _DeferringHandler):
        _replaced.append(number)
        _signal.signal(number, _DeferringHandler(handler))


def _restore_handlers() -> None:
    while _replaced:
        handler = _handler_of(_replaced[-1])
        if isinstance(handler, _DeferringHandler):
            _signal.signal(_replaced[-1], handler.handler)
        _replaced.pop()


def _after_fork() -> None:
    """Deactivate, in the child, a shield of a thread that does not exist there."""
    shield = Shield._innermost
    if shield is not None and shield.thread_id != threading.get_ident():
        Shield._innermost = None
        _restore_handlers()


os.register_at_fork(after_in_child=_after_fork)


def shielded(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: exceptions of signal handlers are raised only when the function has ended."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with Shield():
            return function(*args, **kwargs)

    return run


class _Timespec(ctypes.Structure):
    """struct timespec."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class UninterruptibleEvent:
    """Event whose wait no signal handler can end. Thread-safe; set once.

    `wait_uninterruptibly()` returns when it is set, or `limit_s` after it was made. Call it as the first statement of a
    `finally`, after an interrupted `wait`.
    """

    __slots__ = ("_end", "_lock", "_waiting", "is_set", "wait_uninterruptibly")

    def __init__(self, limit_s: float) -> None:
        self.is_set = False
        self._waiting: list[threading.Lock] = []
        # glibc and musl count readers without identifying them: another thread may unlock.
        self._lock = _Lock()
        address = ctypes.addressof(self._lock)
        _init(address, None)
        _enter(address)
        if _HAS_CLOCKWRLOCK:
            now_s, wait = time.monotonic(), partial(_libc.pthread_rwlock_clockwrlock, ctypes.c_void_p(address), time.CLOCK_MONOTONIC)
        else:
            now_s, wait = time.time(), partial(_libc.pthread_rwlock_timedwrlock, address)
        parts_s, whole_s = math.modf(min(now_s + limit_s, _MAX_END_S))
        self._end = _Timespec(int(whole_s), int(parts_s * 1e9))
        # A partial, not a method: a signal handler may raise on function entry.
        self.wait_uninterruptibly: Callable[[], object] = partial(wait, ctypes.c_void_p(ctypes.addressof(self._end)))
        vars(self.wait_uninterruptibly)["memory"] = self._lock, self._end  # lives as long as the wait, even if the event does not

    def set(self) -> None:
        """Set the event and wake all waiters. Idempotent. For one thread that receives no signals."""
        if not self.is_set:
            self.is_set = True
            for waiting in list(self._waiting):
                waiting.release()
            _leave(ctypes.addressof(self._lock))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it is set or the timeout is over; returns whether it is set. An exception of a signal handler
        ends the wait.
        """
        if not self.is_set:
            waiting = threading.Lock()
            waiting.acquire()
            self._waiting.append(waiting)  # `set` sets the flag before it reads this list
            if not self.is_set and not waiting.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
                self._waiting.remove(waiting)
        return self.is_set
