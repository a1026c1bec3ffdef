"""What clients ask a master: where blocks are, who may write them, and who the nodes are.

Keys belong to the tenant that the connection said in its Hello.
"""

from dataclasses import field
from typing import Final

from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.message import Ints, Message, message

MAX_PATTERN_BYTES: Final = 1024


def check_pattern(pattern: str) -> None:
    """Raises InvalidArgument for one that is longer than a pattern may be."""
    if len(pattern.encode()) > MAX_PATTERN_BYTES:
        raise InvalidArgument(f"a pattern is at most {MAX_PATTERN_BYTES} bytes long, not {len(pattern.encode())}")


@message
class Lookup(Message):
    """Where are these keys? `avoid` is a node the asker could not reach (0: none). Answer: Locations."""

    TYPE = 10
    FORM = (("avoid", "u32"), ("keys", "keys"))
    keys: list[bytes]
    avoid: int = 0


@message
class Locations(Message):
    """For each key the number of replicas (0: a miss), size, checksum, generation; then a node id and tier mask a replica. Where these are
    more than a message takes, as many are told of each key at most."""

    TYPE = 11
    FORM = (
        ("replicas", "count"),
        ("replicas", "u8s"),
        ("sizes", "u64s"),
        ("checksums", "u64s"),
        ("generations", "u64s"),
        ("nodes", "count"),
        ("nodes", "u32s"),
        ("tiers", "u8s"),
    )
    replicas: bytes
    sizes: Ints
    checksums: Ints
    generations: Ints
    nodes: Ints
    tiers: bytes


@message
class Exists(Message):
    """Which of these keys can be read now? Answer: Flags. Not an access: it keeps no block alive."""

    TYPE = 12
    FORM = (("keys", "keys"),)
    keys: list[bytes]


@message
class MatchPrefix(Message):
    """How many of these keys, from the first on without a gap, can be read now? Answer: Count. Not an access."""

    TYPE = 13
    FORM = (("keys", "keys"),)
    keys: list[bytes]


@message
class Reserve(Message):
    """Who may write these keys, and where? `local_node` is preferred (0: none); `avoid` is never granted. Answer: Grants."""

    TYPE = 14
    FORM = (("local_node", "u32"), ("avoid", "u32"), ("keys", "keys"), ("sizes", "u64s"))
    keys: list[bytes]
    sizes: Ints
    local_node: int = 0
    avoid: int = 0


@message
class Grants(Message):
    """For each key GRANTED, PRESENT or BUSY; the node to write to and the block's generation (0 unless granted)."""

    TYPE = 15
    FORM = (("statuses", "count"), ("statuses", "u8s"), ("nodes", "u32s"), ("generations", "u64s"))
    statuses: bytes
    nodes: Ints
    generations: Ints


@message
class Cancel(Message):
    """These reserved keys will not be written after all. Answer: Ok. Generations guard against cancelling another's reservation."""

    TYPE = 16
    FORM = (("keys", "keys"), ("generations", "u64s"))
    keys: list[bytes]
    generations: Ints


@message
class Remove(Message):
    """Delete these keys from every node. Leased and pinned blocks stay unless `force`. Answer: Flags (1: it was there and is gone)."""

    TYPE = 17
    FORM = (("force", "u8"), ("keys", "keys"))
    keys: list[bytes]
    force: int = 0


@message
class Pin(Message):
    """Keep these blocks (`pinned` 1) from eviction, or let them go (0). Answer: Flags (1: it is there)."""

    TYPE = 18
    FORM = (("pinned", "u8"), ("keys", "keys"))
    keys: list[bytes]
    pinned: int = 1


@message
class RemoveMatching(Message):
    """Delete the blocks of one namespace, or of any, whose keys match a pattern, in which `*` is any bytes, `?` any byte and `[...]` one of
    those. Leased and pinned ones stay unless `force`. Answer: Count, of those that were there and are gone."""

    TYPE = 21
    FORM = (("force", "u8"), ("any_namespace", "u8"), ("namespace", "text"), ("pattern", "text"))
    namespace: str
    any_namespace: int
    pattern: str
    force: int = 0


@message
class PinFor(Message):
    """Keep these blocks from eviction for so long, unless they are pinned for longer. Answer: Flags (1: it is there)."""

    TYPE = 22
    FORM = (("ttl_ms", "u32"), ("keys", "keys"))
    keys: list[bytes]
    ttl_ms: int


@message
class Replicate(Message):
    """Have these blocks at `count` nodes, from now on. Answer, once that is durable: Flags (REPLICAS_...); who waits asks again."""

    TYPE = 23
    FORM = (("count", "u8"), ("keys", "keys"))
    keys: list[bytes]
    count: int


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
    FORM = (
        ("ids", "count"),
        ("ids", "u32s"),
        ("names", "labels"),
        ("hosts", "labels"),
        ("unix", "labels"),
        ("tcp", "labels"),
        ("revisions", "u64s"),
        ("transfers", "blobs"),
        ("tickets", "blobs"),
        ("ticket_ms", "u32"),
    )
    ids: Ints
    names: list[str]
    hosts: list[str]
    unix: list[str]
    tcp: list[str]
    revisions: Ints
    transfers: list[bytes]
    tickets: list[bytes] = field(default_factory=list)
    ticket_ms: int = 0
