"""Promises of held_socket.py: bytes go and come without another thread of Python running meanwhile."""

import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from kvstore.rpc.held_socket import receive_held, send_held

Pair = tuple[socket.socket, socket.socket]
LONG_MS = 10_000


@pytest.fixture
def pair() -> Iterator[Pair]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def test_what_is_sent_is_received(pair: Pair) -> None:
    near, far = pair
    room = bytearray(10)
    assert send_held(near.fileno(), b"abc") == 3
    assert receive_held(far.fileno(), memoryview(room), LONG_MS) == 3
    assert room == b"abc" + bytes(7)
    assert send_held(near.fileno(), bytes(20)) == 20
    assert receive_held(far.fileno(), memoryview(room), LONG_MS) == 10, "no more than there is room for"


def test_nothing_is_there(pair: Pair) -> None:
    assert receive_held(pair[0].fileno(), memoryview(bytearray(1)), 0) == 0
    begun = time.monotonic()
    assert receive_held(pair[0].fileno(), memoryview(bytearray(1)), 20) == 0
    assert time.monotonic() - begun >= 0.02


def test_a_full_or_broken_socket_takes_nothing(pair: Pair) -> None:
    near, far = pair
    while send_held(near.fileno(), bytes(1 << 16)):
        pass
    far.close()
    assert send_held(near.fileno(), b"a") == 0
    assert receive_held(near.fileno(), memoryview(bytearray(1)), LONG_MS) == 0


def test_no_other_thread_runs_meanwhile(pair: Pair) -> None:
    """The wait is shorter than the switch interval, which is made long here: whoever lets go of the GIL has to wait for so long."""
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
