"""Safety of memory and state against exceptions of signal handlers.

CPython runs signal handlers in the main thread, between any two bytecodes and inside every wait of its own locks. A handler may raise
there, time and again: no `try` and no `finally` is safe from that. The contract: no call returns or raises while a thread of ours still
touches the caller's memory, and no change of shared state is cut in two. Three means, each for its case:

- `Shield` covers a whole call, locks and state too. Each handler runs as promptly as ever, but inside one of ours, which keeps its
  exception and raises it when the shield goes down. It cannot wait for what goes on after its end.
- `Gate` waits, without a limit, until all threads inside have left. It holds nothing back and can stand in a coroutine.
- `UninterruptibleEvent` waits until another thread opens it, with a limit. It holds also where the caller is struck on the way out of the call that has
  begun a request.

The waits of a gate and a latch are one call of the C library, which no signal ends. First in a `finally` they cannot be missed: CPython
looks for signals after calls, at jumps back and at the beginning of functions, and none of these lies before them. Threads other than the
main one see no signals and need none of this.

Source: pyarrow's SignalStopHandler replaces handlers around its calls in the same way as a shield.
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
"""More than a pthread_rwlock_t takes on any Linux: 56 bytes on x86-64."""
_libc = ctypes.CDLL(None)
_init, _enter, _shut, _leave = (getattr(_libc, f"pthread_rwlock_{name}") for name in ("init", "tryrdlock", "wrlock", "unlock"))
_init.argtypes = _libc.pthread_rwlock_timedwrlock.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
for _function in (_enter, _shut, _leave):
    _function.argtypes = (ctypes.c_void_p,)
P = ParamSpec("P")
T = TypeVar("T")
_SIGNALS: Final = sorted(map(int, signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}))
_handler_of: Final = _signal.getsignal
"""Without the look-up of an enum that makes `signal.getsignal` twenty times slower: each shield asks for every signal."""
_HAS_CLOCKWRLOCK: Final = hasattr(_libc, "pthread_rwlock_clockwrlock")
"""The C library waits by a clock that nobody sets: glibc from 2.30 on. Elsewhere a step of the wall clock ends or prolongs a wait."""
_MAX_END_S: Final = float(1 << 40)
"""The end of a latch without a limit: 34,000 years."""


class Gate:
    """A reader-writer lock: readers are the threads inside, and the one write lock, never given back, shuts it.

    `close_and_wait()` waits, uninterruptibly and without the GIL, until all who entered have left; nobody enters afterwards. Once only, and from
    one thread. To hold whatever is raised it must be the first thing in a `finally`.
    """

    __slots__ = ("_address", "_lock", "close_and_wait")

    def __init__(self) -> None:
        self._lock = _Lock()
        self._address = ctypes.addressof(self._lock)
        _init(self._address, None)
        # A partial, since a method would be a function, at whose beginning a signal handler may raise.
        self.close_and_wait: Callable[[], object] = partial(_shut, self._address)

    def enter(self) -> bool:
        """Go inside; False if the gate is shut. It is left by one `leave`, in whichever thread: readers are counted, not known by theirs,
        in glibc as in musl."""
        return not _enter(self._address)

    def leave(self) -> None:
        _leave(self._address)

    def run_inside(self, work: Callable[[], None]) -> bool:
        """Do `work` inside; False, and nothing is done, if the gate is shut. For threads that see no signals: any but the main one."""
        if not self.enter():
            return False
        try:
            work()
        finally:
            self.leave()
        return True


def begin_thread(work: Callable[[], object]) -> None:
    """Do `work` in a thread that the interpreter's end does not wait for. One call of C: `threading.Thread.start` waits for the thread on
    a condition, which a signal handler that raises leaves with its lock taken or released twice."""
    _thread.start_new_thread(work, ())


class Shield:
    """A context manager. For the main thread, where shields may be nested: each has what was raised since it went up, the inner first.

    At its end it raises the first exception that it kept, in place of one that was raised inside; later ones are dropped. The outermost
    costs some 5 us in the main thread, an inner one 1 us, and any next to nothing in other threads. Handlers that C code has put in place
    of Python's are put out of place.
    """

    _innermost: "Shield | None" = None

    # Of an object once they change: most shields see no signal, or are another thread's.
    raised: BaseException | None = None
    """What a handler has raised and is kept until the end."""
    thread_id = 0
    """Of the thread that it is up in; 0 while it is not."""
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
                    if callable(handler := _handler_of(number)):  # still: another handler may just have run
                        _defer_signal(number, handler)
            except BaseException:
                _restore_handlers()
                raise
        self.thread_id = thread_id
        Shield._innermost = self  # last: what a handler of ours raises while no shield is up goes through
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
                    del raised  # its traceback has this frame

    def cancels(self, cancel: Callable[[], object]) -> None:
        """What ends the work early: called once something was raised, in a thread of its own, for the main thread may hold any lock."""
        self._cancel = cancel
        if self.raised is not None:
            cancel()

    def defer(self, error: BaseException) -> None:
        """For handlers of ours: this was raised."""
        if self.raised is None:
            self.raised = error
            if self._cancel is not None:
                # Of the interpreter's own, for threading.Thread takes locks. Without a thread the work ends by its deadline.
                with contextlib.suppress(RuntimeError):
                    _thread.start_new_thread(self._cancel, ())


class _DeferringHandler:
    """In place of a program's handler: calls it, and keeps for the innermost shield what it raises."""

    __slots__ = ("handler",)

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self.handler(number, frame)
        except BaseException as error:
            shield = Shield._innermost
            if shield is None:  # one of ours outlived its shield, which was itself cut off when it went up or down
                raise
            shield.defer(error)
        handler = _handler_of(number)
        if Shield._innermost is not None and callable(handler):  # it may have chosen its successor
            _defer_signal(number, handler)


