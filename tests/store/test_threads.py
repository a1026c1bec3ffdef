"""Promises of threads.py: what they are given needs no thread that is not there, and too few are told at the start."""

import threading

import pytest

from kvstore.protocol.errors import ConfigError
from kvstore.store.threads import started
from kvstore.transfer.testing.waiting import PATIENCE_S, eventually
from tests.store.no_threads import no_more_threads


def test_all_its_threads_work_where_the_system_has_none_to_give_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    with started(3, "crew") as crew:
        no_more_threads(monkeypatch)
        together = threading.Barrier(3, timeout=PATIENCE_S)
        for done in [crew.submit(together.wait) for _ in range(3)]:
            done.result(PATIENCE_S)


def test_threads_that_the_system_does_not_give_are_told_and_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def there() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("crew-of-few")]

    no_more_threads(monkeypatch, after=2)
    with pytest.raises(ConfigError, match=r"3 threads \(crew-of-few\) cannot be had: can't start new thread"):
        started(3, "crew-of-few")
    eventually(lambda: not there(), "its threads have ended")
