"""Functions on pieces return the same for a list and a table."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.errors import InvalidArgument
from kvstore.transfer.memory.pieces import (
    Pieces,
    by_rail,
    check_pieces,
    local_regions,
    local_views,
    longest_bytes,
    remote_regions,
    remote_views,
    table_of,
    table_of_used,
    total_bytes,
    wire_columns,
)
from kvstore.transfer.memory.region import Piece, Region, RemoteRegion

SIZE = 64
LOCAL = [Region(memoryview(bytearray(range(SIZE)))), Region(memoryview(bytearray(range(100, 100 + SIZE))))]
REMOTE = [RemoteRegion(number, SIZE, (1 << 63) - number, {}) for number in (7, 9)]
MAPPED = {id(REMOTE[0]): memoryview(bytearray(range(200, 200 + SIZE // 2)) * 2), id(REMOTE[1]): memoryview(bytearray(SIZE))}
PIECES = [Piece(LOCAL[0], 3, REMOTE[1], 5, 10), Piece(LOCAL[1], 0, REMOTE[1], 20, 0), Piece(LOCAL[0], 20, REMOTE[0], 0, 30)]

offsets = st.integers(0, SIZE // 2)
some_pieces = st.lists(st.builds(Piece, st.sampled_from(LOCAL), offsets, st.sampled_from(REMOTE), offsets, offsets), max_size=6)


@given(some_pieces)
def test_a_table_answers_as_the_list_that_it_was_made_of(pieces: list[Piece]) -> None:
    table = table_of(pieces)
    assert list(table) == pieces
    assert [table[at] for at in range(len(table))] == pieces
    assert (total_bytes(table), longest_bytes(table)) == (total_bytes(pieces), longest_bytes(pieces))
    assert local_views(table) == local_views(pieces)
    assert remote_views(table, MAPPED) == remote_views(pieces, MAPPED)
    for found in (wire_columns(table), wire_columns(pieces)):
        assert [list(column) for column in found] == [
            [piece.remote.region_id for piece in pieces],
            [piece.remote.key for piece in pieces],
            [piece.remote_offset for piece in pieces],
            [piece.size_bytes for piece in pieces],
        ]
    for some in (pieces, table):
        assert {region.region_id for region in local_regions(some)} == {piece.local.region_id for piece in pieces}
        assert {region.region_id for region in remote_regions(some)} == {piece.remote.region_id for piece in pieces}
        check_pieces(some, is_read=True)


def test_an_agent_finds_what_is_said_of_its_own_rail() -> None:
    split = RemoteRegion(1, SIZE, 7, {"rdma@a": b"A", "rdma@b": b"B", "tcp": b""})
    pieces = [Piece(LOCAL[0], 0, split, 0, 8), Piece(LOCAL[0], 8, REMOTE[0]._replace(descriptors={"rdma": b"any"}), 0, 8)]
    for some in (pieces, table_of(pieces)):
        assert by_rail(first := some[:1], "tcp", "b") is first
        assert [piece.remote.descriptors for piece in by_rail(some, "rdma", "b")] == [{"rdma": b"B"}, {"rdma": b"any"}]
        assert [piece._replace(remote=None) for piece in by_rail(some, "rdma", "b")] == [piece._replace(remote=None) for piece in pieces]  # type: ignore[arg-type]


def test_a_part_of_a_table_has_no_regions_that_it_does_not_use() -> None:
    part = table_of(PIECES)[1:3]
    assert list(part) == PIECES[1:]
    assert list(local_regions(part[1:])) == [LOCAL[0]]
    assert list(remote_regions(part[:1])) == [REMOTE[1]]
    columns = table_of(PIECES[2:]).columns()
    assert table_of_used(LOCAL[:1], REMOTE[:1], *columns).columns() == columns
    assert not table_of_used(LOCAL, REMOTE, *(column[:0] for column in columns)).local


def both(*pieces: Piece) -> list[Pieces]:
    return [list(pieces), table_of(list(pieces))]


@pytest.mark.parametrize(
    ("local", "remote", "size"),
    [(-1, 0, 1), (1, 0, SIZE), (0, -1, 1), (0, 1, SIZE), (0, 0, -1), ((1 << 63) - 1, 0, 1), (0, 1, (1 << 63) - 1)],
)
@pytest.mark.parametrize("is_read", [False, True])
def test_pieces_outside_their_regions_are_refused(is_read: bool, local: int, remote: int, size: int) -> None:
    for pieces in both(PIECES[0], Piece(LOCAL[1], local, REMOTE[0], remote, size), PIECES[2]):
        with pytest.raises(InvalidArgument, match="outside"):
            check_pieces(pieces, is_read=is_read)


def test_memory_that_cannot_be_written_is_not_read_into() -> None:
    for pieces in both(PIECES[0], Piece(Region(memoryview(b"constant")), 0, REMOTE[0], 0, 8)):
        check_pieces(pieces, is_read=False)
        with pytest.raises(InvalidArgument, match="read-only"):
            check_pieces(pieces, is_read=True)
