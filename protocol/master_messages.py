"""Requests of clients to a master: locations, reservations, removal, pins, node list.

Keys belong to the tenant of the connection's Hello.
"""

from dataclasses import field
from typing import Final

from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.message import U8, U32, Blobs, CountedU8s, CountedU32s, Keys, Labels, Message, Text, U8s, U32s, U64s, message

MAX_PATTERN_BYTES: Final = 1024


def check_pattern(pattern: str) -> None:
    """Raises InvalidArgument for a pattern over MAX_PATTERN_BYTES."""
    if len(pattern.encode()) > MAX_PATTERN_BYTES:
        raise InvalidArgument(f"a pattern is at most {MAX_PATTERN_BYTES} bytes long, not {len(pattern.encode())}")


@message
class Lookup(Message):
    """Locate these keys. `avoid`: a node that the client could not reach (0: none). Answer: Locations."""

    TYPE = 10
    WIRE = ("avoid", "keys")
    keys: Keys
    avoid: U32 = 0


@message
class Locations(Message):
    """For each key the number of replicas (0: a miss), size, checksum, generation; then a node id and tier mask a
    replica.

    If all replicas exceed MAX_COUNT, each key has only as many as fit for every key.
    """

    TYPE = 11
    replicas: CountedU8s
    sizes: U64s
    checksums: U64s
    generations: U64s
    nodes: CountedU32s
    tiers: U8s


@message
class Exists(Message):
    """Ask which of these keys can be read now. Answer: Flags. Not an access: it does not affect eviction."""

    TYPE = 12
    keys: Keys


@message
class MatchPrefix(Message):
    """Ask how many of these keys can be read now, from the first on without a gap. Answer: Count. Not an access."""

    TYPE = 13
    keys: Keys


@message
class Reserve(Message):
    """Reserve these keys for writing.

    `local_node` is preferred (0: none); `avoid` is never chosen. Answer: ReserveReply.
    """

    TYPE = 14
    WIRE = ("local_node", "avoid", "keys", "sizes")
    keys: Keys
    sizes: U64s
    local_node: U32 = 0
    avoid: U32 = 0


@message
class ReserveReply(Message):
    """For each key GRANTED, PRESENT or BUSY; the node to write to and the block's generation (0 unless granted)."""

    TYPE = 15
    statuses: CountedU8s
    nodes: U32s
    generations: U64s


@message
class CancelReservations(Message):
    """Cancel reservations. Answer: Ok. The generation keeps another client's later reservation of the key."""

    TYPE = 16
    keys: Keys
    generations: U64s


@message
class Remove(Message):
    """Delete these keys from every node, but for leased and pinned blocks unless `force`.

    Answer: Flags (1: it was removed).
    """

    TYPE = 17
    WIRE = ("force", "keys")
    keys: Keys
    force: U8 = 0


@message
class Pin(Message):
    """Pin these blocks (`pinned` 1) or unpin them (0). Answer: Flags (1: the block exists)."""

    TYPE = 18
    WIRE = ("pinned", "keys")
    keys: Keys
    pinned: U8 = 1


@message
class RemoveMatching(Message):
    """Delete the blocks of one namespace, or of any, whose keys match a pattern. Answer: Count of removed blocks.

    In the pattern `*` is any bytes, `?` any byte, `[...]` one of those bytes. Leased and pinned blocks stay unless
    `force`.
    """

    TYPE = 21
    WIRE = ("force", "any_namespace", "namespace", "pattern")
    namespace: Text
    any_namespace: U8
    pattern: Text
    force: U8 = 0


@message
class PinFor(Message):
    """Pin these blocks for `ttl_ms`, unless they are pinned for longer. Answer: Flags (1: the block exists)."""

    TYPE = 22
    WIRE = ("ttl_ms", "keys")
    keys: Keys
    ttl_ms: U32


@message
class Replicate(Message):
    """Set these blocks' replica target to `count`.

    Answer, once that is durable: Flags (REPLICAS_...); send again to poll.
    """

    TYPE = 23
    WIRE = ("count", "keys")
    keys: Keys
    count: U8


@message
class Nodes(Message):
    """Ask for the live nodes. Answer: NodeTable."""

    TYPE = 19


@message
class NodeTable(Message):
    """The live nodes: id, name, host id and Unix socket path (or "") as in their Welcome, TCP address, transfer engine.

    `transfers` are descriptions in the engine's own format; a node's changes with its links, and its revision rises
    then. `tickets`: a ticket for each node where tokens are configured, b"" for a node without a key yet. They are
    valid for `ticket_ms` from now on; 0: none are needed.
    """

    TYPE = 20
    ids: CountedU32s
    names: Labels
    hosts: Labels
    unix: Labels
    tcp: Labels
    revisions: U64s
    transfers: Blobs
    tickets: Blobs = field(default_factory=list)
    ticket_ms: U32 = 0
