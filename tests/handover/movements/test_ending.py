"""Promises of ending.py: it is over once nothing moves and nobody is at the memory, or when that takes too long; told once."""

import threading
from collections.abc import Callable

import pytest

from kvstore.handover.movements.movement import Ending, Window
from kvstore.protocol.errors import Cancelled, KVStoreError
from kvstore.rpc.reactor import Reactor
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.memory.region import Region


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


class Scene:
    """One ending, on a clock of its own."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.reactor = Reactor(lambda: self.clock.now_ns)
        self.told: list[bool] = []
        self.ending = Ending(self.reactor, 10.0, self.told.append)

    def pass_time(self, seconds: float) -> None:
        self.clock.now_ns += int(seconds * 1e9)
        self.reactor.run_once(0)


def test_what_moves_is_awaited_and_after_a_failure_cancelled() -> None:
    scene, errors = Scene(), list[KVStoreError | None]()
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


def test_peers_that_are_at_the_memory_are_awaited() -> None:
    with TransferEngine("owner", TransferSettings(transports="tcp", rails="lo")) as engine:
        scene, window = Scene(), Window(engine, [Region(memoryview(bytearray(8)))], writable=True)
        window.regions[0].hold()
        scene.ending.begin([window], is_failed=True)
        scene.pass_time(1)
        assert scene.told == []
        window.regions[0].release()
        scene.pass_time(1)
        assert scene.told == [True]
        scene.reactor.close()


def test_what_does_not_end_is_given_up_and_said_so() -> None:
    scene, moving = Scene(), Moving()
    scene.ending.track(moving, lambda error: None)
    scene.ending.begin([], is_failed=True)
    scene.pass_time(9.9)
    assert scene.told == []
    scene.pass_time(0.1)
    assert scene.told == [False]
    moving.on_end(None)
    assert scene.told == [False]
    scene.reactor.close()


def test_a_movement_that_cannot_be_cancelled_for_a_mistake_is_awaited_like_any_other() -> None:
    scene, moving = Scene(), Moving()
    moving.cancel = lambda: 1 // 0  # type: ignore[method-assign, assignment]
    scene.ending.track(moving, lambda error: None)
    with pytest.raises(ZeroDivisionError):
        scene.ending.begin([], is_failed=True)
    scene.pass_time(10)
    assert scene.told == [False]
    scene.reactor.close()


def test_the_deadline_is_told_of_unless_it_ended_before() -> None:
    for is_late in (True, False):
        scene, expired = Scene(), threading.Event()
        scene.ending.expire_at(5_000_000_000, expired.set)
        if not is_late:
            scene.ending.begin([], is_failed=False)
        scene.pass_time(5)
        assert expired.is_set() == is_late
        scene.reactor.close()
