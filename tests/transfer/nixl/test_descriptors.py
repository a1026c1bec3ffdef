"""Promises of descriptors.py; the naive way to build rows is the oracle of the fast one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.errors import InvalidArgument, ProtocolError
from kvstore.transfer.agent import Direction
from kvstore.transfer.memory.region import Piece, Region, RemoteRegion
from kvstore.transfer.nixl.descriptors import (
    NixlRemote,
    descriptor_rows,
    pack_metadata,
    pack_region,
    unpack_metadata,
    unpack_region,
)

PEER = NixlRemote("näme", "näme@1", b"nixl's own")


def region(size_bytes: int) -> Region:
    return Region(memoryview(bytearray(size_bytes)))


def described(region: Region) -> RemoteRegion:
    return RemoteRegion(region.region_id, region.size_bytes, region.write_key, {"nixl": pack_region(region, "owner@1", b"nixl's own")})


HERE, THERE = [region(100), region(50)], [region(80), region(100)]
DESCRIBED = [described(each) for each in THERE]


@pytest.mark.parametrize("size", [0, 5, 8, 9, 15, 21])
def test_metadata_that_is_cut_short_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError):
        unpack_metadata(pack_metadata(PEER)[:size])


def test_the_descriptor_does_not_give_the_keys_away() -> None:
    descriptor = DESCRIBED[0].descriptors["nixl"]
    for key in (THERE[0].read_key, THERE[0].write_key):
        assert key.to_bytes(8, "little") not in descriptor
        assert key.to_bytes(8, "big") not in descriptor


@pytest.mark.parametrize("descriptor", [b"", b"\1" + bytes(42), b"\2" + bytes(100)])
def test_a_malformed_descriptor_is_refused(descriptor: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack_region(DESCRIBED[0]._replace(descriptors={"nixl": descriptor}), Direction.READ)


numbers = st.integers(-2, 110)
pieces = st.builds(Piece, st.sampled_from(HERE), numbers, st.sampled_from(DESCRIBED), numbers, numbers)


@given(st.lists(pieces, min_size=1, max_size=6))
def test_rows_are_those_of_the_naive_way(pieces: list[Piece]) -> None:
    try:
        expected = naive_rows(pieces)
    except InvalidArgument:
        with pytest.raises(InvalidArgument, match="outside a region"):
            descriptor_rows(Direction.WRITE, pieces)
        return
    exported, local, remote = descriptor_rows(Direction.WRITE, pieces)
    assert local.dtype == remote.dtype == np.uint64
    assert local.flags.c_contiguous
    assert (local.tolist(), remote.tolist()) == expected
    assert {each.region_id for each in exported} == {piece.remote.region_id for piece in pieces}


def naive_rows(pieces: list[Piece]) -> tuple[list[list[int]], list[list[int]]]:
    local, remote = [], []
    for piece in pieces:
        there = unpack_region(piece.remote, Direction.WRITE)
        piece.local.check(piece.local_offset, piece.size_bytes)
        THERE[DESCRIBED.index(piece.remote)].check(piece.remote_offset, piece.size_bytes)
        if piece.size_bytes:
            local.append([piece.local.address + piece.local_offset, piece.size_bytes, piece.local.region_id])
            remote.append([there.address + piece.remote_offset, piece.size_bytes, there.region_id])
    return local, remote


def test_rows_without_the_empty_ones_among_many_are_contiguous() -> None:
    many = [Piece(HERE[at % 2], at % 40, DESCRIBED[at % 2], at % 30, at % 10) for at in range(500)]
    _, local, remote = descriptor_rows(Direction.WRITE, many)
    assert (local.tolist(), remote.tolist()) == naive_rows(many)
    assert local.flags.c_contiguous
    assert remote.flags.c_contiguous
