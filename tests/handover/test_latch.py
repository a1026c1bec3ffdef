"""Promises of latch.py: who waits goes on once it is opened, and `sit_out` has a limit. That no signal ends it: test_latch_signals.py."""

import signal
import time
from collections.abc import Iterator

import pytest

from kvstore.transfer.memory import signal_safety as latch_module
from kvstore.transfer.memory.signal_safety import Latch
from kvstore.transfer.testing.waiting import in_background, is_quiet


class Struck(BaseException):
    pass


@pytest.fixture
def strikes() -> Iterator[None]:
    """While it lasts, SIGALRM raises."""

    def strike(number: int, frame: object) -> None:
        raise Struck

    before = signal.signal(signal.SIGALRM, strike)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_all_who_wait_go_on_once_it_is_open() -> None:
    latch = Latch(60)
    waiting = [in_background(latch.wait) for _ in range(3)]
    assert all(is_quiet(one) for one in waiting)
    assert not latch.wait(0)
    assert not latch.wait(-1)
    assert not latch.is_open
    latch.open()
    latch.open()
    assert [one.result(10) for one in waiting] == [True] * 3
    assert latch.is_open
    assert latch.wait(0)
    latch.sit_out()


@pytest.mark.usefixtures("strikes")
def test_a_wait_is_ended_by_what_a_signal_handler_raises() -> None:
    latch = Latch(60)
    with pytest.raises(Struck):
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        latch.wait(30)
    assert not latch.wait(0)
    latch.open()
    assert latch.wait()


def test_to_sit_out_ends_at_the_limit() -> None:
    latch = Latch(0.01)
    began_ns = time.monotonic_ns()
    latch.sit_out()
    assert time.monotonic_ns() - began_ns < 30 * 1_000_000_000
    assert not latch.is_open


@pytest.mark.skipif(not latch_module._IS_STEADY, reason="this C library waits by the wall clock alone")
def test_a_step_of_the_wall_clock_ends_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 0.0)  # as if it had been set since, by half a century
    latch = Latch(60)
    monkeypatch.undo()
    waiting = in_background(latch.sit_out)
    assert is_quiet(waiting)
    latch.open()
    waiting.result(10)


def test_where_the_c_library_has_the_wall_clock_alone_it_waits_by_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latch_module, "_IS_STEADY", False)
    Latch(0.01).sit_out()
    latch = Latch(60)
    waiting = in_background(latch.sit_out)
    assert is_quiet(waiting)
    latch.open()
    waiting.result(10)
