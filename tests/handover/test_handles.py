"""Promises of handles.py: a caller waits, learns the error, and asks for things without waiting."""

import signal
from types import FrameType

import pytest

from kvstore.handover import handles
from kvstore.handover.handles import SendHandle
from kvstore.protocol.errors import Cancelled, DeadlineExceeded
from kvstore.testing.transfer.awaited import in_background, within
from kvstore.transfer.memory.signal_safety import UninterruptibleEvent


def test_a_request_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "END_GRACE_S", 0.0)
    handle = SendHandle(b"r", limit_s=0.01)
    assert not handle._over.wait(0.0)
    with within(0.01), pytest.raises(DeadlineExceeded, match="its blocks must stay"):
        handle.wait()
    assert not handle.is_fenced


def test_wait_raises_signal_exceptions_after_the_request_is_over() -> None:
    def strike(number: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code is UninterruptibleEvent.wait.__code__:
            raise KeyboardInterrupt
        signal.setitimer(signal.ITIMER_REAL, 0.01)  # it does not wait yet

    handle, went_on = SendHandle(b"r", limit_s=60), list[bool]()

    def cancelled_late() -> None:
        went_on.append(handle.is_abandoned)
        in_background(lambda: handle.finish(Cancelled("enough")))

    handle.on_cancel = cancelled_late
    before = signal.signal(signal.SIGALRM, strike)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            handle.wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert (went_on, handle.is_over, handle.is_fenced) == ([True], True, True)
