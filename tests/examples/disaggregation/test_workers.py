"""disaggregation/workers.py: calls go to all processes at once, and what goes wrong in one is an error here, and no process is left."""

import os
import signal
import threading
from multiprocessing import active_children

import pytest
from disaggregation import workers
from disaggregation.workers import WorkerFailed, Workers

MODULE = "tests.examples.disaggregation.test_workers"


class Counter:
    """A served object."""

    def __init__(self, *, start: int) -> None:
        if start < 0:
            raise ValueError("below nothing")
        self._count = start

    def add(self, number: int) -> tuple[int, int]:
        self._count += number
        return self._count, os.getpid()

    def fail_at(self, count: int) -> None:
        if self._count == count:
            raise ValueError("this is the count")
        threading.Event().wait(60)

    def die_at(self, count: int) -> None:
        if self._count == count:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait(60)

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _short_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "END_TIMEOUT_S", 0.2)


def counters(*starts: int) -> Workers:
    return Workers("counters", [(MODULE, "Counter", {"start": start}) for start in starts])


def test_each_object_has_its_own_process_and_state() -> None:
    with counters(1, 10, 100) as group:
        assert [count for count, _ in group.call("add", 1)] == [2, 11, 101]
        again = group.call("add", 1)
        assert [count for count, _ in again] == [3, 12, 102]
        assert len({pid for _, pid in again} | {os.getpid()}) == 4
    assert not active_children()


def test_a_failure_is_told_though_others_are_still_busy() -> None:
    with counters(1, 2) as group, pytest.raises(WorkerFailed, match=r"(?s)fail_at of counters-1 failed.*this is the count"):
        group.call("fail_at", 2)
    assert not active_children(), "also the one that was busy"


def test_a_process_that_dies_is_noticed_at_once() -> None:
    with counters(1, 2) as group:
        with pytest.raises(WorkerFailed, match="die_at of counters-0: the process has ended"):
            group.call("die_at", 1)
        with pytest.raises(WorkerFailed, match="counters-0 has ended"):
            group.call("add", 1)
    assert not active_children()


def test_a_call_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    with counters(1) as group:
        group.call("add", 1)
        monkeypatch.setattr(workers, "DEADLINE_S", 0.05)
        with pytest.raises(WorkerFailed, match=r"counters-0: fail_at has taken more than 0\.05 s"):
            group.call("fail_at", 7)
    assert not active_children()


def test_an_object_that_cannot_be_made_fails_the_first_call() -> None:
    with counters(-1) as group, pytest.raises(WorkerFailed, match="below nothing"):
        group.call("add", 1)
