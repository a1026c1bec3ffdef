"""Promises of handles.py: a caller waits, learns the error, and asks for things without waiting."""

import pytest

from kvstore.handover import handles
from kvstore.handover.handles import Receiving, Sending
from kvstore.protocol.errors import Cancelled, DeadlineExceeded
from kvstore.transfer.testing.waiting import in_background, is_quiet, within


def test_who_waits_goes_on_once_it_is_over() -> None:
    handle = Receiving(b"r", limit_s=30)
    waiting = in_background(handle.wait)
    assert is_quiet(waiting)
    assert not handle.is_over
    assert not handle.is_fenced
    handle.finish(None)
    assert waiting.result(10) is None
    assert (handle.is_over, handle.error, handle.is_fenced, handle.wait_over(0)) == (True, None, True, True)


def test_an_error_is_raised_each_time_and_tells_whether_blocks_are_fenced() -> None:
    handle = Sending(b"r", limit_s=30)
    handle.finish(Cancelled("enough"), is_fenced=False)
    for _ in range(2):
        with pytest.raises(Cancelled, match="enough"):
            handle.wait()
    assert not handle.is_fenced


def test_a_request_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "PATIENCE_S", 0.0)
    handle = Sending(b"r", limit_s=0.01)
    assert not handle.wait_over(0.0)
    with within(0.01), pytest.raises(DeadlineExceeded, match="its blocks must stay"):
        handle.wait()
    assert not handle.is_fenced


def test_what_a_caller_asks_for_is_passed_on() -> None:
    asked: list[object] = []
    handle = Sending(b"r", limit_s=1)
    handle.on_ready, handle.on_cancel = asked.append, lambda: asked.append("cancel")
    handle.layer_ready(3)
    handle.all_ready()
    handle.cancel()
    assert asked == [3, None, "cancel"]
