"""Promises of slices.py; a naive byte-by-byte list of moves is the oracle."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvstore.transfer.memory.pieces import Pieces, local_regions, remote_regions, table_of
from kvstore.transfer.memory.region import Piece, Region, RemoteRegion
from kvstore.transfer.paths.slices import MAX_PIECES_A_SLICE, cut

LOCALS = [Region(memoryview(bytearray(1 << 20))) for _ in range(2)]
REMOTES = [RemoteRegion(number, 1 << 20, 0, {}) for number in range(2)]


def piece(local_offset: int, remote_offset: int, size_bytes: int, *, local: int = 0, remote: int = 0) -> Piece:
    return Piece(LOCALS[local], local_offset, REMOTES[remote], remote_offset, size_bytes)


def sizes(slices: Sequence[Pieces]) -> list[list[int]]:
    return [[part.size_bytes for part in one] for one in slices]


def moves(pieces: Pieces) -> list[tuple[int, int, int, int]]:
    """Every byte as (local region, its offset, remote region, its offset), in order."""
    return [
        (part.local.region_id, part.local_offset + at, part.remote.region_id, part.remote_offset + at)
        for part in pieces
        for at in range(part.size_bytes)
    ]


def test_a_piece_that_fits_is_handed_on_as_it_is() -> None:
    whole = piece(0, 0, 100)
    assert cut([whole], 100)[0][0] is whole


def test_a_slice_has_at_most_so_many_pieces() -> None:
    pieces = [piece(2 * at, at * 3, 1) for at in range(2 * MAX_PIECES_A_SLICE + 1)]
    for some in (pieces, table_of(pieces)):
        assert [len(one) for one in cut(some, 1 << 20)] == [MAX_PIECES_A_SLICE, MAX_PIECES_A_SLICE, 1]


def test_too_many_pieces_do_not_move_later_cuts() -> None:
    """A list restarts its count at this cut; columns need no walk and do not."""
    pieces = [piece(2 * at, at * 3, 1) for at in range(MAX_PIECES_A_SLICE + 10)]
    whole = MAX_PIECES_A_SLICE + 4
    assert [len(one) for one in cut(pieces, whole)] == [MAX_PIECES_A_SLICE, 10]
    assert [len(one) for one in cut(table_of(pieces), whole)] == [MAX_PIECES_A_SLICE, 4, 6]


def test_sliced_tables_have_only_the_regions_in_use() -> None:
    first, second = cut(table_of([piece(0, 0, 100), piece(0, 0, 100, local=1, remote=1)]), 100)
    assert list(local_regions(first)) == [LOCALS[0]]
    assert list(local_regions(second)) == [LOCALS[1]]
    assert [region.region_id for region in remote_regions(second)] == [REMOTES[1].region_id]


@given(
    pieces=st.lists(
        st.builds(piece, st.integers(0, 60), st.integers(0, 60), st.integers(0, 60), local=st.integers(0, 1), remote=st.integers(0, 1)),
        max_size=12,
    ),
    follow=st.lists(st.booleans(), min_size=12, max_size=12),
    slice_bytes=st.integers(1, 70),
)
def test_slices_are_the_same_bytes_in_the_same_order(pieces: list[Piece], follow: list[bool], slice_bytes: int) -> None:
    for at in range(1, len(pieces)):
        before = pieces[at - 1]
        if follow[at]:  # neighbours would hardly ever come by chance
            local_end, remote_end = before.local_offset + before.size_bytes, before.remote_offset + before.size_bytes
            pieces[at] = Piece(before.local, local_end, before.remote, remote_end, pieces[at].size_bytes)
    slices = cut(pieces, slice_bytes)
    assert moves([part for one in slices for part in one]) == moves(pieces)
    assert all(sum(map(len_of, one)) == slice_bytes for one in slices[:-1])
    assert all(0 < sum(map(len_of, one)) <= slice_bytes for one in slices)
    assert all(part.size_bytes for one in slices for part in one)
    assert [list(one) for one in cut(table_of(pieces), slice_bytes)] == slices


def len_of(part: Piece) -> int:
    return part.size_bytes
