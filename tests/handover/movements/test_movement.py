"""Promises of movement.py: one end of each movement, windows that fence late bytes off, and the end of a request."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any

import pytest

from kvstore.handover.movements.movement import LayerWindow, Movement, MovementEnd, MoveOperation
from kvstore.protocol.errors import Cancelled, Closed, Denied, InvalidArgument, KVStoreError, StaleHandle
from kvstore.rpc.reactor import Reactor
from kvstore.testing.transfer.awaited import eventually
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.engine import TransferEngine
from tests.handover.loop import running


@pytest.fixture
def engines() -> Iterator[tuple[TransferEngine, TransferEngine]]:
    with ExitStack() as stack:
        settings = TransferSettings(transports="shm,tcp", rails="lo")
        yield stack.enter_context(TransferEngine("owner", settings)), stack.enter_context(TransferEngine("peer", settings))


def await_closed(window: LayerWindow) -> None:
    """The engine may still be at memory for a moment after its peer has been answered."""
    eventually(window.close, "nobody is at the window's memory")


def test_late_write_finds_the_window_closed(engines: tuple[TransferEngine, TransferEngine]) -> None:
    owner, peer = engines
    pool = owner.allocate(4096)
    window = LayerWindow(owner, [pool], writable=True)
    remote = peer.import_region(peer.connect(owner.describe()), window.descriptions[0])
    assert set(remote.remote.descriptors) == {"tcp"}
    peer.transfer([(b"in time", remote, 7)])
    assert bytes(pool.memory[:7]) == b"in time"
    await_closed(window)
    with pytest.raises(StaleHandle):
        peer.transfer([(b"too late", remote, 8)])
    assert bytes(pool.memory[:7]) == b"in time"
    again = LayerWindow(owner, [pool], writable=True)
    peer.transfer([(b"another", peer.import_region(remote.peer, again.descriptions[0]), 7)])
    await_closed(again)
    pool.close()


def test_readers_may_map_but_not_write(engines: tuple[TransferEngine, TransferEngine]) -> None:
    owner, peer = engines
    pool = owner.allocate(4096)
    window = LayerWindow(owner, [pool], writable=False)
    remote = peer.import_region(peer.connect(owner.describe()), window.descriptions[0])
    assert set(remote.remote.descriptors) == {"shm", "tcp"}
    with pytest.raises(Denied):
        peer.transfer([(b"no", remote, 2)])
    found = bytearray(4)
    peer.transfer([(remote, found, 4)])
    await_closed(window)
    with pytest.raises(StaleHandle):
        peer.transfer([(remote, found, 4)])
    pool.close()


class Scene:
    """An engine, a peer's region, a reactor and a worker."""

    def __init__(self, stack: ExitStack) -> None:
        settings = TransferSettings(transports="tcp", rails="lo")
        self.engine, self.peer = (stack.enter_context(TransferEngine(name, settings)) for name in ("me", "peer"))
        self.region = self.peer.allocate(4096)
        self.remote = self.engine.import_region(self.engine.connect(self.peer.describe()), self.peer.export(self.region, writable=True))
        self.reactor: Reactor = stack.enter_context(running())
        self.worker = stack.enter_context(ThreadPoolExecutor(1))

    def operation(self, prepare: Any, follow: Any = None) -> MoveOperation:
        return MoveOperation(self.reactor, self.worker, self.engine, prepare, follow, deadline_s=10)


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
    assert "a transfer of a hand-over failed" in caplog.text


def test_cancelled_operation_ends_in_any_phase(scene: Scene) -> None:
    def prepare() -> list[Any]:
        operation.cancel()
        return [(b"x" * 4096, scene.remote, 4096)]

    operation = scene.operation(prepare, lambda: None)
    assert isinstance(ended(operation)[0], Cancelled | None)
    operation.cancel()  # over: changes nothing


def test_operation_without_a_thread_ends_and_never_begins(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that cannot start a thread keeps what it was given, for one of its threads that is free later."""
    may_go, prepared = threading.Event(), list[int]()

    def prepare() -> list[Any]:
        prepared.append(1)
        return []

    with ThreadPoolExecutor(2) as worker:
        worker.submit(may_go.wait)
        operation = MoveOperation(scene.reactor, worker, scene.engine, prepare, deadline_s=10)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            error, _ = ended(operation)
        assert isinstance(error, Closed)
        may_go.set()
    assert not prepared


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


class Clock:
    now_ns = 0


class Moving:
    """A movement that ends when the test says so."""

    is_cancelled = False
    on_end: Callable[[KVStoreError | None], None]

    def begin(self, on_end: Callable[[KVStoreError | None], None]) -> None:
        self.on_end = on_end

    def cancel(self) -> None:
        self.is_cancelled = True


class EndingScene:
    """One ending, on a clock of its own."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.reactor = Reactor(lambda: self.clock.now_ns)
        self.told: list[bool] = []
        self.ending = MovementEnd(self.reactor, 10.0, self.told.append)

    def pass_time(self, seconds: float) -> None:
        self.clock.now_ns += int(seconds * 1e9)
        self.reactor.run_once(0)


def test_what_moves_is_awaited_and_after_a_failure_cancelled() -> None:
    scene, errors = EndingScene(), list[KVStoreError | None]()
    good, bad = Moving(), Moving()
    scene.ending.track(good, errors.append)
    scene.ending.track(bad, errors.append)
    good.on_end(None)
    scene.ending.begin([], is_failed=True)
    assert (good.is_cancelled, bad.is_cancelled, scene.told) == (False, True, [])
    error = Cancelled("")
    bad.on_end(error)
    assert (errors, scene.told) == ([None, error], [True])
    scene.ending.begin([], is_failed=True)
    scene.pass_time(60)
    assert scene.told == [True]
    scene.reactor.close()


def test_what_does_not_end_is_given_up_and_said_so() -> None:
    scene, moving = EndingScene(), Moving()
    scene.ending.track(moving, lambda error: None)
    scene.ending.begin([], is_failed=True)
    scene.pass_time(9.9)
    assert scene.told == []
    scene.pass_time(0.1)
    assert scene.told == [False]
    moving.on_end(None)
    assert scene.told == [False]
    scene.reactor.close()


def test_movement_whose_cancel_raises_is_awaited() -> None:
    scene, moving = EndingScene(), Moving()
    moving.cancel = lambda: 1 // 0  # type: ignore[method-assign, assignment]
    scene.ending.track(moving, lambda error: None)
    with pytest.raises(ZeroDivisionError):
        scene.ending.begin([], is_failed=True)
    scene.pass_time(10)
    assert scene.told == [False]
    scene.reactor.close()


def test_the_deadline_is_told_of_unless_it_ended_before() -> None:
    for is_late in (True, False):
        scene, expired = EndingScene(), threading.Event()
        scene.ending.expire_at(5_000_000_000, expired.set)
        if not is_late:
            scene.ending.begin([], is_failed=False)
        scene.pass_time(5)
        assert expired.is_set() == is_late
        scene.reactor.close()
