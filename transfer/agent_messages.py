"""The notifications that both ends of an agent connection send each other, as bytes. Pure.

Each begins with its kind and the number of its recipient: 0 is whoever listens, anything else a connection. Little-endian.
"""

import struct
from enum import IntEnum
from typing import Final, NamedTuple

from kvstore.protocol.errors import ProtocolError
from kvstore.transfer.memory import RemoteRegion

VERSION: Final = 1
LISTENER: Final = 0
"""The recipient of a HELLO."""
_HEAD: Final = struct.Struct("<BQ")
_POSITION: Final = struct.Struct("<BQQ")
_OFFER: Final = struct.Struct("<BQBQQQQH")
"""Kind, recipient, version, number of the sender, then its ring: id, size, key, length of the descriptor, which follows; the rest is
the sender's metadata."""


class Kind(IntEnum):
    HELLO = 1
    """Connect to me: an offer."""
    WELCOME = 2
    """Connected: an offer."""
    REFUSED = 3
    """Nobody listens, or too many wait."""
    DATA = 4
    """Your ring is written up to this position."""
    CREDIT = 5
    """My ring is read up to this position."""
    BYE = 6
    """I write into your ring no more, and read mine no more."""


class Offer(NamedTuple):
    """Who one is: number, ring to be written into (its `descriptors` has one of any name), metadata of the agent ("" in a WELCOME)."""

    sender: int
    ring: RemoteRegion
    metadata: bytes


def pack_offer(kind: Kind, recipient: int, transport: str, offer: Offer) -> bytes:
    ring, descriptor = offer.ring, offer.ring.descriptors[transport]
    head = _OFFER.pack(kind, recipient, VERSION, offer.sender, ring.region_id, ring.size_bytes, ring.key, len(descriptor))
    return head + descriptor + offer.metadata


def unpack_offer(message: bytes, transport: str) -> Offer:
    """Raises ProtocolError."""
    if len(message) < _OFFER.size:
        raise ProtocolError(f"an offer of {len(message)} bytes is too short")
    _, _, version, sender, region_id, size_bytes, key, descriptor_size = _OFFER.unpack_from(message)
    if version != VERSION:
        raise ProtocolError(f"the peer's agent connection is of version {version}, not {VERSION}")
    metadata_at = _OFFER.size + descriptor_size
    if metadata_at > len(message):
        raise ProtocolError(f"an offer is cut short at {len(message)} bytes")
    if not size_bytes:
        raise ProtocolError("an offer of a ring without room")
    ring = RemoteRegion(region_id, size_bytes, key, {transport: message[_OFFER.size : metadata_at]})
    return Offer(sender, ring, message[metadata_at:])


def pack_position(kind: Kind, recipient: int, position: int) -> bytes:
    """DATA or CREDIT: `position` counts bytes from the beginning of the connection."""
    return _POSITION.pack(kind, recipient, position)


def unpack_position(message: bytes) -> int:
    """Raises ProtocolError."""
    if len(message) != _POSITION.size:
        raise ProtocolError(f"a position of {len(message)} bytes")
    position: int = _POSITION.unpack(message)[2]
    return position


def pack_plain(kind: Kind, recipient: int) -> bytes:
    """REFUSED or BYE."""
    return _HEAD.pack(kind, recipient)


def kind_of(message: bytes) -> Kind:
    """Raises ProtocolError."""
    try:
        return Kind(message[0])
    except ValueError as error:
        raise ProtocolError(f"an agent connection knows no message of kind {message[0]}") from error


def recipient_of(message: bytes) -> int:
    """Raises ProtocolError."""
    if len(message) < _HEAD.size:
        raise ProtocolError(f"a notification of {len(message)} bytes is too short")
    recipient: int = _HEAD.unpack_from(message)[1]
    return recipient
