"""What callers may ask for, and every way of asking wrongly."""

import array
import mmap
import random
from typing import Any

import numpy as np
import pytest

from kvstore.protocol.errors import InvalidArgument
from kvstore.transfer.agent import Direction
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.description import EngineInfo
from kvstore.transfer.memory.region import Region, RemoteRegion
from kvstore.transfer.paths.batch import MAX_COPY_BYTES, Copy, Runs, Span, flat, groups_of, piece_of
from kvstore.transfer.paths.peer import Peer, PeerRegion

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
STRANGER = PeerRegion(Peer(EngineInfo("stranger", "host"), TransferSettings(), random.Random(0), lambda place: ()), REMOTE.remote)
SOURCE_REGIONS, SOURCE_OFFSETS = [1, 0], [5, 60]
DESTINATION_REGIONS, DESTINATION_OFFSETS = [0, 0], [0, 10]
COLUMNS = (SOURCE_REGIONS, SOURCE_OFFSETS, DESTINATION_REGIONS, DESTINATION_OFFSETS)


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
        (Runs([REMOTE, STRANGER], [LOCAL], [0], [0], [0], [0], [1]), "all of one peer"),
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
