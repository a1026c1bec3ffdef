"""What clients ask a master: where blocks are, who may write them, and who the nodes are.

Keys belong to the tenant that the connection said in its Hello.
"""

from dataclasses import field
from typing import Final

from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.message import U8, U32, Blobs, CountedU8s, CountedU32s, Keys, Labels, Message, Text, U8s, U32s, U64s, message

MAX_PATTERN_BYTES: Final = 1024


def check_pattern(pattern: str) -> None:
    """Raises InvalidArgument for one that is longer than a pattern may be."""
    if len(pattern.encode()) > MAX_PATTERN_BYTES:
        raise InvalidArgument(f"a pattern is at most {MAX_PATTERN_BYTES} bytes long, not {len(pattern.encode())}")


@message
class Lookup(Message):
    """Where are these keys? `avoid` is a node the asker could not reach (0: none). Answer: Locations."""

    TYPE = 10
    WIRE = ("avoid", "keys")
    keys: Keys
    avoid: U32 = 0


@message
class Locations(Message):
    """For each key the number of replicas (0: a miss), size, checksum, generation; then a node id and tier mask a replica. Where these are
    more than a message takes, as many are told of each key at most."""

    TYPE = 11
    replicas: CountedU8s
    sizes: U64s
    checksums: U64s
    generations: U64s
    nodes: CountedU32s
    tiers: U8s


@message
class Exists(Message):
    """Which of these keys can be read now? Answer: Flags. Not an access: it keeps no block alive."""

    TYPE = 12
    keys: Keys


@message
class MatchPrefix(Message):
    """How many of these keys, from the first on without a gap, can be read now? Answer: Count. Not an access."""

    TYPE = 13
    keys: Keys


@message
class Reserve(Message):
    """Who may write these keys, and where? `local_node` is preferred (0: none); `avoid` is never granted. Answer: Grants."""

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
    """These reserved keys will not be written after all. Answer: Ok. Generations guard against cancelling another's reservation."""

    TYPE = 16
    keys: Keys
    generations: U64s


@message
class Remove(Message):
    """Delete these keys from every node. Leased and pinned blocks stay unless `force`. Answer: Flags (1: it was there and is gone)."""

    TYPE = 17
    WIRE = ("force", "keys")
    keys: Keys
    force: U8 = 0


@message
class Pin(Message):
    """Keep these blocks (`pinned` 1) from eviction, or let them go (0). Answer: Flags (1: it is there)."""

    TYPE = 18
    WIRE = ("pinned", "keys")
    keys: Keys
    pinned: U8 = 1


@message
class RemoveMatching(Message):
    """Delete the blocks of one namespace, or of any, whose keys match a pattern, in which `*` is any bytes, `?` any byte and `[...]` one of
    those. Leased and pinned ones stay unless `force`. Answer: Count, of those that were there and are gone."""

    TYPE = 21
    WIRE = ("force", "any_namespace", "namespace", "pattern")
    namespace: Text
    any_namespace: U8
    pattern: Text
    force: U8 = 0


@message
class PinFor(Message):
    """Keep these blocks from eviction for so long, unless they are pinned for longer. Answer: Flags (1: it is there)."""

    TYPE = 22
    WIRE = ("ttl_ms", "keys")
    keys: Keys
    ttl_ms: U32


@message
class Replicate(Message):
    """Have these blocks at `count` nodes, from now on. Answer, once that is durable: Flags (REPLICAS_...); who waits asks again."""

    TYPE = 23
    WIRE = ("count", "keys")
    keys: Keys
    count: U8


@message
class Nodes(Message):
    """Who are the nodes? Answer: NodeTable."""

    TYPE = 19


@message
class NodeTable(Message):
    """The live nodes: id, name, host id and Unix socket path (or "") as their Welcome has them, TCP address `host:port`, and how their
    transfer engines are reached.

    That is the engine's own bytes. It may change while a node lives, when a link goes down or comes up; the revision rises then.
    Where tokens are needed, `tickets` has for each node what to show it, b"" for one that has no key yet; they can be used for
    `ticket_ms` from now on, 0: none are needed.
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
