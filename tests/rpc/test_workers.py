"""What a pool is given is done once, or never where it was refused."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.rpc.workers import submit_once
from kvstore.transfer.testing.waiting import PATIENCE_S


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_what_a_pool_takes_is_done(pool: ThreadPoolExecutor) -> None:
    done = threading.Event()
    assert submit_once(pool, done.set) is not None
    assert done.wait(PATIENCE_S)


def test_what_is_taken_back_in_time_is_not_done(pool: ThreadPoolExecutor) -> None:
    may_go, done = threading.Event(), list[str]()
    for _ in range(2):
        submit_once(pool, lambda: may_go.wait(PATIENCE_S))
    turn = submit_once(pool, lambda: done.append("taken back"))
    assert turn is not None
    assert turn.cancel()
    may_go.set()
    pool.shutdown()
    assert not done
    assert submit_once(pool, lambda: done.append("closed")) is None


def test_what_was_refused_for_want_of_a_thread_is_not_done_later(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go, done = threading.Event(), list[str]()
    submit_once(pool, lambda: may_go.wait(PATIENCE_S))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        assert submit_once(pool, lambda: done.append("refused")) is None
    may_go.set()
    pool.shutdown()
    assert not done


def test_what_a_free_thread_has_taken_meanwhile_was_not_refused(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits in the queue while a thread is being started, and one that has just become free takes it."""
    may_go, taken, done = threading.Event(), threading.Event(), list[str]()
    submit_once(pool, lambda: may_go.wait(PATIENCE_S))

    def no_thread_after_it_was_taken(thread: threading.Thread) -> None:
        may_go.set()
        assert taken.wait(PATIENCE_S)
        raise RuntimeError("can't start new thread")

    def work() -> None:
        done.append("once")
        taken.set()

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread_after_it_was_taken)
        turn = submit_once(pool, work)
    assert turn is not None
    assert not turn.cancel()
    pool.shutdown()
    assert done == ["once"]
