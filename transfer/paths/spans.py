"""What callers ask for: copies from a source to a destination, one of them a peer's; checked, and made into pieces."""

from typing import Any, Final, NamedTuple

from kvstore.protocol.errors import InvalidArgument
from kvstore.transfer.agent import Direction
from kvstore.transfer.memory.region import Piece, PlainRegion, Region
from kvstore.transfer.paths.peer import Peer, PeerRegion

MAX_COPY_BYTES: Final = 1 << 40


class Span(NamedTuple):
    """A place in registered memory, or in any C-contiguous buffer of this process."""

    region: Region | PeerRegion | Any
    offset_bytes: int = 0


End = Span | Region | PeerRegion | Any
"""Source or destination of a copy: a Span, a region (its beginning), or any C-contiguous buffer of this process."""
Copy = tuple[End, End, int]
"""(source, destination, length in bytes). One of the two is a peer's."""


def piece_of(copy: Copy) -> tuple[Peer, Direction, Piece]:
    """The peer, the direction, and the piece. Raises InvalidArgument unless exactly one end is a peer's and both reach far enough."""
    try:
        source, destination, length = copy
    except (TypeError, ValueError):
        raise InvalidArgument(f"a copy is (source, destination, length), not {copy!r:.100}") from None
    if not isinstance(length, int) or not 0 <= length <= MAX_COPY_BYTES:
        raise InvalidArgument(f"a length is a number of bytes up to {MAX_COPY_BYTES}, not {length!r}")
    one, one_offset = _place(source)
    other, other_offset = _place(destination)
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


def _place(end: End) -> tuple[Region | PeerRegion, int]:
    offset = 0
    if isinstance(end, Span):
        end, offset = end
        if not isinstance(offset, int):
            raise InvalidArgument(f"an offset is a number of bytes, not {offset!r}")
    return end if isinstance(end, (Region, PeerRegion)) else PlainRegion(flat(end)), offset


def flat(buffer: Any) -> memoryview:
    """Raises InvalidArgument for what is no C-contiguous buffer of at least one byte."""
    try:
        view = memoryview(buffer)
        return view if view.format == "B" and view.ndim == 1 else view.cast("B")
    except (TypeError, ValueError, BufferError) as error:
        raise InvalidArgument(f"registered memory is a C-contiguous buffer (memoryview, bytearray, numpy array): {error}") from None
