"""Promises of batches.py: a batch is begun whole or not at all, and what is not begun holds nothing."""

from collections.abc import Callable, Iterator

import pytest

from kvstore.protocol.errors import Closed, InvalidArgument, Unreachable
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.memory.region import Region
from kvstore.transfer.memory.signal_safety import Gate
from kvstore.transfer.paths.batches import begin_transfer
from kvstore.transfer.paths.peer import PeerRegion
from kvstore.transfer.paths.spans import Copy, Span
from kvstore.transfer.paths.transfers import Priority, Transfer
from kvstore.transfer.testing.waiting import PATIENCE_S, in_background, is_quiet
from tests.transfer.faulty import FAULTY, WAIT, agents, settings, topology


class Scene:
    """An engine over a faulty agent, another one, and a region of its of 256 bytes as the first knows it."""

    def __init__(self) -> None:
        self.engine, self.other = (TransferEngine(name, settings(FAULTY), topology=topology("rail0")) for name in ("me", "other"))
        self.region = self.other.register(bytearray(256))
        peer = self.engine.connect(self.other.describe())
        self.remote = self.engine.import_region(peer, self.other.export(self.region, writable=True))
        [self.agent] = agents(self.engine)

    def begin(self, *batch: Copy, gate: Gate | None = None) -> Transfer:
        carrier = self.engine._carrier
        return begin_transfer(batch, carrier, self.engine, deadline=Deadline(PATIENCE_S), priority=Priority.FOREGROUND, gate=gate)


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    with scene.engine, scene.other:
        yield scene


def test_memory_is_held_once_and_the_gate_entered_until_all_slices_are_over(scene: Scene) -> None:
    scene.agent.default = WAIT
    region, gate = scene.engine.allocate(200), Gate()
    transfer = scene.begin((scene.remote, region, 100), (scene.remote, Span(region, 100), 100), gate=gate)
    assert (region.users, transfer.size_bytes) == (1, 200)
    assert transfer.slices_left > 1
    shutting = in_background(gate.shut)
    assert is_quiet(shutting)
    while not transfer.is_over:
        scene.agent.end_all()
    shutting.result(PATIENCE_S)
    assert region.users == 0


def test_what_goes_both_ways_holds_what_it_reads_and_what_it_writes(scene: Scene) -> None:
    scene.agent.default = WAIT
    source, destination = scene.engine.allocate(10), scene.engine.allocate(10)
    transfer = scene.begin((source, scene.remote, 10), (Span(scene.remote, 10), destination, 10))
    assert (source.users, destination.users) == (1, 1)
    scene.agent.end_all()
    assert transfer.is_over
    assert (source.users, destination.users) == (0, 0)


def test_where_the_peer_is_gone_nothing_is_begun_nor_held(scene: Scene) -> None:
    region, gate = scene.engine.allocate(10), Gate()
    scene.engine.disconnect(scene.remote.peer)
    with pytest.raises(Unreachable):
        scene.begin((scene.remote, region, 10))
    with pytest.raises(Unreachable):
        scene.begin((scene.remote, region, 10), gate=gate)
    gate.shut()
    assert region.users == 0


@pytest.mark.parametrize("batch", [[], [(b"12", None, 0)]])
def test_nothing_to_move_is_over_at_once_and_told_all_the_same(scene: Scene, batch: list[Copy]) -> None:
    engine, remote = scene.engine, scene.remote
    done: list[Transfer] = []
    transfer = engine.submit([(source, remote, 0) for source, _, _ in batch], on_done=done.append)
    assert done == [transfer]
    transfer.wait()
    assert not scene.agent.begun


@pytest.mark.parametrize(
    ("copy", "reason"),
    [
        (lambda ours, remote: (ours, bytearray(4), 4), "none is"),
        (lambda ours, remote: (remote, remote, 4), "both are"),
        (lambda ours, remote: (remote, bytes(4), 4), "read-only"),
        (lambda ours, remote: (ours, remote, -1), "length"),
        (lambda ours, remote: (ours, remote, 65), "outside a region"),
        (lambda ours, remote: (bytes(300), Span(remote, 200), 57), "outside the peer"),
        (lambda ours, remote: (ours, remote), "a copy is"),
    ],
)
def test_a_copy_that_cannot_be_is_refused_and_nothing_is_begun(
    scene: Scene, copy: Callable[[Region, PeerRegion], Copy], reason: str
) -> None:
    engine, remote = scene.engine, scene.remote
    ours = engine.allocate(64)
    with pytest.raises(InvalidArgument, match=reason):
        engine.submit([(ours, remote, 4), copy(ours, remote)])
    assert ours.users == 0
    assert not scene.agent.begun


def test_a_region_that_is_closed_is_refused_and_the_others_are_let_go(scene: Scene) -> None:
    engine, remote = scene.engine, scene.remote
    first, closed = engine.allocate(64), engine.allocate(64)
    closed.close()
    with pytest.raises(Closed):
        engine.submit([(first, remote, 4), (closed, remote, 4)])
    assert first.users == 0


def test_a_region_imported_by_another_engine_is_refused(scene: Scene) -> None:
    with pytest.raises(InvalidArgument, match="imported"):
        scene.other.submit([(b"1234", scene.remote, 4)])
