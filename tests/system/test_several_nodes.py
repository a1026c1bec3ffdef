"""A batch that lies on three nodes of other hosts, asked of all at once, when one of them is struck in the midst: what the living have is
returned, in time, and nothing is written into the caller's buffers once the call is over."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from kvstore.client.config import ClientSettings
from kvstore.client.sync import Client
from kvstore.protocol.errors import DeadlineExceeded
from kvstore.protocol.settings import Size
from kvstore.testing.transfer.awaited import in_background, is_quiet, within
from kvstore.transfer.config import TransferSettings
from tests.system.history import value_of
from tests.system.running import DEADLINE_S, System, until

NAMES = ("n0", "n1", "n2")
VICTIM, LIVING = "n0", ("n1", "n2")
BLOCK_BYTES = 256 << 10
SHARE = 72
"""Blocks on each node: three parts of a get and more, of which two are on their way at a time."""
SHORT_S = 1.0
STAMP = 0xA5
WAYS = {"message": ClientSettings(engine_min_bytes=Size(1 << 40)), "engine": ClientSettings(engine_min_bytes=Size(1))}


class Struck(BaseException):
    """Raised by the signal handler."""


class Scene:
    """Three nodes, a client that is on none of their hosts, and a batch of which each has a share, the victim's first."""

    def __init__(self, system: System, settings: ClientSettings) -> None:
        self.system = system
        self.client: Client = system.remote_client(settings=settings, transfer=TransferSettings(transports="tcp", rails="lo"))
        shares: dict[str, list[bytes]] = {name: [] for name in NAMES}
        values: dict[bytes, bytes] = {}
        while min(map(len, shares.values())) < SHARE:
            keys = [os.urandom(8) for _ in range(8)]
            values |= {key: value_of(key, 0, BLOCK_BYTES) for key in keys}
            self.client.put_batch(keys, [values[key] for key in keys])  # to one of them
            for key, places in zip(keys, self.client.locate(keys), strict=True):
                shares[places[0].node].append(key)
        self.names = [name for _ in range(SHARE) for name in NAMES]
        self.keys = [shares[name].pop() for name in self.names]
        self.values = [values[key] for key in self.keys]
        self.victim = system.nodes[VICTIM].pid
        self.get(self.buffers(), DEADLINE_S)  # engines are connected, slabs shown

    def buffers(self) -> "np.ndarray[tuple[int, int], np.dtype[np.uint8]]":
        return np.zeros((len(self.keys), BLOCK_BYTES), np.uint8)

    def get(self, buffers: np.ndarray, deadline_s: float) -> list[int | None]:
        return self.client.get_batch_into(self.keys, list(buffers), deadline_s=deadline_s)

    def begin(self, buffers: np.ndarray, deadline_s: float = DEADLINE_S) -> "Future[list[int | None]]":
        return in_background(lambda: self.get(buffers, deadline_s))

    def is_right(self, buffers: np.ndarray, index: int) -> bool:
        return bool(buffers[index, -1] == self.values[index][-1]) and bytes(buffers[index]) == self.values[index]

    def until_the_living_have_answered(self, buffers: np.ndarray) -> None:
        wanted = [index for index, name in enumerate(self.names) if name in LIVING]
        until(lambda: all(self.is_right(buffers, index) for index in wanted), "what the living have")

    def begin_with_one_stopped(self) -> "tuple[np.ndarray, Future[list[int | None]]]":
        """A get that the living nodes have answered, and one does not."""
        buffers = self.buffers()
        os.kill(self.victim, signal.SIGSTOP)
        waiting = self.begin(buffers)
        self.until_the_living_have_answered(buffers)
        return buffers, waiting

    def check(self, buffers: np.ndarray, sizes: list[int | None], *, may_miss: bool = False) -> int:
        """Hits are right, and of the victim's alone some may be missing: how many are."""
        for index, (name, size) in enumerate(zip(self.names, sizes, strict=True)):
            assert size == BLOCK_BYTES or (may_miss and name == VICTIM and size is None), (name, size)
            assert size is None or self.is_right(buffers, index)
        return sizes.count(None)

    def check_nothing_comes_late(self, buffers: np.ndarray) -> None:
        """The call is over, and the victim is stopped: when it goes on, the buffers stay as they are."""
        buffers.fill(STAMP)
        os.kill(self.victim, signal.SIGCONT)
        others = self.buffers()
        self.check(others, self.get(others, DEADLINE_S))
        assert (buffers == STAMP).all()
        assert sum(self.client._driver.pool.counts(address)[0] for address in list(self.client._driver.pool._state._endpoints)) == 0