_replaced: Final[list[int]] = []
"""Signals that may have a handler of ours."""


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
    """In the child: a shield of a thread that was left behind is up for ever."""
    shield = Shield._innermost
    if shield is not None and shield.thread_id != threading.get_ident():
        Shield._innermost = None
        _restore_handlers()


os.register_at_fork(after_in_child=_after_fork)


def shielded(function: Callable[P, T]) -> Callable[P, T]:
    """A function that no exception of a handler cuts in two: what is raised meanwhile is raised at its end."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with Shield():
            return function(*args, **kwargs)

    return run


class _Timespec(ctypes.Structure):
    """struct timespec."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class UninterruptibleEvent:
    """See the module. Thread-safe. It is made shut, and opened once.

    `wait_uninterruptibly()` returns when it is open, or `limit_s` after it was made; until then nothing ends it, for it is to be called by who has been
    struck while he waited. First in a `finally` it cannot be missed: CPython looks for signals after calls, at jumps back and at the
    beginning of functions, and none of these lies before it.
    """

    __slots__ = ("_end", "_lock", "_waiting", "is_open", "wait_uninterruptibly")

    def __init__(self, limit_s: float) -> None:
        self.is_open = False
        self._waiting: list[threading.Lock] = []
        # Readers are counted, not known by their thread, in glibc as in musl: another one may unlock.
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
        # A partial, since a method would be a function, at whose beginning a handler may raise.
        self.wait_uninterruptibly: Callable[[], object] = partial(wait, ctypes.c_void_p(ctypes.addressof(self._end)))
        vars(self.wait_uninterruptibly)["memory"] = self._lock, self._end  # lives as long as the wait, also where the latch does not

    def open(self) -> None:
        """Let all go on who wait. A second time is a no-op. For one thread, which no signal handler strikes."""
        if not self.is_open:
            self.is_open = True
            for waiting in list(self._waiting):
                waiting.release()
            _leave(ctypes.addressof(self._lock))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it is open, or the time is over; whether it is open. What a signal handler raises ends it."""
        if not self.is_open:
            waiting = threading.Lock()
            waiting.acquire()
            self._waiting.append(waiting)  # whoever opens it has marked it so before he looks at this list
            if not self.is_open and not waiting.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
                self._waiting.remove(waiting)
        return self.is_open
