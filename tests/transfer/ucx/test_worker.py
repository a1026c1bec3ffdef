"""One UCX worker a device, shared, progressed by the threads that wait; what is given up moves no byte any more."""

import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.protocol.errors import ConfigError, Unreachable
from kvstore.testing.transfer.awaited import PATIENCE_S, SHORT_S, SOON_S, eventually, in_background
from kvstore.transfer.ucx import worker as ucx_worker
from kvstore.transfer.ucx.worker import TaggedMessage, UcxOperation, UcxWorker
from tests.no_threads import no_more_threads

pytest.importorskip("ucxx")
TAG = 7


@pytest.fixture
def worker() -> Iterator[UcxWorker]:
    worker = UcxWorker.acquire("")
    yield worker
    worker.release()


@pytest.fixture
def endpoint(worker: UcxWorker) -> Iterator[Any]:
    """To the worker itself."""
    endpoint = worker.endpoint(worker.address)
    yield endpoint
    worker.close_endpoint(endpoint)


def receive(endpoint: Any, part: bytearray, tag: int = TAG) -> UcxOperation:
    return UcxOperation([TaggedMessage(endpoint.tag_recv, memoryview(part), tag)])


def send(endpoint: Any, part: bytes, tag: int = TAG) -> UcxOperation:
    return UcxOperation([TaggedMessage(endpoint.tag_send, part, tag)])


def test_a_device_has_one_worker_until_its_last_user_has_left() -> None:
    first, second = UcxWorker.acquire("lo"), UcxWorker.acquire("lo")
    assert first is second
    first.release()
    third = UcxWorker.acquire("lo")
    assert third is first
    third.release()
    second.release()
    fourth = UcxWorker.acquire("lo")
    assert fourth is not first
    fourth.release()


def test_a_worker_without_a_thread_leaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    UcxWorker.acquire("").release()  # what UCX opens once
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        no_more_threads(patch)
        for _ in range(5):
            with pytest.raises(Unreachable, match="no thread can be started for UCX: can't start new thread"):
                UcxWorker.acquire("")
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
    UcxWorker.acquire("").release()


def test_threads_that_wait_serve_one_another(worker: UcxWorker, endpoint: Any) -> None:
    parts = [bytearray(1) for _ in range(8)]
    operations = [receive(endpoint, part, tag) for tag, part in enumerate(parts, 1)]
    for operation in operations:
        worker.post(operation)
    waiting = [in_background(lambda operation=operation: worker.wait(operation, PATIENCE_S)) for operation in operations]  # type: ignore[misc]
    for tag in range(8, 0, -1):
        outgoing = send(endpoint, bytes([tag]), tag)
        worker.post(outgoing)
        worker.wait(outgoing, PATIENCE_S)
    for future in waiting:
        future.result(SOON_S)
    assert parts == [bytes([tag]) for tag in range(1, 9)]


def leads(worker: UcxWorker, endpoint: Any, operation: UcxOperation) -> bool:
    if worker._leading is worker._background:  # it was quicker than the threads that wait: a message sends it away
        worker.post(send(endpoint, b"x", 9))
    return worker._leading is operation


def test_leadership_passes_to_a_waiter_or_the_background(worker: UcxWorker, endpoint: Any) -> None:
    first, second = receive(endpoint, bytearray(1), 1), receive(endpoint, bytearray(1), 2)
    worker.post(first)
    leading = in_background(lambda: worker.wait(first, PATIENCE_S))
    eventually(lambda: leads(worker, endpoint, first), "the one that waits leads")
    worker.post(second)
    waiting = in_background(lambda: worker.wait(second, PATIENCE_S))
    worker.interrupt(first)
    leading.result(SOON_S)
    eventually(lambda: leads(worker, endpoint, second), "the other one leads")
    worker.interrupt(second)
    waiting.result(SOON_S)
    worker.close_endpoint(endpoint)
    for operation in (first, second):
        worker.finish(operation)
    eventually(lambda: worker._leading is worker._background, "the background leads")


