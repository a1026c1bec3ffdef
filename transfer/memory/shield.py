"""Holds back what signal handlers raise while the main thread works on state that others share, and raises it when that is over.

CPython runs signal handlers in the main thread, between any two instructions: no `try` and no `finally` is safe from their exceptions,
which may strike inside the `finally` too, or between the two halves of a change of state. While a shield is up each handler is run as
promptly as ever, but by one of ours, which keeps its exception. Threads other than the main one see no signals and need no shield.
Source: pyarrow's SignalStopHandler replaces handlers around its calls in the same way.

Unlike gate.py and handover/latch.py, which are one uninterruptible wait in a `finally` each, it covers a whole call, locks and state too;
but what comes while it goes down is raised at once, so it cannot wait for what goes on after its end.
"""

import _signal  # type: ignore[import-not-found]
import _thread
import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable
from itertools import compress
from types import FrameType, TracebackType
from typing import Any, Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_SIGNALS: Final = sorted(map(int, signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}))
_handler_of: Final = _signal.getsignal
"""Without the look-up of an enum that makes `signal.getsignal` twenty times slower: each shield asks for every signal."""


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
                        _keep_of(number, handler)
            except BaseException:
                _give_back_all()
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
                _give_back_all()
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

    def keep(self, error: BaseException) -> None:
        """For handlers of ours: this was raised."""
        if self.raised is None:
            self.raised = error
            if self._cancel is not None:
                # Of the interpreter's own, for threading.Thread takes locks. Without a thread the work ends by its deadline.
                with contextlib.suppress(RuntimeError):
                    _thread.start_new_thread(self._cancel, ())


class _Keeper:
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
            shield.keep(error)
        handler = _handler_of(number)
        if Shield._innermost is not None and callable(handler):  # it may have chosen its successor
            _keep_of(number, handler)


_kept: Final[list[int]] = []
"""Signals that may have a handler of ours."""


def _keep_of(number: int, handler: Callable[[int, FrameType | None], Any]) -> None:
    if not isinstance(handler, _Keeper):
        _kept.append(number)
        _signal.signal(number, _Keeper(handler))


def _give_back_all() -> None:
    while _kept:
        handler = _handler_of(_kept[-1])
        if isinstance(handler, _Keeper):
            _signal.signal(_kept[-1], handler.handler)
        _kept.pop()


def _after_fork() -> None:
    """In the child: a shield of a thread that was left behind is up for ever."""
    shield = Shield._innermost
    if shield is not None and shield.thread_id != threading.get_ident():
        Shield._innermost = None
        _give_back_all()


os.register_at_fork(after_in_child=_after_fork)


def shielded(function: Callable[P, T]) -> Callable[P, T]:
    """A function that no exception of a handler cuts in two: what is raised meanwhile is raised at its end."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with Shield():
            return function(*args, **kwargs)

    return run
