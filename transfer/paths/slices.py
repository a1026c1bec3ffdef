"""Cuts a batch into slices: the units that are sent, retried and spread over rails. Sans-I/O."""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from kvstore.transfer.memory.pieces import Int64s, Pieces, PieceTable
from kvstore.transfer.memory.region import Piece

MAX_PIECES_A_SLICE: Final = 1024
"""Bounds a slice's description relative to its bytes, and fits one vectored call (IOV_MAX)."""


def cut(pieces: Pieces, slice_bytes: int) -> Sequence[Pieces]:
    """Cut the bytes of `pieces`, in order, into slices of exactly `slice_bytes`, except the last and those limited by
    MAX_PIECES_A_SLICE.

    The pieces are of one peer and one direction; empty ones are dropped. O(pieces + slices).
    """
    assert slice_bytes > 0
    if isinstance(pieces, PieceTable):
        return cut_table(pieces, slice_bytes)
    if len(pieces) == 1 and 0 < pieces[0].size_bytes <= slice_bytes:
        return [pieces]
    return cut_list(pieces, slice_bytes)


def cut_table(pieces: PieceTable, slice_bytes: int) -> list[PieceTable]:
    """As `cut`, with numpy. A slice limited by MAX_PIECES_A_SLICE does not move later boundaries: the next slice is
    shorter.
    """
    lengths, columns = _merged_columns(pieces)
    if not len(lengths):
        return []
    ends = np.cumsum(lengths)
    # Each bound ends a piece, in bytes of the batch. The input is two sorted runs, which a stable sort merges.
    bounds = np.sort(np.concatenate((ends, np.arange(slice_bytes, ends[-1], slice_bytes))), kind="stable")
    sizes = np.diff(bounds, prepend=0)
    starts, sizes = (bounds - sizes)[sizes > 0], sizes[sizes > 0]
    run = np.searchsorted(ends, starts, side="right")
    within = starts - (ends - lengths)[run]
    local_index, local_offset, remote_index, remote_offset = (column[run] for column in columns)
    whole = PieceTable(pieces.local, pieces.remote, local_index, local_offset + within, remote_index, remote_offset + within, sizes)
    firsts = np.flatnonzero(starts % slice_bytes == 0)
    return [
        whole[at : min(at + MAX_PIECES_A_SLICE, end)]
        for first, end in zip(firsts.tolist(), [*firsts[1:].tolist(), len(starts)], strict=True)
        for at in range(first, end, MAX_PIECES_A_SLICE)
    ]


def _merged_columns(pieces: PieceTable) -> tuple[Int64s, list[Int64s]]:
    """Return lengths and the other columns, with adjacent contiguous pieces merged and empty ones dropped."""
    kept = pieces.length > 0
    *columns, lengths = (column[kept] for column in pieces.columns())
    goes_on = np.ones(max(0, len(lengths) - 1), np.bool_)
    for index, offset in (columns[:2], columns[2:]):
        goes_on &= (index[1:] == index[:-1]) & (offset[1:] - offset[:-1] == lengths[:-1])
    if not goes_on.any():
        return lengths, columns
    starts = np.flatnonzero(np.concatenate(([True], ~goes_on)))
    return np.add.reduceat(lengths, starts), [column[starts] for column in columns]


def cut_list(pieces: Sequence[Piece], slice_bytes: int) -> list[list[Piece]]:
    """As `cut`, piece by piece: faster for few."""
    slices: list[list[Piece]] = []
    current: list[Piece] = []
    room_bytes = slice_bytes
    for piece in _merged(pieces):
        size_bytes = piece[4]
        if size_bytes < room_bytes and len(current) < MAX_PIECES_A_SLICE - 1:  # the common case of small pieces
            current.append(piece)
            room_bytes -= size_bytes
            continue
        done_bytes = 0
        while done_bytes < size_bytes:
            taken_bytes = min(size_bytes - done_bytes, room_bytes)
            current.append(piece if taken_bytes == size_bytes else _part(piece, done_bytes, taken_bytes))
            done_bytes += taken_bytes
            room_bytes -= taken_bytes
            if not room_bytes or len(current) == MAX_PIECES_A_SLICE:
                slices.append(current)
                current, room_bytes = [], slice_bytes
    if current:
        slices.append(current)
    return slices


def _merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Merge adjacent contiguous pieces and drop empty ones."""
    merged: list[Piece] = []
    local = remote = None
    local_end = remote_end = run_bytes = -1
    for piece in pieces:
        next_local, local_offset, next_remote, remote_offset, size_bytes = piece
        if local_offset == local_end and remote_offset == remote_end and next_local is local and next_remote is remote:
            run_bytes += size_bytes
            local_end += size_bytes
            remote_end += size_bytes
        elif size_bytes:
            _close_run(merged, run_bytes)
            merged.append(piece)
            local, local_end, remote, remote_end = next_local, local_offset + size_bytes, next_remote, remote_offset + size_bytes
            run_bytes = size_bytes
    _close_run(merged, run_bytes)
    return merged


def _close_run(merged: list[Piece], run_bytes: int) -> None:
    if merged and merged[-1][4] != run_bytes:
        merged[-1] = merged[-1]._replace(size_bytes=run_bytes)


def _part(piece: Piece, offset_bytes: int, size_bytes: int) -> Piece:
    return Piece(piece.local, piece.local_offset + offset_bytes, piece.remote, piece.remote_offset + offset_bytes, size_bytes)
