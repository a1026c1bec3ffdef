"""Every message of the hot path: its type number, its form (fields in wire order) and its codec.

Keys belong to the tenant that the connection said in its Hello. A batch that is too large for one message is cut by the sender.
Control (registration, heartbeats, status, listing) is gRPC: control.proto. docs/protocol.md is the byte-for-byte description.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

from kvstore.protocol.wire import Form

Ints = Sequence[int]

ROLE_CLIENT: Final = 1
ROLE_NODE: Final = 2

SERVER_MASTER: Final = 1
SERVER_NODE: Final = 2

GRANTED, PRESENT, BUSY = 0, 1, 2
"""Answers to Reserve and Open: write it; it is already there; another writer holds it, ask again."""

MISS, INLINE, MAPPED = 0, 1, 2
"""Answers to Read: not here; its bytes are in the payload; its bytes are in a slab that this connection may map."""

EVENT_COMMIT, EVENT_GONE, EVENT_MOVED = 1, 2, 3
PHASE_STREAM, PHASE_SYNC_BEGIN, PHASE_SYNC, PHASE_SYNC_END = 0, 1, 2, 3

TIER_BITS: Final = {"hbm": 1, "dram": 2, "nvme": 4}
"""Bits of a tier mask: where a node has copies of a block."""


class Message:
    """A body with fields in the order of FORM, whose kinds `wire.Form` explains."""

    __slots__ = ()
    TYPE: ClassVar[int]
    FORM: ClassVar[tuple[tuple[str, str], ...]] = ()
    _form: ClassVar[Form]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._form = Form(cls.FORM, tuple(cls.__annotations__))

    def pack(self) -> bytes:
        return self._form.pack(self)

    @classmethod
    def unpack(cls, body: bytes | bytearray | memoryview) -> Self:
        """Raises ProtocolError unless `body` has exactly this message's form."""
        return cls(*cls._form.unpack(body))


@dataclass(slots=True)
class Hello(Message):
    """First message of every connection: who asks. `epoch` is a node's registration epoch.

    It is 0 for clients, and for a node that is not registered yet: such a node only learns the master's control address, and says
    Hello again on the same connection once it is.
    """

    TYPE = 1
    FORM = (("role", "u8"), ("tenant", "text"), ("token", "text"), ("name", "text"), ("epoch", "u64"))
    role: int
    tenant: str = ""
    token: str = ""
    name: str = ""
    epoch: int = 0


@dataclass(slots=True)
class Welcome(Message):
    """Answer to Hello: who answers, and where else it can be reached.

    `unix` is a socket path usable by processes of the host whose boot id is `host_id`; `control` is a master's gRPC address.
    """

    TYPE = 2
    FORM = (
        ("server", "u8"),
        ("name", "text"),
        ("node_id", "u32"),
        ("epoch", "u64"),
        ("host_id", "text"),
        ("unix", "text"),
        ("control", "text"),
    )
    server: int
    name: str
    node_id: int = 0
    epoch: int = 0
    host_id: str = ""
    unix: str = ""
    control: str = ""


@dataclass(slots=True)
class Failure(Message):
    """The request failed with one typed error; nothing of it took effect unless its documentation says so."""

    TYPE = 3
    FORM = (("code", "u32"), ("text", "text"))
    code: int
    text: str


@dataclass(slots=True)
class Ok(Message):
    """Done, with nothing more to say."""

    TYPE = 4


@dataclass(slots=True)
class Flags(Message):
    """One byte a key (or put) of the request, 1 for yes."""

    TYPE = 5
    FORM = (("flags", "count"), ("flags", "u8s"))
    flags: bytes


@dataclass(slots=True)
class Count(Message):
    TYPE = 6
    FORM = (("value", "u64"),)
    value: int


@dataclass(slots=True)
class Lookup(Message):
    """Where are these keys? `avoid` is a node the asker could not reach (0: none). Answer: Locations."""

    TYPE = 10
    FORM = (("avoid", "u32"), ("keys", "keys"))
    keys: list[bytes]
    avoid: int = 0


@dataclass(slots=True)
class Locations(Message):
    """For each key the number of replicas (0: a miss), size, checksum, generation; then a node id and tier mask a replica."""

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


@dataclass(slots=True)
class Exists(Message):
    """Which of these keys can be read now? Answer: Flags. Not an access: it keeps no block alive."""

    TYPE = 12
    FORM = (("keys", "keys"),)
    keys: list[bytes]


@dataclass(slots=True)
class MatchPrefix(Message):
    """How many of these keys, from the first on without a gap, can be read now? Answer: Count. Not an access."""

    TYPE = 13
    FORM = (("keys", "keys"),)
    keys: list[bytes]


@dataclass(slots=True)
class Reserve(Message):
    """Who may write these keys, and where? `local_node` is preferred (0: none); `avoid` is never granted. Answer: Grants."""

    TYPE = 14
    FORM = (("local_node", "u32"), ("avoid", "u32"), ("keys", "keys"), ("sizes", "u64s"))
    keys: list[bytes]
    sizes: Ints
    local_node: int = 0
    avoid: int = 0


