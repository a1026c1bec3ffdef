"""Promises of batch.py: what cannot be copied is refused, and a batch is begun whole or not at all."""

import array
import mmap
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.protocol.errors import Closed, InvalidArgument, Unreachable
from kvstore.rpc.deadline import Deadline
from kvstore.testing.transfer.awaited import PATIENCE_S, in_background, is_quiet
from kvstore.transfer.agent import Direction
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.description import EngineInfo
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.memory.region import Region, RemoteRegion
from kvstore.transfer.memory.signal_safety import Gate
from kvstore.transfer.paths.batch import MAX_COPY_BYTES, Copy, Runs, Span, begin_transfer, flat, groups_of, piece_of
from kvstore.transfer.paths.peer import Peer, PeerRegion
from kvstore.transfer.paths.transfers import Priority, Transfer
from tests.transfer.faulty import FAULTY, WAIT, agents, settings, topology

PEER = Peer(EngineInfo("peer", "host"), TransferSettings(), random.Random(0), lambda place: ())
REMOTE = PeerRegion(PEER, RemoteRegion(1, 100, 7, {}))
LOCAL = Region(memoryview(bytearray(50)))


@pytest.mark.parametrize(
    "buffer",
    [
        bytearray(range(12)),
        memoryview(bytearray(range(12))),
        np.arange(12, dtype=np.uint8),
        np.frombuffer(bytes(range(12)), np.int16).reshape(2, 3),
        array.array("I", np.frombuffer(bytes(range(12)), np.uint32).tolist()),
    ],
)
def test_any_contiguous_buffer_is_an_end(buffer: Any) -> None:
    _, _, piece = piece_of((Span(buffer, 2), REMOTE, 10))
    assert bytes(piece.local.memory) == bytes(range(12))
    assert (piece.local_offset, piece.size_bytes) == (2, 10)
    assert piece_of((buffer, REMOTE, 12))[2].local_offset == 0


def test_constant_bytes_can_be_written_from_but_not_read_into() -> None:
    assert piece_of((b"1234", REMOTE, 4))[1] is Direction.WRITE
    with pytest.raises(InvalidArgument, match="read-only"):
        piece_of((REMOTE, b"1234", 4))


