"""Promises of operations.py: prepare, move, follow; one end, in the reactor's thread, whatever fails in between."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any

import pytest

from kvstore.handover.movements.movement import Movement, Operation, StreamOperation
from kvstore.handover.movements.streams import Stream
from kvstore.protocol.errors import Cancelled, Closed, InvalidArgument, KVStoreError, Unreachable
from kvstore.rpc.reactor import Reactor
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.engine import TransferEngine
from tests.handover.loop import running


class Scene:
    """An engine, a peer's region, a reactor and a worker."""

    def __init__(self, stack: ExitStack) -> None:
        settings = TransferSettings(transports="tcp", rails="lo")
        self.engine, self.peer = (stack.enter_context(TransferEngine(name, settings)) for name in ("me", "peer"))
        self.region = self.peer.allocate(4096)
        self.remote = self.engine.import_region(self.engine.connect(self.peer.describe()), self.peer.export(self.region, writable=True))
        self.reactor: Reactor = stack.enter_context(running())
        self.worker = stack.enter_context(ThreadPoolExecutor(1))

    def operation(self, prepare: Any, follow: Any = None) -> Operation:
        return Operation(self.reactor, self.worker, self.engine, prepare, follow, deadline_s=10)


@pytest.fixture
def scene() -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(stack)


def ended(movement: Movement) -> tuple[KVStoreError | None, str]:
    """Its end, and the thread that told it."""
    told: SimpleQueue[tuple[KVStoreError | None, str]] = SimpleQueue()
    movement.begin(lambda error: told.put((error, threading.current_thread().name)))
    found = told.get(timeout=10)
    assert told.empty()
    return found


def test_bytes_are_prepared_moved_and_followed_in_this_order(scene: Scene) -> None:
    steps: list[bytes] = []

    def prepare() -> list[Any]:
        steps.append(bytes(scene.region.memory[:4]))
        return [(b"data", scene.remote, 4)]

    reactor_thread = scene.reactor.call(lambda: threading.current_thread().name, deadline_s=10)
    assert ended(scene.operation(prepare, lambda: steps.append(bytes(scene.region.memory[:4])))) == (None, reactor_thread)
    assert steps == [bytes(4), b"data"]


def test_what_fails_is_told(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    error, _ = ended(scene.operation(lambda: [(b"x", scene.remote, 5000)]))
    assert isinstance(error, InvalidArgument)
    scene.region.close()
    followed: list[int] = []
    error, _ = ended(scene.operation(lambda: [(b"x", scene.remote, 1)], lambda: followed.append(1)))
    assert "closed" in str(error) or "open to peers" in str(error)
    assert not followed
    error, _ = ended(scene.operation(lambda: 1 // 0))
    assert type(error) is KVStoreError
    assert "ZeroDivisionError" in str(error)
    assert "a hand-over failed" in caplog.text


def test_one_that_is_cancelled_while_it_is_prepared_or_moves_ends(scene: Scene) -> None:
    def prepare() -> list[Any]:
        operation.cancel()
        return [(b"x" * 4096, scene.remote, 4096)]

    operation = scene.operation(prepare, lambda: None)
    assert isinstance(ended(operation)[0], Cancelled | None)
    operation.cancel()  # over: changes nothing


def test_one_that_got_no_thread_has_ended_and_does_not_begin_later(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that cannot start a thread keeps what it was given, for one of its threads that is free later."""
    may_go, prepared = threading.Event(), list[int]()

    def prepare() -> list[Any]:
        prepared.append(1)
        return []

    with ThreadPoolExecutor(2) as worker:
        worker.submit(may_go.wait)
        operation = Operation(scene.reactor, worker, scene.engine, prepare, deadline_s=10)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            error, _ = ended(operation)
        assert isinstance(error, Closed)
        may_go.set()
    assert not prepared


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_part_of_a_stream_ends_as_its_move_does(scene: Scene) -> None:
    stream, connection = Stream(), Hung()
    serving = threading.Thread(target=stream.serve, args=(connection,))
    serving.start()
    assert ended(StreamOperation(scene.reactor, stream, lambda _: None))[0] is None

    def fail(_: object) -> None:
        raise Unreachable("broke")

    assert isinstance(ended(StreamOperation(scene.reactor, stream, fail))[0], Unreachable)
    serving.join()
    assert isinstance(ended(StreamOperation(scene.reactor, stream, lambda _: None))[0], Unreachable)
    cancelled = StreamOperation(scene.reactor, Stream(), lambda _: None)
    cancelled.cancel()
    assert isinstance(ended(cancelled)[0], Cancelled)


class Hung:
    """A connection that only knows how to close."""

    def close(self) -> None:
        pass
