"""Pieces of a request as columns (PieceTable) or as a short list, and the functions that agents need of both.

Columns make a request of 10,000 runs cost numpy calls instead of Python loops. For small requests a list is faster.
"""

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar, overload

import numpy as np
import numpy.typing as npt

from kvstore.protocol.errors import InvalidArgument
from kvstore.transfer.memory.region import Piece, Region, RemoteRegion

Int64s = npt.NDArray[np.int64]
_COLUMNS: Final = 5
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class PieceTable:
    """Pieces as five int64 columns of equal length. Piece i is `length[i]` bytes at `local_offset[i]` of
    `local[local_index[i]]` and at `remote_offset[i]` of `remote[remote_index[i]]`.

    Indexing and iteration make Piece objects: only for few pieces. Every region in both tuples is used and the indices
    are valid; `check_pieces` checks the rest. Not a `Sequence`: an isinstance check against an abstract class takes ten
    times as long, and a small request makes a dozen.
    """

    local: tuple[Region, ...]
    remote: tuple[RemoteRegion, ...]
    local_index: Int64s
    local_offset: Int64s
    remote_index: Int64s
    remote_offset: Int64s
    length: Int64s

    def __len__(self) -> int:
        return len(self.length)

    @overload
    def __getitem__(self, at: int) -> Piece: ...
    @overload
    def __getitem__(self, at: slice) -> "PieceTable": ...
    def __getitem__(self, at: int | slice) -> "Piece | PieceTable":
        columns = [column[at] for column in self.columns()]
        if isinstance(at, slice):
            return table_of_used(self.local, self.remote, *columns)
        local_index, local_offset, remote_index, remote_offset, length = map(int, columns)
        return Piece(self.local[local_index], local_offset, self.remote[remote_index], remote_offset, length)

    def __iter__(self) -> Iterator[Piece]:
        rows = zip(*(column.tolist() for column in self.columns()), strict=True)
        for local_index, local_offset, remote_index, remote_offset, length in rows:
            yield Piece(self.local[local_index], local_offset, self.remote[remote_index], remote_offset, length)

    def columns(self) -> tuple[Int64s, Int64s, Int64s, Int64s, Int64s]:
        return self.local_index, self.local_offset, self.remote_index, self.remote_offset, self.length

    @property
    def size_bytes(self) -> int:
        return int(self.length.sum())

    def first_outside(self) -> int | None:
        """Return the index of the first piece that exceeds its regions, or None."""
        outside = self.length < 0
        for regions, index, offset in (
            (self.local, self.local_index, self.local_offset),
            (self.remote, self.remote_index, self.remote_offset),
        ):
            sizes = np.array([region.size_bytes for region in regions], np.int64)
            outside |= (offset < 0) | (offset > sizes[index] - self.length)
        return int(outside.argmax()) if outside.any() else None


def table_of_used(local: Sequence[Region], remote: Sequence[RemoteRegion], *columns: Int64s) -> PieceTable:
    """Return the table of these columns, with the unused regions dropped."""
    local_index, local_offset, remote_index, remote_offset, length = columns
    used_local, local_index = _used(local, local_index)
    used_remote, remote_index = _used(remote, remote_index)
    return PieceTable(used_local, used_remote, local_index, local_offset, remote_index, remote_offset, length)


def _used(regions: Sequence[T], index: Int64s) -> tuple[tuple[T, ...], Int64s]:
    if len(regions) == 1 and len(index):
        return tuple(regions), index
    used, again = np.unique(index, return_inverse=True)
    return tuple([regions[at] for at in used.tolist()]), again.astype(np.int64, copy=False)


def table_of(pieces: "Pieces") -> PieceTable:
    """Convert pieces to a table. Raises InvalidArgument for an offset or length of 2^63 or more."""
    if isinstance(pieces, PieceTable):
        return pieces
    local_by_id, remote_by_id = {id(piece.local): piece.local for piece in pieces}, {id(piece.remote): piece.remote for piece in pieces}
    positions = [dict(zip(regions, range(len(regions)), strict=True)) for regions in (local_by_id, remote_by_id)]
    rows = [
        (positions[0][id(local)], local_offset, positions[1][id(remote)], remote_offset, size)
        for local, local_offset, remote, remote_offset, size in pieces
    ]
    try:
        columns = np.array(rows, np.int64).reshape(-1, _COLUMNS).T
    except OverflowError:
        raise InvalidArgument("an offset or size of 2^63 bytes or more") from None
    return PieceTable(tuple(local_by_id.values()), tuple(remote_by_id.values()), *columns)


Pieces = Sequence[Piece] | PieceTable
"""Pieces of a request: a list, or a table of many."""


