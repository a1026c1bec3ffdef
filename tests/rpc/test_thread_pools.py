"""Promises of workers.py: a pool's threads are there from its start, or what it is given is done once, or never where
it was refused.
"""

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from kvstore.protocol.errors import ConfigError
from kvstore.rpc.thread_pools import started, submit_once
from kvstore.testing.transfer.awaited import PATIENCE_S, eventually
from tests.no_threads import no_more_threads


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


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
    refused = partial(done.append, "refused")
    with monkeypatch.context() as patch:
        no_more_threads(patch)
        assert submit_once(pool, refused) is None
    assert sys.getrefcount(refused) == 2, "nor kept until then: its variable has it, and the argument here"
    may_go.set()
    pool.shutdown()
    assert not done


@pytest.mark.promise("interrupts-safe")
def test_started_pool_works_when_no_more_threads_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with started(3, "crew") as crew:
        no_more_threads(monkeypatch)
        together = threading.Barrier(3, timeout=PATIENCE_S)
        for done in [crew.submit(together.wait) for _ in range(3)]:
            done.result(PATIENCE_S)


def test_failed_start_of_a_pool_is_reported_and_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def there() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("crew-of-few")]

    no_more_threads(monkeypatch, after=2)
    with pytest.raises(ConfigError, match=r"cannot start 3 threads \(crew-of-few\): can't start new thread"):
        started(3, "crew-of-few")
    eventually(lambda: not there(), "its threads have ended")