@dataclass(slots=True)
class Grants(Message):
    """For each key GRANTED, PRESENT or BUSY; the node to write to and the block's generation (0 unless granted)."""

    TYPE = 15
    FORM = (("statuses", "count"), ("statuses", "u8s"), ("nodes", "u32s"), ("generations", "u64s"))
    statuses: bytes
    nodes: Ints
    generations: Ints


@dataclass(slots=True)
class Cancel(Message):
    """These reserved keys will not be written after all. Answer: Ok. Generations guard against cancelling another's reservation."""

    TYPE = 16
    FORM = (("keys", "keys"), ("generations", "u64s"))
    keys: list[bytes]
    generations: Ints


@dataclass(slots=True)
class Remove(Message):
    """Delete these keys from every node. Leased and pinned blocks stay unless `force`. Answer: Flags (1: it was there and is gone)."""

    TYPE = 17
    FORM = (("force", "u8"), ("keys", "keys"))
    keys: list[bytes]
    force: int = 0


@dataclass(slots=True)
class Pin(Message):
    """Keep these blocks (`pinned` 1) from eviction, or let them go (0). Answer: Flags (1: it is there)."""

    TYPE = 18
    FORM = (("pinned", "u8"), ("keys", "keys"))
    keys: list[bytes]
    pinned: int = 1


@dataclass(slots=True)
class Nodes(Message):
    """Who are the nodes? Answer: NodeTable."""

    TYPE = 19


@dataclass(slots=True)
class NodeTable(Message):
    """The live nodes: id, name, boot id of their host, Unix socket path (or ""), TCP address `host:port`."""

    TYPE = 20
    FORM = (
        ("ids", "count"),
        ("ids", "u32s"),
        ("names", "labels"),
        ("hosts", "labels"),
        ("unix", "labels"),
        ("tcp", "labels"),
    )
    ids: Ints
    names: list[str]
    hosts: list[str]
    unix: list[str]
    tcp: list[str]


@dataclass(slots=True)
class Publish(Message):
    """A node tells the master what happened to its blocks, in order. Answer: Ok, once the catalog has it.

    `epoch` is the registration's; `phase` marks a full inventory (SYNC_BEGIN, SYNC ..., SYNC_END: what was not named is gone).
    Columns by event: kind, key, index into `tenants` and `namespaces`, size, checksum, generation, tier mask, parent ("" none).
    """

    TYPE = 30
    FORM = (
        ("epoch", "u64"),
        ("phase", "u8"),
        ("tenants", "texts"),
        ("namespaces", "texts"),
        ("keys", "keys"),
        ("kinds", "u8s"),
        ("tenant_indexes", "u32s"),
        ("namespace_indexes", "u32s"),
        ("sizes", "u64s"),
        ("checksums", "u64s"),
        ("generations", "u64s"),
        ("tiers", "u8s"),
        ("parents", "parents"),
    )
    epoch: int
    phase: int
    tenants: list[str]
    namespaces: list[str]
    keys: list[bytes]
    kinds: bytes
    tenant_indexes: Ints
    namespace_indexes: Ints
    sizes: Ints
    checksums: Ints
    generations: Ints
    tiers: bytes
    parents: list[bytes]


@dataclass(slots=True)
class Drop(Message):
    """Master to node: delete these blocks of `tenant`. Answer: Flags (1: it was there and is gone).

    A block whose generation is above the one named is newer than the command and stays. `epoch` is the master's.
    """

    TYPE = 31
    FORM = (("epoch", "u64"), ("tenant", "text"), ("force", "u8"), ("keys", "keys"), ("generations", "u64s"))
    epoch: int
    tenant: str
    keys: list[bytes]
    generations: Ints
    force: int = 0


@dataclass(slots=True)
class Hold(Message):
    """Master to node: pin (1) or unpin (0) these blocks of `tenant`. Answer: Flags (1: it is there)."""

    TYPE = 32
    FORM = (("epoch", "u64"), ("tenant", "text"), ("pinned", "u8"), ("keys", "keys"))
    epoch: int
    tenant: str
    keys: list[bytes]
    pinned: int = 1


@dataclass(slots=True)
class Claim(Message):
    """Node to master: these values of `tenant` are in its DRAM, not visible yet: may they become so? Reserve and Publish in one.

    `epoch` is the registration's. Answer: Grants, once the catalog has those that are GRANTED: they are visible at the master from then
    on, under the generation named; the node forgets the others.
    """

    TYPE = 33
    FORM = (
        ("epoch", "u64"),
        ("tenant", "text"),
        ("namespace", "text"),
        ("keys", "keys"),
        ("sizes", "u64s"),
        ("checksums", "u64s"),
        ("parents", "parents"),
    )
    epoch: int
    tenant: str
    namespace: str
    keys: list[bytes]
    sizes: Ints
    checksums: Ints
    parents: list[bytes]


