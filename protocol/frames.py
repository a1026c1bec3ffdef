"""The frame: a fixed header, a body (the packed message) and a payload (values' bytes, which no parser looks at).

    offset  size  field
    0       2     magic, b"kV"
    2       1     protocol version
    3       1     message type
    4       4     request id, chosen by the asker and echoed in the answer; 0 for messages that have no answer
    8       4     milliseconds the asker still waits; in a Welcome what its sender does besides (SPREADS_READS and others), else 0
    12      4     body length in bytes
    16      8     payload length in bytes

All integers are little-endian. This file knows no sockets: transfer/ moves the bytes. docs/protocol.md describes every message.
"""

import struct
from typing import Final, NamedTuple

from kvstore.protocol.errors import InvalidArgument, ProtocolError

MAGIC: Final = b"kV"
TLS_MAGIC: Final = b"\x16\x03"
"""How a TLS connection begins."""
_OTHERS: Final = {
    b"HT": ", but HTTP: that is the port of health, metrics and the console; clients connect to the one of frames (--listen)",
    b"\0\0": ", but gRPC: that is the port of the control plane; clients connect to the one of frames (--listen)",
}
"""What else of ours answers a Hello so: an HTTP server by its status line, a gRPC server by its settings."""
VERSION: Final = 1
"""Protocol version of every frame. A frame of another version is refused with a ProtocolError that names both."""
HEADER: Final = struct.Struct("<2sBBIIIQ")
HEADER_BYTES: Final = HEADER.size
_AT_KIND: Final = 3

MAX_BODY_BYTES: Final = 40 << 20
"""Room for 65,536 keys and parents of 255 bytes with their columns; a peer that announces more is refused before any memory is taken."""
MAX_PAYLOAD_BYTES: Final = 4 << 30
"""One frame carries at most this much of values; clients cut larger batches."""
MAX_KEY_BYTES: Final = 255
MAX_VALUE_BYTES: Final = 1 << 30
MAX_BATCH: Final = 65_536
"""Keys in one message; clients cut larger batches."""
MAX_COUNT: Final = 16 * MAX_BATCH
"""Entries of a column that is not one a key: a full batch of Locations names up to 16 replicas a key."""
MAX_BLOB_BYTES: Final = 256 << 10
"""An entry of a column of opaque bytes: what a node says of its transfer engine."""
TAKES_TRACES: Final = 1
"""A bit of the deadline in the header of a Welcome: Trace messages are taken."""
SPREADS_READS: Final = 2
"""Another one, of a master's Welcome: what other hosts read much gets copies at further nodes, so that where a block of another host is is
worth asking again after a while."""
MAX_DEADLINE_MS: Final = 3_600_000
"""An hour: a deadline further away is a mistake, and is cut to this."""


class FrameHeader(NamedTuple):
    """A decoded header. `deadline_ms` is relative, so that clocks of different hosts need not agree.

    A tuple because one is made for every frame: a frozen dataclass takes three times as long.
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

    Raises:
        ProtocolError: not a kvstore frame, another version, or a length over its limit. The connection cannot be resynchronised.
    """
    magic, version, type_, request_id, deadline_ms, body_bytes, payload_bytes = HEADER.unpack_from(data, offset)
    if magic == TLS_MAGIC:
        raise ProtocolError("TLS is spoken to a port without it: set tls_cert and tls_key here, or leave tls_ca out there")
    if magic != MAGIC:
        raise ProtocolError(
            f"not a kvstore frame{_OTHERS.get(bytes(magic), f': it starts with {bytes(magic)!r}; check the port and the peer')}"
        )
    if version != VERSION:
        raise ProtocolError(f"the peer speaks protocol version {version}, this side speaks {VERSION}: run one release on both")
    if body_bytes > MAX_BODY_BYTES:
        raise ProtocolError(f"a body of {body_bytes:,} bytes is over the limit of {MAX_BODY_BYTES:,}")
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"a payload of {payload_bytes:,} bytes is over the limit of {MAX_PAYLOAD_BYTES:,}")
    return FrameHeader(type_, request_id, deadline_ms if deadline_ms < MAX_DEADLINE_MS else MAX_DEADLINE_MS, body_bytes, payload_bytes)


def kind_of(frame: memoryview) -> int:
    """The message type of a frame; 0, which is none, of too few bytes."""
    return frame[_AT_KIND] if len(frame) > _AT_KIND else 0


def check_key(key: bytes) -> None:
    """Raises InvalidArgument unless `key` is 1 to 255 bytes."""
    if not isinstance(key, bytes):
        raise InvalidArgument(f"a key is bytes, not {type(key).__name__}")
    if not 1 <= len(key) <= MAX_KEY_BYTES:
        raise InvalidArgument(f"a key is 1 to {MAX_KEY_BYTES} bytes long, not {len(key)}")
