"""Promises of gil_contention.py."""

import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from kvstore.rpc.gil_contention import FIRST_HELD, LATE_NS, GilContention, receive_held, send_held, sleeps


def held(gil: GilContention) -> int:
    """Return the number of following calls that keep the GIL."""
    count = 0
    while gil.holds():
        count += 1
    return count


def test_a_late_copy_has_the_next_ones_made_with_the_gil() -> None:
    gil = GilContention()
    gil.copied(LATE_NS)
    assert gil.is_on
    assert held(gil) == FIRST_HELD
    assert not gil.is_on


def test_second_long_wait_was_for_the_gil_if_thread_slept_twice() -> None:
    gil = GilContention()
    gil.waited(0)
    assert gil.is_suspected
    time.sleep(0.001)  # a thread that has never slept counts as one that was not looked at
    gil.waited(sleeps())
    assert not gil.is_suspected
    assert held(gil) == 0, "the answer took that long"
    gil.waited(0)
    slept = sleeps()
    for _ in range(2):
        time.sleep(0.001)
    gil.waited(slept)
    assert held(gil) == FIRST_HELD


Pair = tuple[socket.socket, socket.socket]
LONG_MS = 10_000


@pytest.fixture
def pair() -> Iterator[Pair]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def test_a_full_or_broken_socket_takes_nothing(pair: Pair) -> None:
    near, far = pair
    while send_held(near.fileno(), bytes(1 << 16)):
        pass
    far.close()
    assert send_held(near.fileno(), b"a") == 0
    assert receive_held(near.fileno(), memoryview(bytearray(1)), LONG_MS) == 0


def test_no_other_thread_runs_meanwhile(pair: Pair) -> None:
    """The wait is shorter than the switch interval, which is long here: a thread that releases the GIL waits that long."""
    ran: list[int] = []
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            ran.append(0)
            del ran[:-1]

    before = sys.getswitchinterval()
    other = threading.Thread(target=compute)
    sys.setswitchinterval(0.5)
    try:
        other.start()
        begun = time.monotonic()
        for _ in range(20):
            send_held(pair[0].fileno(), b"a")
            receive_held(pair[1].fileno(), memoryview(bytearray(1)), 1)
        took = time.monotonic() - begun
    finally:
        over.set()
        sys.setswitchinterval(before)
        other.join()
    assert took < 5
