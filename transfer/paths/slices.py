"""Cutting a batch into slices, the units that are sent, retried and spread over rails. Sans-I/O; knows nothing of rails or agents."""

from collections.abc import Iterable, Sequence
from typing import Final

from kvstore.transfer.memory.region import Piece

MAX_PIECES_A_SLICE: Final = 1024
"""So that the description of a slice stays small beside its bytes, and one vectored call takes it (IOV_MAX)."""


def cut(pieces: Sequence[Piece], slice_bytes: int) -> list[list[Piece]]:
    """The bytes of `pieces`, in their order, as slices of exactly `slice_bytes`, but for the last and those of MAX_PIECES_A_SLICE pieces.

    The pieces are of one peer and one direction; empty ones are left out. O(pieces + slices).
    """
    assert slice_bytes > 0
    slices: list[list[Piece]] = []
    current: list[Piece] = []
    room_bytes = slice_bytes
    for piece in _merged(pieces):
        size_bytes = piece[4]
        if size_bytes < room_bytes and len(current) < MAX_PIECES_A_SLICE - 1:  # the usual case of small pieces
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
    """Neighbours that continue one another at both ends made one, empty pieces left out."""
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