def test_a_leader_is_not_followed_by_what_nobody_waits_for(worker: UcxWorker, endpoint: Any) -> None:
    """It precedes a message that a thread waits for."""
    first, nobodys, second = (receive(endpoint, bytearray(1), tag) for tag in (1, 2, 3))
    worker.post(first)
    leading = in_background(lambda: worker.wait(first, PATIENCE_S))
    eventually(lambda: leads(worker, endpoint, first), "the one that waits leads")
    worker.post(nobodys)
    worker.post(second)
    waiting = in_background(lambda: worker.wait(second, PATIENCE_S))
    eventually(lambda: second.waiters > 0 and worker._is_parked, "it waits, and the background leaves it to those that do")
    worker.interrupt(first)
    leading.result(SOON_S)
    outgoing = send(endpoint, b"x", 3)
    worker.post(outgoing)
    waiting.result(SOON_S)
    worker.close_endpoint(endpoint)
    for operation in (first, nobodys):
        worker.finish(operation)


def test_what_nobody_waits_for_is_progressed_all_the_same(worker: UcxWorker, endpoint: Any) -> None:
    part = bytearray(8 << 20)
    incoming, outgoing = receive(endpoint, part), send(endpoint, b"\1" * (8 << 20))
    worker.post(incoming)
    worker.post(outgoing)
    eventually(lambda: not incoming.requests and not outgoing.requests, "both are over")


def test_an_interrupted_wait_returns_and_is_not_posted_again(worker: UcxWorker, endpoint: Any) -> None:
    operation = receive(endpoint, bytearray(1))
    worker.post(operation)
    waiting = in_background(lambda: worker.wait(operation, PATIENCE_S))
    worker.interrupt(operation)
    waiting.result(SOON_S)
    with pytest.raises(Unreachable):
        worker.post(operation)
    worker.close_endpoint(endpoint)
    worker.finish(operation)
    assert not operation.requests


def test_what_only_shares_memory_is_refused_and_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    there = UcxWorker.acquire("lo")
    address = there.address
    monkeypatch.setenv("UCX_TLS", "posix,self")
    with pytest.raises(ConfigError, match="UCX_TLS is posix,self, which allows only shared memory"):
        UcxWorker.acquire("")
    api = there.api
    other = api.UCXWorker(api.UCXContext({"TLS": "posix,self"}, (api.Feature.TAG, api.Feature.WAKEUP)))
    with pytest.raises(Unreachable):
        there.endpoint(other.address.tobytes())
    assert there.endpoint(address)
    there.release()


def test_what_cannot_be_taken_back_condemns_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here for want of the endpoint's end; in life because a peer stopped in the middle of a message."""
    monkeypatch.setattr(ucx_worker, "CANCEL_TIMEOUT_S", SHORT_S)
    worker = UcxWorker.acquire("lo")
    endpoint, part = worker.endpoint(worker.address), bytearray(1)
    operation, other = receive(endpoint, part), receive(endpoint, bytearray(1), TAG + 1)
    worker.post(operation)
    worker.post(other)
    waiting = in_background(lambda: worker.wait(other, PATIENCE_S))
    worker.finish(operation)
    with pytest.raises(Unreachable):
        waiting.result(SOON_S)
    worker.close_endpoint(endpoint)
    for act in (lambda: worker.endpoint(worker.address), lambda: worker.post(send(endpoint, b"x")), lambda: worker.watch(0, worker.close)):
        with pytest.raises(Unreachable):
            act()
    worker.flush()
    new = UcxWorker.acquire("lo")
    assert new is not worker
    worker.release()
    assert UcxWorker.acquire("lo") is new
    new.release()
    new.release()


def test_a_leader_that_sleeps_is_woken_when_ucx_cannot_be_armed(worker: UcxWorker, endpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a peer that stops while messages wait for room in shared memory."""
    operation, outgoing = receive(endpoint, bytearray(1)), send(endpoint, b"x")
    eventually(lambda: worker._leading is worker._background, "the thread in the background leads")
    monkeypatch.setattr(ucx_worker, "ARM_TRIES", 0)
    worker.post(operation)
    worker.post(outgoing)
    monkeypatch.undo()
    worker.wait(operation, PATIENCE_S)
    assert not operation.requests


def test_a_watched_descriptor_calls_back_once_it_can_be_read(worker: UcxWorker) -> None:
    reading, writing = os.pipe()
    called = threading.Event()

    def callback() -> None:
        worker.unwatch(reading)
        called.set()

    worker.watch(reading, callback)
    os.write(writing, b"x")
    assert called.wait(SOON_S)
    worker.unwatch(reading)
    os.close(reading)
    os.close(writing)
