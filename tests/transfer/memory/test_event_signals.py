"""No number of signals ends `UninterruptibleEvent.wait_uninterruptibly`.

The test is separate from test_signal_safety.py because of tracing in CPython 3.11. While a signal waits for a main thread in C, a traced
thread enters no function. It spins and keeps the GIL from the other threads. Threads left by earlier tests do so too.
"""

import signal
import threading
from collections.abc import Iterator

import pytest

from kvstore.transfer.memory.signal_safety import UninterruptibleEvent


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
    signal.signal(signal.SIGALRM, before)


@pytest.mark.promise("handover-fenced")
def test_no_signal_ends_wait_uninterruptibly(strikes: list[int]) -> None:
    event, go_on, main = UninterruptibleEvent(200), threading.Lock(), threading.main_thread().ident
    assert main is not None
    sent: list[bool] = []

    def open_late() -> None:
        go_on.acquire()
        for _ in range(1000):
            signal.pthread_kill(main, signal.SIGALRM)
        sent.append(True)
        event.set()

    go_on.acquire()
    opener = threading.Thread(target=open_late)
    opener.start()
    with pytest.raises(Struck):
        try:
            go_on.release()
        finally:
            event.wait_uninterruptibly()
    assert sent
    opener.join()
    assert strikes
