"""Promises of latch.py: who waits goes on once it is opened; `sit_out` is ended by nothing else but its limit."""

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from kvstore.handover.latch import Latch
from kvstore.transfer.testing.waiting import in_background, is_quiet


class Struck(BaseException):
    pass


@pytest.fixture
def strikes() -> Iterator[list[int]]:
    """While it lasts, SIGALRM raises; how often it has."""
    count: list[int] = []

    def strike(number: int, frame: object) -> None:
        count.append(number)
        raise Struck

    before = signal.signal(signal.SIGALRM, strike)
    yield count
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


def test_a_wait_is_ended_by_what_a_signal_handler_raises(strikes: list[int]) -> None:
    latch = Latch(60)
    with pytest.raises(Struck):
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        latch.wait(30)
    assert not latch.wait(0)
    latch.open()
    assert latch.wait()


@pytest.mark.no_cover  # CPython 3.11: a traced thread enters no function while a signal waits for a main thread that is in C, but spins
def test_to_sit_out_is_ended_by_no_signal_however_many_come(strikes: list[int]) -> None:
    latch, go_on, main = Latch(60), threading.Lock(), threading.main_thread().ident
    assert main is not None
    sent: list[bool] = []

    def open_late() -> None:
        go_on.acquire()
        for _ in range(1000):
            signal.pthread_kill(main, signal.SIGALRM)
        sent.append(True)
        latch.open()

    go_on.acquire()
    opener = threading.Thread(target=open_late)
    opener.start()
    with pytest.raises(Struck):
        try:
            go_on.release()
        finally:
            latch.sit_out()
    assert sent
    opener.join()
    assert strikes


def test_to_sit_out_ends_at_the_limit() -> None:
    latch = Latch(0.01)
    began_ns = time.monotonic_ns()
    latch.sit_out()
    assert time.monotonic_ns() - began_ns < 30 * 1_000_000_000
    assert not latch.is_open
