"""Promises of server_threads.py: a thread for everyone in the end, and no more of them than are needed."""

import threading
import time
from collections.abc import Iterator

import pytest

from kvstore.testing.transfer.awaited import PATIENCE_S, eventually
from kvstore.transfer.streams.server_threads import EXTRA_THREAD_DELAY_NS, RETRY_NS, ServerThreads

USUAL, MOST = 2, 4


class Work:
    """Something that lasts until it is let go."""

    def __init__(self) -> None:
        self.begun, self.let_go = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        self.let_go.wait(PATIENCE_S)


@pytest.fixture
def servers() -> Iterator[ServerThreads]:
    servers = ServerThreads(USUAL, MOST)
    yield servers
    servers.close()
    assert not servers._threads


def submit(servers: ServerThreads, count: int) -> list[Work]:
    found = [Work() for _ in range(count)]
    for work in found:
        servers.submit(work)
    return found


def let_go(works: list[Work]) -> None:
    for work in works:
        work.let_go.set()


def later_ns() -> int:
    return time.monotonic_ns() + EXTRA_THREAD_DELAY_NS


def begun(works: list[Work]) -> int:
    return sum(work.begun.is_set() for work in works)


def test_overdue_work_gets_an_extra_thread(servers: ServerThreads) -> None:
    held = submit(servers, USUAL)
    eventually(lambda: begun(held) == USUAL, "all threads are held")
    before_ns = time.monotonic_ns()
    waiting = submit(servers, 1)
    due_ns = servers.next_ns()
    assert due_ns is not None
    assert before_ns + EXTRA_THREAD_DELAY_NS <= due_ns <= time.monotonic_ns() + EXTRA_THREAD_DELAY_NS
    servers.run_due(due_ns - 1)
    assert (len(servers._threads), begun(waiting)) == (USUAL, 0)
    for _ in range(3):
        servers.run_due(due_ns)
    eventually(lambda: begun(waiting) == 1, "it is served")
    assert len(servers._threads) == USUAL + 1, "one is enough"
    assert servers.next_ns() is None
    let_go(held + waiting)
    eventually(lambda: len(servers._threads) == servers._available == USUAL, "the one too many has left")


def test_a_refused_thread_is_retried_later(
    servers: ServerThreads, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    held = submit(servers, USUAL)
    waiting, before_ns = submit(servers, 1), time.monotonic_ns()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        servers.run_due(later_ns())
        assert caplog.text.count("has 2 threads and cannot start another") == 1
        due_ns = servers.next_ns()
        assert due_ns is not None
        assert due_ns >= before_ns + RETRY_NS
        waiting += submit(servers, 1)
        servers.run_due(due_ns - 1)
        assert len(servers._threads) == USUAL
    servers.run_due(due_ns + RETRY_NS * int(PATIENCE_S))
    eventually(lambda: begun(waiting) == 2, "they have threads of their own")
    let_go(held + waiting)
