"""Batches of copies between this process and peers: validated, grouped by peer and direction, and begun as a transfer."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.protocol.errors import Closed, InvalidArgument, KVStoreError
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.agent import Direction
from kvstore.transfer.memory.pieces import Int64s, Pieces, check_pieces, local_regions, table_of_used, total_bytes
from kvstore.transfer.memory.region import Piece, PlainRegion, Region
from kvstore.transfer.memory.signal_safety import Gate
from kvstore.transfer.paths.peer import Peer, PeerRegion, Slice
from kvstore.transfer.paths.slice_dispatcher import SliceDispatcher
from kvstore.transfer.paths.slices import cut
from kvstore.transfer.paths.transfers import Priority, Transfer

MAX_COPY_BYTES: Final = 1 << 40


class Span(NamedTuple):
    """A position in registered memory, or in a C-contiguous buffer of this process."""

    region: Region | PeerRegion | Any
    offset_bytes: int = 0


End = Span | Region | PeerRegion | Any
"""Source or destination of a copy: a Span, a region (its beginning), or a C-contiguous buffer of this process."""
Copy = tuple[End, End, int]
"""(source, destination, length in bytes). Exactly one of source and destination is a peer's."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Many copies as columns: copy i is `length[i]` bytes from `source_offset[i]` of `sources[source_region[i]]` to
    `destination_offset[i]` of `destinations[destination_region[i]]`. One side is this process's, the other one peer's.

    The columns are integer arrays of equal length; a constant column may be a broadcast view. They are read until
    `submit` returns. 100,000 runs cost some 25 ms of Python, as a list of copies a second.
    """

    sources: Sequence[Region | PeerRegion]
    destinations: Sequence[Region | PeerRegion]
    source_region: npt.ArrayLike
    source_offset: npt.ArrayLike
    destination_region: npt.ArrayLike
    destination_offset: npt.ArrayLike
    length: npt.ArrayLike


Batch = Sequence[Copy] | Runs
Group = tuple[Peer, Direction, Pieces]
"""The pieces of a batch for one peer and direction."""


def groups_of(batch: Batch) -> list[Group]:
    """Group a batch by peer and direction. Raises InvalidArgument."""
    if isinstance(batch, Runs):
        return [_pieces_of(batch)]
    groups: dict[tuple[Peer, Direction], list[Piece]] = {}
    for copy in batch:
        peer, direction, piece = piece_of(copy)
        groups.setdefault((peer, direction), []).append(piece)
    return [(peer, direction, pieces) for (peer, direction), pieces in groups.items()]


def _pieces_of(runs: Runs) -> Group:
    source_peer, sources = _side(runs.sources)
    destination_peer, destinations = _side(runs.destinations)
    source = _index(runs.source_region, len(sources)), _column(runs.source_offset)
    destination = _index(runs.destination_region, len(destinations)), _column(runs.destination_offset)
    length = _column(runs.length)
    if any(len(column) != len(length) for column in (*source, *destination)):
        raise InvalidArgument("the columns of runs are equally long")
    if source_peer is not None and destination_peer is None:
        peer, direction, table = source_peer, Direction.READ, table_of_used(destinations, sources, *destination, *source, length)
    elif destination_peer is not None and source_peer is None:
        peer, direction, table = destination_peer, Direction.WRITE, table_of_used(sources, destinations, *source, *destination, length)
    else:
        raise InvalidArgument("of the sources and destinations of runs one side is a peer's, the other this process's")
    check_pieces(table, is_read=direction is Direction.READ)
    return peer, direction, table


def _side(regions: Sequence[Region | PeerRegion]) -> tuple[Peer | None, list[Any]]:
    """Return the peer (None for this process) and its regions."""
    peers = {region.peer if isinstance(region, PeerRegion) else None for region in regions}
    if len(peers) != 1 or not all(isinstance(region, (Region, PeerRegion)) for region in regions):
        raise InvalidArgument("each side of runs is at least one region, all of this process or all of one peer")
    return peers.pop(), [region.remote if isinstance(region, PeerRegion) else region for region in regions]


def _column(values: npt.ArrayLike) -> Int64s:
    column = np.asarray(values)
    if column.ndim != 1 or column.dtype.kind not in "iu":
        raise InvalidArgument(f"a column of runs is a flat array of integers, not of shape {column.shape} and {column.dtype}")
    return column.astype(np.int64, copy=False)


def _index(values: npt.ArrayLike, count: int) -> Int64s:
    column = _column(values)
    if len(column) and not 0 <= int(column.min()) <= int(column.max()) < count:
        raise InvalidArgument(f"runs name region {int(column.max())} or less than 0, where there are {count}")
    return column


def piece_of(copy: Copy) -> tuple[Peer, Direction, Piece]:
    """Return the peer, the direction and the piece. Raises InvalidArgument unless exactly one end is a peer's and both
    ranges are valid.
    """
    try:
        source, destination, length = copy
    except (TypeError, ValueError):
        raise InvalidArgument(f"a copy is (source, destination, length), not {copy!r:.100}") from None
    if not isinstance(length, int) or not 0 <= length <= MAX_COPY_BYTES:
        raise InvalidArgument(f"a length is a number of bytes up to {MAX_COPY_BYTES}, not {length!r}")
    one, one_offset = _resolve(source)
    other, other_offset = _resolve(destination)
    if isinstance(one, PeerRegion) == isinstance(other, PeerRegion):
        both = isinstance(one, PeerRegion)
        raise InvalidArgument(f"of source and destination exactly one is a peer's; here {'both are' if both else 'none is'}")
    if isinstance(other, PeerRegion):
        assert isinstance(one, Region)
        peer, direction, piece = other.peer, Direction.WRITE, Piece(one, one_offset, other.remote, other_offset, length)
    else:
        assert isinstance(one, PeerRegion)
        peer, direction, piece = one.peer, Direction.READ, Piece(other, other_offset, one.remote, one_offset, length)
        if other.memory.readonly:
            raise InvalidArgument("the destination is read-only")
    piece.local.check(piece.local_offset, length)
    if piece.remote_offset < 0 or piece.remote_offset + length > piece.remote.size_bytes:
        raise InvalidArgument(
            f"bytes {piece.remote_offset} to {piece.remote_offset + length} are outside the peer's region "
            f"of {piece.remote.size_bytes} bytes"
        )
    return peer, direction, piece


def _resolve(end: End) -> tuple[Region | PeerRegion, int]:
    offset = 0
    if isinstance(end, Span):
        end, offset = end
        if not isinstance(offset, int):
            raise InvalidArgument(f"an offset is a number of bytes, not {offset!r}")
    return end if isinstance(end, (Region, PeerRegion)) else PlainRegion(flat(end)), offset


def flat(buffer: Any) -> memoryview:
    """Return a flat byte view. Raises InvalidArgument unless it is a C-contiguous buffer."""
    try:
        view = memoryview(buffer)
        return view if view.format == "B" and view.ndim == 1 else view.cast("B")
    except (TypeError, ValueError, BufferError) as error:
        raise InvalidArgument(
            "registered memory is a C-contiguous buffer (memoryview, bytearray, numpy array; of a torch tensor "
            f"`tensor.detach().view(torch.uint8).numpy()`): {error}"
        ) from None


def begin_transfer(
    batch: Batch,
    dispatcher: SliceDispatcher,
    owner: object,
    *,
    deadline: Deadline,
    priority: Priority,
    on_done: Callable[[Transfer], None] | None = None,
    waits: bool = False,
    gate: Gate | None = None,
) -> Transfer:
    """Begin a transfer and return it, in flight or over.

    Args:
      owner: the engine; the peers must belong to it.
      waits: the caller calls `wait` next.
      gate: entered until the transfer is over.

    Raises InvalidArgument, Closed (a region, or the engine) or Unreachable: nothing has begun then, and nothing is
    held.
    """
    groups = groups_of(batch)
    for peer, _, _ in groups:
        if peer.owner is not owner:
            raise InvalidArgument("a region of a peer is used by the engine that imported it, not by another one")
    regions = _hold(_used_in(groups))
    transfer = Transfer(deadline, priority, regions, dispatcher.abort, dispatcher.assist, on_done)
    parts: dict[Peer, list[Slice]] = {}
    for peer, direction, pieces in groups:
        for cut_pieces in cut(pieces, peer.slice_bytes):
            part = Slice(transfer, peer, direction, cut_pieces, total_bytes(cut_pieces))
            parts.setdefault(peer, []).append(part)
            transfer.size_bytes += part.size_bytes
            transfer.slices_left += 1
    if gate is not None:
        transfer.hold_gate(gate)
    try:
        dispatcher.begin(parts, transfer if waits else None)
    except KVStoreError:
        if gate is not None:
            gate.leave()
        for region in regions:
            region.release()
        raise
    if not parts:
        transfer.complete()
    return transfer


def _used_in(groups: Sequence[Group]) -> Collection[Region]:
    """Return each local region that a batch uses, once."""
    if len(groups) == 1:
        return local_regions(groups[0][2])
    return {id(region): region for _, _, pieces in groups for region in local_regions(pieces)}.values()


def _hold(regions: Collection[Region]) -> Collection[Region]:
    """Hold all regions or none. Raises Closed."""
    for number, region in enumerate(regions):
        try:
            region.hold()
        except Closed:
            for held in islice(regions, number):
                held.release()
            raise
    return regions
