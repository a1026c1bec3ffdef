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
from kvstore.transfer.paths.peer import Peer, PeerRegion
from kvstore.transfer.paths.spans import MAX_COPY_BYTES, Copy, Span, flat, piece_of

PEER = Peer(EngineInfo("peer", "host"), TransferSettings(), random.Random(0), lambda place: ())
REMOTE = PeerRegion(PEER, RemoteRegion(1, 100, 7, {}))
LOCAL = Region(memoryview(bytearray(50)))


def test_from_a_peer_is_a_read_and_to_it_a_write() -> None:
    assert piece_of((Span(REMOTE, 60), Span(LOCAL, 10), 40)) == (PEER, Direction.READ, (LOCAL, 10, REMOTE.remote, 60, 40))
    assert piece_of((LOCAL, REMOTE, 50)) == (PEER, Direction.WRITE, (LOCAL, 0, REMOTE.remote, 0, 50))


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


def test_a_flat_view_is_taken_as_it_is() -> None:
    view = memoryview(bytearray(4))
    assert flat(view).obj is view.obj
