"""Promises of driver.py that need no daemon: an operation gets the results of its effects, and what they raise. More: test_sync.py."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.client.config import ClientSettings
from kvstore.client.core.effects import Operation, RunInThreadEffect, SpawnEffect
from kvstore.client.driver import Driver
from kvstore.client.operations import Operations
from kvstore.protocol.master_messages import CancelReservations
from tests.no_threads import no_more_threads

NOBODY = "unix:/no/such/master.sock"


@pytest.fixture
def driver() -> Iterator[Driver]:
    operations = Operations(ClientSettings(master=NOBODY))
    driver = Driver(operations)
    yield driver
    driver.close()
    operations.close()


def work(result: Any) -> Operation[Any]:
    return (yield RunInThreadEffect(lambda: result, 1))


def test_what_nobody_waits_for_is_done_in_a_thread_of_its_own(driver: Driver) -> None:
    here, done = threading.get_ident(), threading.Semaphore(0)
    threads: list[int] = []

    def note() -> None:
        threads.append(threading.get_ident())
        done.release()

    def aside() -> Operation[None]:
        yield RunInThreadEffect(note, 1)

    def operation() -> Operation[None]:
        yield SpawnEffect(aside())
        yield SpawnEffect(aside())

    driver.run(operation())
    for _ in range(2):
        assert done.acquire(timeout=60)
    assert here not in threads


def test_cleanup_runs_in_one_thread(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    reservations = driver._reservations
    may_end, tried = threading.Event(), threading.Semaphore(0)

    def cancel_all_unused() -> Operation[None]:
        yield RunInThreadEffect(tried.release, 1)
        yield RunInThreadEffect(lambda: may_end.wait(60), 1)

    monkeypatch.setattr(reservations, "cancel_all_unused", cancel_all_unused)
    reservations.unused.append(OverPut())
    with monkeypatch.context() as patch:
        no_more_threads(patch)
        assert driver.run(work(1)) == 1, "the call has its result all the same"
    assert not tried.acquire(blocking=False)
    for _ in range(20):
        driver.run(work(1))
    assert tried.acquire(timeout=60)
    assert not tried.acquire(blocking=False)
    may_end.set()
    assert driver._cleanup is not None
    assert driver._cleanup.acquire(timeout=60)
    driver._cleanup.release()
    driver.run(work(1))
    assert tried.acquire(timeout=60), "the next call has it tried again"
    reservations.unused.clear()


def test_interrupted_cleanup_start_is_retried(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = threading.Semaphore(0)

    def cancel_all_unused() -> Operation[None]:
        yield RunInThreadEffect(driver._reservations.unused.clear, 1)
        yield RunInThreadEffect(tried.release, 1)

    def strike(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(driver._reservations, "cancel_all_unused", cancel_all_unused)
    driver._reservations.unused.append(OverPut())
    with monkeypatch.context() as patch:
        patch.setattr("_thread.start_new_thread", strike)
        with pytest.raises(KeyboardInterrupt):
            driver.run(work(1))
    driver.run(work(1))
    assert tried.acquire(timeout=60)


class OverPut:
    """One that was interrupted."""

    def unused(self) -> CancelReservations:
        return CancelReservations([b"a"], [5])