@contextlib.contextmanager
def scene_in(folder: Path, way: str) -> Iterator[Scene]:
    with System(folder) as system:
        system.start_master(0, "--node-ttl-s", "3600")  # one that is stopped is alive
        for name in NAMES:
            system.start_node(name, "--dram", "64MiB")
        scene = Scene(system, WAYS[way])
        with scene.client:
            yield scene


@pytest.fixture(scope="module", params=list(WAYS))
def lasting(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Scene]:
    """For those whose victim goes on afterwards and has all that it had."""
    with scene_in(tmp_path_factory.mktemp("lasting"), request.param) as scene:
        yield scene


@pytest.fixture(params=list(WAYS))
def scene(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Scene]:
    """For one whose victim ends."""
    with scene_in(tmp_path, request.param) as scene:
        yield scene


@pytest.mark.promise("dead-node")
def test_a_node_that_is_silent_holds_up_none_of_the_others(lasting: Scene) -> None:
    buffers, waiting = lasting.begin_with_one_stopped()
    assert is_quiet(waiting)
    os.kill(lasting.victim, signal.SIGCONT)
    lasting.check(buffers, waiting.result(DEADLINE_S))


@pytest.mark.promise("dead-node")
def test_killed_node_has_misses_and_the_others_hits(scene: Scene) -> None:
    buffers, waiting = scene.begin_with_one_stopped()
    with within(0):
        os.kill(scene.victim, signal.SIGKILL)
        assert scene.check(buffers, waiting.result(DEADLINE_S), may_miss=True) == SHARE
    again = scene.buffers()
    assert scene.check(again, scene.get(again, DEADLINE_S), may_miss=True) == SHARE


@pytest.mark.promise("dead-node")
def test_a_node_that_hangs_up_gives_right_bytes_or_misses(scene: Scene) -> None:
    buffers, waiting = scene.begin_with_one_stopped()
    with within(0):
        os.kill(scene.victim, signal.SIGTERM)
        os.kill(scene.victim, signal.SIGCONT)
        scene.check(buffers, waiting.result(DEADLINE_S), may_miss=True)


@pytest.mark.promise("dead-node")
@pytest.mark.parametrize("when", ["before", "between"])
def test_stopped_node_costs_deadline_and_writes_nothing_late(lasting: Scene, when: str) -> None:
    buffers = lasting.buffers()
    with within(SHORT_S):
        if when == "before":
            os.kill(lasting.victim, signal.SIGSTOP)
        waiting = lasting.begin(buffers, SHORT_S)
        if when == "between":
            until(lambda: bool(buffers[0].any()) or waiting.done(), "the first of its bytes")
            os.kill(lasting.victim, signal.SIGSTOP)
        try:
            lasting.check(buffers, waiting.result(DEADLINE_S))
            assert when == "between", "all of it had come before"
        except DeadlineExceeded:
            pass
    lasting.check_nothing_comes_late(buffers)


@pytest.mark.promise("dead-node")
def test_signal_handler_error_is_raised_without_late_writes(lasting: Scene) -> None:
    def strike(_number: int, _frame: FrameType | None) -> None:
        raise Struck

    def strike_in_the_midst() -> None:
        lasting.until_the_living_have_answered(buffers)
        signal.pthread_kill(main, signal.SIGUSR1)

    main, buffers = threading.get_ident(), lasting.buffers()
    old = signal.signal(signal.SIGUSR1, strike)
    try:
        os.kill(lasting.victim, signal.SIGSTOP)
        striking = in_background(strike_in_the_midst)
        with pytest.raises(Struck):
            lasting.get(buffers, DEADLINE_S)
        striking.result(DEADLINE_S)
    finally:
        signal.signal(signal.SIGUSR1, old)
    lasting.check_nothing_comes_late(buffers)