@dataclass(slots=True)
class Put(Message):
    """Write these blocks; the values follow as payload, in order. A generation of 0: not reserved, the node claims it at the master.

    Answer: Flags, after publication: 1 stored, 0 already there, 2 no room beside the rest of the batch, or being written: ask again.
    """

    TYPE = 40
    FORM = (
        ("namespace", "text"),
        ("keys", "keys"),
        ("sizes", "u64s"),
        ("generations", "u64s"),
        ("checksums", "u64s"),
        ("parents", "parents"),
    )
    namespace: str
    keys: list[bytes]
    sizes: Ints
    generations: Ints
    checksums: Ints
    parents: list[bytes]


@dataclass(slots=True)
class Open(Message):
    """Give slots for these blocks, to be written through shared memory. Unix sockets only. Answer: Opened."""

    TYPE = 41
    FORM = (("namespace", "text"), ("keys", "keys"), ("sizes", "u64s"), ("generations", "u64s"), ("parents", "parents"))
    namespace: str
    keys: list[bytes]
    sizes: Ints
    generations: Ints
    parents: list[bytes]


@dataclass(slots=True)
class Opened(Message):
    """For each key GRANTED, PRESENT or BUSY, the put's id and its place; then slabs that later puts will use, to be mapped ahead."""

    TYPE = 42
    FORM = (
        ("statuses", "count"),
        ("statuses", "u8s"),
        ("put_ids", "u64s"),
        ("slabs", "u32s"),
        ("offsets", "u64s"),
        ("ahead", "count"),
        ("ahead", "u32s"),
    )
    statuses: bytes
    put_ids: Ints
    slabs: Ints
    offsets: Ints
    ahead: Ints


@dataclass(slots=True)
class Commit(Message):
    """These puts are written; checksums are xxh3_64 of their values.

    Answer: Flags, after publication: 1 stored, 2 the put had expired: ask again.
    """

    TYPE = 43
    FORM = (("put_ids", "count"), ("put_ids", "u64s"), ("checksums", "u64s"))
    put_ids: Ints
    checksums: Ints


@dataclass(slots=True)
class Abort(Message):
    """Forget these puts and free their slots. Answer: Ok; unknown ids are ignored."""

    TYPE = 44
    FORM = (("put_ids", "count"), ("put_ids", "u64s"))
    put_ids: Ints


@dataclass(slots=True)
class Read(Message):
    """Give these blocks. A generation of 0 takes any. Answer: Blocks.

    Values in mappable memory and larger than `inline_bytes` come MAPPED, under a lease of `lease_ms`, if the connection can map
    (a Unix socket); all others come INLINE.
    """

    TYPE = 45
    FORM = (("inline_bytes", "u64"), ("lease_ms", "u32"), ("keys", "keys"), ("generations", "u64s"))
    keys: list[bytes]
    generations: Ints
    inline_bytes: int
    lease_ms: int


@dataclass(slots=True)
class Blocks(Message):
    """For each key MISS, INLINE or MAPPED, size, checksum, tier bit, and the place of a mapped one.

    Inline values follow as payload, in order. `lease` covers all mapped ones (0: none) until `lease_until_ns` on the host's
    CLOCK_MONOTONIC, or Release.
    """

    TYPE = 46
    FORM = (
        ("lease", "u64"),
        ("lease_until_ns", "u64"),
        ("statuses", "count"),
        ("statuses", "u8s"),
        ("sizes", "u64s"),
        ("checksums", "u64s"),
        ("tiers", "u8s"),
        ("slabs", "u32s"),
        ("offsets", "u64s"),
    )
    lease: int
    lease_until_ns: int
    statuses: bytes
    sizes: Ints
    checksums: Ints
    tiers: bytes
    slabs: Ints
    offsets: Ints


@dataclass(slots=True)
class Release(Message):
    """These leases are over. No answer; request id 0."""

    TYPE = 47
    FORM = (("leases", "count"), ("leases", "u64s"))
    leases: Ints


@dataclass(slots=True)
class Slabs(Message):
    """Send descriptors of these slabs (at most 64), read-only or writable. Unix sockets only. Answer: SlabFds."""

    TYPE = 48
    FORM = (("writable", "u8"), ("slabs", "count"), ("slabs", "u32s"))
    slabs: Ints
    writable: int = 0


@dataclass(slots=True)
class SlabFds(Message):
    """Sizes of the slabs asked for, in order, 0 for one that is gone; a descriptor each for the others by SCM_RIGHTS."""

    TYPE = 49
    FORM = (("sizes", "count"), ("sizes", "u64s"))
    sizes: Ints


MESSAGES: Final[dict[int, type[Message]]] = {
    kind.TYPE: kind for kind in list(globals().values()) if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message
}
"""Type number to message."""


REPLIES: Final = frozenset(
    kind.TYPE for kind in (Welcome, Failure, Ok, Flags, Count, Locations, Grants, NodeTable, Opened, Blocks, SlabFds)
)
"""Types that answer a request; all others are requests. Both ends of one connection may ask."""
