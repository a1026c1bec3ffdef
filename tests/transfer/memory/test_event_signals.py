"""No number of signals ends `UninterruptibleEvent.wait_uninterruptibly`.

Apart from test_latch.py, which is traced: CPython 3.11 has a traced thread enter no function while a signal waits for a main thread that
is in C, but spin and keep the interpreter from the others. Threads that earlier tests left do so, too.
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
