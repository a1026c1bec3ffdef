"""Frame format: a fixed header, a body (the packed message) and a payload (bytes of values, never parsed).

    offset  size  field
    0       2     magic, b"kV"
    2       1     protocol version
    3       1     message type
    4       4     request id, chosen by the requester and echoed in the response; 0 for a message without a response
    8       4     request: milliseconds until its deadline; Welcome: feature bits (ACCEPTS_TRACES, ...); else 0
    12      4     body length in bytes
    16      8     payload length in bytes

All integers are little-endian. docs/protocol.md describes every message.
"""

import struct
from typing import Final, NamedTuple

from kvstore.protocol.errors import InvalidArgument, ProtocolError

MAGIC: Final = b"kV"
TLS_MAGIC: Final = b"\x16\x03"
"""First bytes of a TLS connection."""
_OTHERS: Final = {
    b"HT": ", but HTTP: that is the port of health, metrics and the console; clients connect to the one of frames (--listen)",
    b"\0\0": ", but gRPC: that is the port of the control plane; clients connect to the one of frames (--listen)",
}
"""First bytes with which other ports of a daemon answer a Hello: HTTP with its status line, gRPC with its settings
frame."""
VERSION: Final = 1
"""Protocol version of every frame. A frame of another version is refused with a ProtocolError that names both."""
HEADER: Final = struct.Struct("<2sBBIIIQ")
HEADER_BYTES: Final = HEADER.size
_AT_KIND: Final = 3

MAX_BODY_BYTES: Final = 40 << 20
"""Enough for 65,536 keys and parents of 255 bytes with their columns; a larger body is refused before memory is
allocated."""
MAX_PAYLOAD_BYTES: Final = 4 << 30
"""Values in one frame; clients split larger batches."""
MAX_KEY_BYTES: Final = 255
MAX_VALUE_BYTES: Final = 1 << 30
MAX_BATCH: Final = 65_536
"""Keys in one message; clients split larger batches."""
MAX_COUNT: Final = 16 * MAX_BATCH
"""Entries of a column that has several a key: Locations has up to 16 replicas a key."""
MAX_BLOB_BYTES: Final = 256 << 10
"""Entry of a column of opaque bytes, such as the description of a transfer engine."""
ACCEPTS_TRACES: Final = 1
"""Bit in the deadline field of a Welcome: the sender accepts Trace messages."""
MAKES_HOT_COPIES: Final = 2
"""Bit of a master's Welcome: blocks that other hosts read often get more replicas, so clients refresh cached locations.
"""
MAX_DEADLINE_MS: Final = 3_600_000
"""An hour; later deadlines are cut to this."""


class FrameHeader(NamedTuple):
    """Decoded header. `deadline_ms` is relative, so that clocks of different hosts need not agree.

    A tuple because one is made a frame: a frozen dataclass takes three times as long.
    """

    type: int
    request_id: int
    deadline_ms: int
    body_bytes: int
    payload_bytes: int


def pack_header(type: int, request_id: int, body_bytes: int, payload_bytes: int = 0, deadline_ms: int = 0) -> bytes:
    """Return the HEADER_BYTES bytes of a frame's header."""
    return HEADER.pack(MAGIC, VERSION, type, request_id, deadline_ms, body_bytes, payload_bytes)


def unpack_header(data: bytes | bytearray | memoryview, offset: int = 0) -> FrameHeader:
    """Decode HEADER_BYTES bytes at `offset`.

    Raises ProtocolError: not a kvstore frame, another version, or a length over its limit. The stream cannot be
    resynchronised.
    """
    magic, version, type_, request_id, deadline_ms, body_bytes, payload_bytes = HEADER.unpack_from(data, offset)
    if magic == TLS_MAGIC:
        raise ProtocolError("the peer uses TLS and this port does not: set tls_cert and tls_key here, or unset the peer's tls_ca")
    if magic != MAGIC:
        raise ProtocolError(
            f"not a kvstore frame{_OTHERS.get(bytes(magic), f': it starts with {bytes(magic)!r}; check the port and the peer')}"
        )
    if version != VERSION:
        raise ProtocolError(f"the peer uses protocol version {version}, this side {VERSION}: run the same release on both")
    if body_bytes > MAX_BODY_BYTES:
        raise ProtocolError(f"a body of {body_bytes:,} bytes is over the limit of {MAX_BODY_BYTES:,}")
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"a payload of {payload_bytes:,} bytes is over the limit of {MAX_PAYLOAD_BYTES:,}")
    return FrameHeader(type_, request_id, deadline_ms if deadline_ms < MAX_DEADLINE_MS else MAX_DEADLINE_MS, body_bytes, payload_bytes)


def kind_of(frame: memoryview) -> int:
    """Return the message type of a frame; 0, which is no type, for too few bytes."""
    return frame[_AT_KIND] if len(frame) > _AT_KIND else 0


def check_key(key: bytes) -> None:
    """Raises InvalidArgument unless `key` is 1 to 255 bytes."""
    if not isinstance(key, bytes):
        raise InvalidArgument(f"a key is bytes, not {type(key).__name__}")
    if not 1 <= len(key) <= MAX_KEY_BYTES:
        raise InvalidArgument(f"a key is 1 to {MAX_KEY_BYTES} bytes long, not {len(key)}")