@pytest.mark.parametrize(
    ("copy", "reason"),
    [
        ((LOCAL, REMOTE), "a copy is"),
        (7, "a copy is"),
        ((LOCAL, REMOTE, 1.5), "length"),
        ((LOCAL, REMOTE, None), "length"),
        ((LOCAL, REMOTE, -1), "length"),
        ((LOCAL, REMOTE, MAX_COPY_BYTES + 1), "length"),
        ((LOCAL, LOCAL, 1), "none is"),
        ((REMOTE, REMOTE, 1), "both are"),
        ((Span(LOCAL, 0.5), REMOTE, 1), "offset"),  # type: ignore[arg-type]
        ((Span(LOCAL, -1), REMOTE, 1), "outside a region"),
        ((Span(LOCAL, 50), REMOTE, 1), "outside a region"),
        ((LOCAL, Span(REMOTE, -1), 1), "outside the peer"),
        ((LOCAL, Span(REMOTE, 51), 50), "outside the peer"),
        ((Span(REMOTE, 1 << 70), LOCAL, 1), "outside the peer"),
        (("text", REMOTE, 1), "C-contiguous buffer"),
        ((REMOTE, None, 1), "C-contiguous buffer"),
        ((b"", REMOTE, 0), "at least one byte"),
    ],
)
def test_what_cannot_be_copied_is_refused(copy: Copy, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        piece_of(copy)


def closed_map() -> mmap.mmap:
    mapped = mmap.mmap(-1, 10)
    mapped.close()
    return mapped


@pytest.mark.parametrize("buffer", [np.zeros((4, 4))[:, ::2], np.zeros(2, "M8[s]"), np.zeros((0, 2)), closed_map(), 5])
def test_what_is_no_contiguous_buffer_is_refused(buffer: Any) -> None:
    with pytest.raises(InvalidArgument, match="C-contiguous buffer"):
        flat(buffer)


# --- runs ---
OTHER = PeerRegion(PEER, RemoteRegion(2, 60, 7, {}))
OTHER_ENGINES_PEER = PeerRegion(Peer(EngineInfo("stranger", "host"), TransferSettings(), random.Random(0), lambda place: ()), REMOTE.remote)
SOURCE_REGIONS, SOURCE_OFFSETS = [1, 0], [5, 60]
DESTINATION_REGIONS, DESTINATION_OFFSETS = [0, 0], [0, 10]
COLUMNS = (SOURCE_REGIONS, SOURCE_OFFSETS, DESTINATION_REGIONS, DESTINATION_OFFSETS)


def test_refused_tensor_names_the_buffer_to_pass() -> None:
    tensor = torch.arange(6, dtype=torch.bfloat16).requires_grad_()
    with pytest.raises(InvalidArgument, match=r"`tensor\.detach\(\)\.view\(torch\.uint8\)\.numpy\(\)`"):
        flat(tensor)
    assert flat(tensor.detach().view(torch.uint8).numpy()).nbytes == 12


def test_runs_are_the_copies_that_their_rows_are() -> None:
    for sources, destinations in (([REMOTE, OTHER], [LOCAL]), ([LOCAL, Region(memoryview(bytearray(90)))], [REMOTE])):
        runs = Runs(sources, destinations, *COLUMNS, [3, 4])
        if isinstance(sources[0], Region):
            runs = Runs(sources[::-1], destinations, *COLUMNS, [3, 4])
            sources = sources[::-1]
        rows = zip(*COLUMNS, [3, 4], strict=True)
        copies: list[Copy] = [(Span(sources[a], b), Span(destinations[c], d), size) for a, b, c, d, size in rows]
        [(peer, direction, expected)] = groups_of(copies)
        [(found_peer, found_direction, found)] = groups_of(runs)
        assert (found_peer, found_direction, list(found)) == (peer, direction, list(expected))


@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        (Runs([LOCAL], [LOCAL], [0], [0], [0], [0], [1]), "one side is a peer's"),
        (Runs([REMOTE], [REMOTE], [0], [0], [0], [0], [1]), "one side is a peer's"),
        (Runs([REMOTE, LOCAL], [LOCAL], [0], [0], [0], [0], [1]), "all of one peer"),
        (Runs([REMOTE, OTHER_ENGINES_PEER], [LOCAL], [0], [0], [0], [0], [1]), "all of one peer"),
        (Runs([], [LOCAL], [0], [0], [0], [0], [1]), "at least one region"),
        (Runs([b"1234"], [REMOTE], [0], [0], [0], [0], [1]), "at least one region"),  # type: ignore[list-item]
        (Runs([LOCAL], [REMOTE], [1], [0], [0], [0], [1]), "name region 1"),
        (Runs([LOCAL], [REMOTE], [0], [0], [-1], [0], [1]), "less than 0"),
        (Runs([LOCAL], [REMOTE], [0], [0], [0], [0], [1, 1]), "equally long"),
        (Runs([LOCAL], [REMOTE], [0], [0], [0], [[0]], [1]), "flat array"),
        (Runs([LOCAL], [REMOTE], [0], [0.0], [0], [0], [1]), "array of integers"),
        (Runs([LOCAL], [REMOTE], [0], [0], [0], [0], [51]), "outside a region"),
        (Runs([LOCAL], [REMOTE], [0], [0], [0], [60], [41]), "outside the peer"),
        (Runs([LOCAL], [REMOTE], [0], [0], [0], np.array([1 << 63], np.uint64), [1]), "outside the peer"),
        (Runs([REMOTE], [Region(memoryview(b"1234"))], [0], [0], [0], [0], [1]), "read-only"),
    ],
)
def test_runs_that_cannot_be_made_are_refused(runs: Runs, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        groups_of(runs)


class Scene:
    """An engine over a faulty agent, another one, and a region of its of 256 bytes as the first knows it."""

    def __init__(self) -> None:
        self.engine, self.other = (TransferEngine(name, settings(FAULTY), topology=topology("rail0")) for name in ("me", "other"))
        self.region = self.other.register(bytearray(256))
        peer = self.engine.connect(self.other.describe())
        self.remote = self.engine.import_region(peer, self.other.export(self.region, writable=True))
        [self.agent] = agents(self.engine)

    def begin(self, *batch: Copy, gate: Gate | None = None) -> Transfer:
        carrier = self.engine._dispatcher
        return begin_transfer(batch, carrier, self.engine, deadline=Deadline(PATIENCE_S), priority=Priority.FOREGROUND, gate=gate)


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    with scene.engine, scene.other:
        yield scene


def test_memory_and_gate_are_held_until_all_slices_are_over(scene: Scene) -> None:
    scene.agent.default = WAIT
    region, gate = scene.engine.allocate(200), Gate()
    transfer = scene.begin((scene.remote, region, 100), (scene.remote, Span(region, 100), 100), gate=gate)
    assert (region.users, transfer.size_bytes) == (1, 200)
    assert transfer.slices_left > 1
    shutting = in_background(gate.close_and_wait)
    assert is_quiet(shutting)
    while not transfer.is_over:
        scene.agent.end_all()
    shutting.result(PATIENCE_S)
    assert region.users == 0


def test_where_the_peer_is_gone_nothing_is_begun_nor_held(scene: Scene) -> None:
    region, gate = scene.engine.allocate(10), Gate()
    scene.engine.disconnect(scene.remote.peer)
    with pytest.raises(Unreachable):
        scene.begin((scene.remote, region, 10))
    with pytest.raises(Unreachable):
        scene.begin((scene.remote, region, 10), gate=gate)
    gate.close_and_wait()
    assert region.users == 0


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


def test_a_closed_region_is_refused_and_the_others_released(scene: Scene) -> None:
    engine, remote = scene.engine, scene.remote
    first, closed = engine.allocate(64), engine.allocate(64)
    closed.close()
    with pytest.raises(Closed):
        engine.submit([(first, remote, 4), (closed, remote, 4)])
    assert first.users == 0


def test_a_region_imported_by_another_engine_is_refused(scene: Scene) -> None:
    with pytest.raises(InvalidArgument, match="imported"):
        scene.other.submit([(b"1234", scene.remote, 4)])
