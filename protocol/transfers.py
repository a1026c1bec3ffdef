"""Messages between transfer agents over a Connection: what one side asks of the other's registered memory.

Frames as on the hot path (frames.py), each sent as parts: the header, the body if it is not empty, then the payload in parts as long as
the request's pieces. Answers are Ok, Joined or Failure, in the order of the requests. docs/transfer.md is the byte-for-byte description.
"""

from typing import Final

from kvstore.protocol.message import U8, U64, CountedU8s, CountedU64s, Message, Text, U64s, message

ROLE_AGENT: Final = 3
"""An agent's role in Hello, on the Unix socket of shared memory."""
SERVER_AGENT: Final = 3
"""What it says in Welcome."""
MAX_PIECES: Final = 65_536
"""Pieces of one request; agents cut larger ones."""
MAX_PIECE_BYTES: Final = 1 << 30
"""One piece; agents cut larger ones."""
MAX_TRANSFER_BODY_BYTES: Final = 4 << 20
"""Room for the columns of MAX_PIECES pieces."""
MAX_NOTICE_BYTES: Final = 64 << 10


@message
class JoinEngine(Message):
    """First message of a connection: the agent's name, and a number that names this connection among the agent's; and the secret that the
    description of the engine that is joined has. Answer: Joined."""

    TYPE = 60
    name: Text
    connection: U64
    secret: CountedU8s = b""


@message
class JoinReply(Message):
    """The name of the agent that answers."""

    TYPE = 61
    name: Text


@message
class ReadRegions(Message):
    """Send these pieces of your regions. `keys` are the regions' read or write keys. Answer: Ok, with the pieces as payload."""

    TYPE = 62
    regions: CountedU64s
    keys: U64s
    offsets: U64s
    sizes: U64s


@message
class WriteRegions(Message):
    """Write the payload to these pieces of your regions. `keys` are the regions' write keys. Answer: Ok, once it is all written.

    After a Failure some of it may have been written.
    """

    TYPE = 63
    regions: CountedU64s
    keys: U64s
    offsets: U64s
    sizes: U64s


@message
class Fence(Message):
    """Close these connections of mine; nothing more that came by them is to be written. Answer: Ok, once that holds."""

    TYPE = 64
    connections: CountedU64s


@message
class Notice(Message):
    """Tell your user. Answer: Ok."""

    TYPE = 65
    message: CountedU8s


@message
class Attach(Message):
    """Send a descriptor of the shared memory behind this region, read-only or writable; region 0 is the table of live regions, which
    needs no key. Unix sockets only. Answer: SlabFds, of one."""

    TYPE = 66
    region: U64
    key: U64
    writable: U8 = 0