def total_bytes(pieces: Pieces) -> int:
    return pieces.size_bytes if isinstance(pieces, PieceTable) else sum([piece.size_bytes for piece in pieces])


def longest_bytes(pieces: Pieces) -> int:
    """Return the length of the longest piece, 0 if there is none."""
    return int(pieces.length.max(initial=0)) if isinstance(pieces, PieceTable) else max((piece.size_bytes for piece in pieces), default=0)


def local_regions(pieces: Pieces) -> Collection[Region]:
    """Return each local region in use, once."""
    if isinstance(pieces, PieceTable):
        return pieces.local
    if len(pieces) == 1:
        return (pieces[0].local,)
    return {id(piece.local): piece.local for piece in pieces}.values()


def remote_regions(pieces: Pieces) -> Collection[RemoteRegion]:
    """Return each region of the peer in use, once."""
    if isinstance(pieces, PieceTable):
        return pieces.remote
    if len(pieces) == 1:
        return (pieces[0].remote,)
    return {id(piece.remote): piece.remote for piece in pieces}.values()  # by identity: a RemoteRegion cannot be hashed


def by_rail(pieces: Pieces, transport: str, rail: str) -> Pieces:
    """Return the pieces with the region descriptors that an agent needs to reach the peer over this rail."""
    remote = remote_regions(pieces)
    for region in remote:
        if transport not in region.descriptors:
            break
    else:
        return pieces
    if isinstance(pieces, PieceTable):
        return replace(pieces, remote=tuple(region.by_rail(transport, rail) for region in remote))
    seen = {id(region): region.by_rail(transport, rail) for region in remote}
    return [piece._replace(remote=seen[id(piece.remote)]) for piece in pieces]


def local_views(pieces: Pieces) -> list[memoryview]:
    """Return the local memory of each piece."""
    if isinstance(pieces, PieceTable):
        return _views([region.memory for region in pieces.local], pieces.local_index, pieces.local_offset, pieces.length)
    return [piece.local.memory[piece.local_offset : piece.local_offset + piece.size_bytes] for piece in pieces]


def remote_views(pieces: Pieces, mapped: Mapping[int, memoryview]) -> list[memoryview]:
    """Return the peer's memory of each piece. `mapped` has its regions' memory by the identity of their descriptions."""
    if isinstance(pieces, PieceTable):
        return _views([mapped[id(region)] for region in pieces.remote], pieces.remote_index, pieces.remote_offset, pieces.length)
    return [mapped[id(piece.remote)][piece.remote_offset : piece.remote_offset + piece.size_bytes] for piece in pieces]


def _views(memories: Sequence[memoryview], index: Int64s, offset: Int64s, length: Int64s) -> list[memoryview]:
    starts, ends = offset.tolist(), (offset + length).tolist()
    if len(memories) == 1:
        [memory] = memories
        return [memory[start:end] for start, end in zip(starts, ends, strict=True)]
    return [memories[at][start:end] for at, start, end in zip(index.tolist(), starts, ends, strict=True)]


def wire_columns(pieces: Pieces) -> tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]]:
    """Return ids and keys of the peer's regions, offsets and lengths: the columns of ReadRegions and WriteRegions."""
    if isinstance(pieces, PieceTable):
        ids = np.array([region.region_id for region in pieces.remote], np.uint64)
        keys = np.array([region.key for region in pieces.remote], np.uint64)
        columns = (ids[pieces.remote_index], keys[pieces.remote_index], pieces.remote_offset, pieces.length)
        return tuple(array("Q", column.astype(np.uint64, copy=False).tobytes()) for column in columns)  # type: ignore[return-value]
    return (
        [piece.remote.region_id for piece in pieces],
        [piece.remote.key for piece in pieces],
        [piece.remote_offset for piece in pieces],
        [piece.size_bytes for piece in pieces],
    )


def check_pieces(pieces: Pieces, *, is_read: bool) -> None:
    """Raises InvalidArgument for pieces outside their regions, and for reads into read-only memory."""
    if not isinstance(pieces, PieceTable):
        for piece in pieces:
            _check_piece(piece)
    elif (at := pieces.first_outside()) is not None:
        _check_piece(pieces[at])
    if is_read:
        for region in local_regions(pieces):
            if region.memory.readonly:
                raise InvalidArgument("a read needs writable memory on this side; this region is read-only")


def _check_piece(piece: Piece) -> None:
    piece.local.check(piece.local_offset, piece.size_bytes)
    if piece.remote_offset < 0 or piece.remote_offset + piece.size_bytes > piece.remote.size_bytes:
        raise InvalidArgument(
            f"bytes {piece.remote_offset} to {piece.remote_offset + piece.size_bytes} are outside the peer's region "
            f"of {piece.remote.size_bytes} bytes"
        )
