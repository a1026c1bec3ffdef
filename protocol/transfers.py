"""Messages between transfer agents: reads and writes of the peer's registered memory.

Frames are those of frames.py, sent as header, body unless it is empty, and payload cut at the request's pieces. Answers
are Ok, JoinReply or Failure, in the order of the requests. docs/transfer.md is the byte-for-byte description.
"""

from typing import Final

from kvstore.protocol.message import U8, U64, CountedU8s, CountedU64s, Message, Text, U64s, message

ROLE_AGENT: Final = 3
"""Role of an agent in Hello, on the Unix socket of the shared-memory transport."""
SERVER_AGENT: Final = 3
"""Server kind of an agent in Welcome."""
MAX_PIECES: Final = 65_536
"""Pieces of one request; agents split larger requests."""
MAX_PIECE_BYTES: Final = 1 << 30
"""Bytes of one piece; agents split larger ones."""
MAX_TRANSFER_BODY_BYTES: Final = 4 << 20
"""Enough for the columns of MAX_PIECES pieces."""
MAX_NOTICE_BYTES: Final = 64 << 10


@message
class JoinEngine(Message):
    """First message of a connection: name of the agent, number of the connection among the agent's, secret.

    Answer: JoinReply.

    `secret` comes from the description of the engine that is joined.
    """

    TYPE = 60
    name: Text
    connection: U64
    secret: CountedU8s = b""


@message
class JoinReply(Message):
    """Answer to JoinEngine: the name of the receiving agent."""

    TYPE = 61
    name: Text


@message
class ReadRegions(Message):
    """Read pieces of the receiver's regions.

    `keys` are their read or write keys. Answer: Ok, with the pieces as payload.
    """

    TYPE = 62
    regions: CountedU64s
    keys: U64s
    offsets: U64s
    sizes: U64s


@message
class WriteRegions(Message):
    """Write the payload to pieces of the receiver's regions.

    `keys` are their write keys. Answer: Ok, once all is written.

    After a Failure some pieces may have been written.
    """

    TYPE = 63
    regions: CountedU64s
    keys: U64s
    offsets: U64s
    sizes: U64s


@message
class Fence(Message):
    """Fence these connections of the sender: close them and stop their writes.

    Answer: Ok, once nothing more is written.
    """

    TYPE = 64
    connections: CountedU64s


@message
class Notice(Message):
    """Message for the user of the receiving engine. Answer: Ok."""

    TYPE = 65
    message: CountedU8s


@message
class Attach(Message):
    """Request a descriptor of the shared memory behind this region, read-only or writable. Unix sockets only.

    Region 0 is the table of live regions, which needs no key. Answer: MapSlabsReply, of one.
    """

    TYPE = 66
    region: U64
    key: U64
    writable: U8 = 0
