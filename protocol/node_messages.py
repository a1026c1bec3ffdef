"""Requests of clients to a node: write, read, hold, and map its memory.

Keys belong to the tenant of the connection's Hello.
"""

from typing import Final

from kvstore.protocol.message import (
    U8,
    U32,
    U64,
    Blobs,
    CountedBlobs,
    CountedU8s,
    CountedU32s,
    CountedU64s,
    Keys,
    Message,
    Parents,
    Rest,
    Text,
    U8s,
    U32s,
    U64s,
    message,
)

ALREADY_STORED, STORED, RETRY_LATER = 0, 1, 2
"""Results of Put and CommitPuts: stored before; stored now; to be put again: no free space beside the
rest of the batch, being written, a checksum mismatch, an expired put, or no master."""
ACK_CLUSTER, ACK_NODE, ACK_NODE_NO_WAIT = 0, 1, 2
"""When a Put is acknowledged: once its blocks are committed to the directory; once this node holds them; as ACK_NODE,
but with RETRY_LATER instead of a wait for free space."""
NODE_ACKS: Final = (ACK_NODE, ACK_NODE_NO_WAIT)
"""Acknowledged by the node alone; the blocks are uncommitted."""
MISS, INLINE, MAPPED, DEFERRED = 0, 1, 2, 3
"""Results of ReadBlocks: not here; bytes in the payload; bytes in a slab to be mapped; here, but over the limit of one
answer: request it again."""
HOLD_MISS, HOLD_GRANTED, HOLD_REFUSED = 0, 1, 2
"""Results of HoldBlocks: not here; held; here, but over the limit of held blocks."""
TO_LOCAL, TO_DRAM = 0, 1
"""Targets of Prefetch: any tier of the node; its DRAM."""
RETAIN_READ, RETAIN_PUT, RETAIN_SET = 0, 1, 2
"""Causes of Retain: a read; a put that stored the blocks; a call of its own."""
NO_PRIORITY: Final = 255
"""Priority of a copied hint of a block that has a session only."""
SEVERAL_SESSIONS: Final = (1 << 64) - 1
"""Session in a copied hint of blocks that several sessions used, or that were put without a session."""
MAX_PREFETCH_KEYS: Final = 16_384
"""Keys in one Prefetch: the blocks of a prompt of 262,144 tokens, and some 10 ms of the node's loop."""


@message
class Put(Message):
    """Write these blocks; the values follow as payload, in order.

    A generation of 0: not reserved, the node commits it (CommitBlocks).

    Answer: Flags. 1: stored; 0: stored before; 2: retry, because there is no free space beside the rest of the batch,
    or the block is being written or uncommitted.

    - `ack` 0: answered after the commit to the directory.
    - `ack` 1 (generations of 0 only): answered once the blocks can be read at this node, which commits them in the
      background (WaitCommitted waits for it).
    - `ack` 2: as 1, but a block without free space gets 2 instead of waiting.
    """

    TYPE = 40
    WIRE = ("ack", "namespace", "keys", "sizes", "generations", "checksums", "parents")
    namespace: Text
    keys: Keys
    sizes: U64s
    generations: U64s
    checksums: U64s
    parents: Parents
    ack: U8 = ACK_CLUSTER


@message
class OpenSlots(Message):
    """Open slots for these blocks, to be written through shared memory (Unix sockets only), or with `engine` 1 by the
    transfer engine.

    A generation of 0: not reserved; its CommitPuts is answered as a Put with `ack` 1. Answer: OpenSlotsReply.
    """

    TYPE = 41
    WIRE = ("engine", "namespace", "keys", "sizes", "generations", "parents")
    namespace: Text
    keys: Keys
    sizes: U64s
    generations: U64s
    parents: Parents
    engine: U8 = 0


@message
class OpenSlotsReply(Message):
    """For each key GRANTED, PRESENT or BUSY, the put's id, and its slot: slab and offset, or with `engine` the exported
    region.

    `slabs_ahead`: slabs of later puts, for the client to map in the background.
    """

    TYPE = 42
    statuses: CountedU8s
    put_ids: U64s
    slabs: U32s
    offsets: U64s
    regions: Blobs
    slabs_ahead: CountedU32s


@message
class CommitPuts(Message):
    """Commit written puts; checksums are xxh3_64 of their values.

    Answer: Flags, after publication of the reserved ones. 1: stored; 2: the put had expired, retry.
    """

    TYPE = 43
    put_ids: CountedU64s
    checksums: U64s


@message
class AbortPuts(Message):
    """Abort these puts and free their slots. Answer: Ok; unknown ids are ignored."""

    TYPE = 44
    put_ids: CountedU64s


@message
class ReadBlocks(Message):
    """Read these blocks. A generation of 0 matches any. Answer: ReadBlocksReply.

    Values over `inline_bytes` in mappable memory are MAPPED, under a lease of `lease_ms`, if the connection is a Unix
    socket or the reader uses the transfer engine (`engine` 1). All others are INLINE.
    """

    TYPE = 45
    WIRE = ("inline_bytes", "lease_ms", "engine", "keys", "generations")
    keys: Keys
    generations: U64s
    inline_bytes: U64
    lease_ms: U32
    engine: U8 = 0


@message
class ReadBlocksReply(Message):
    """For each key MISS, INLINE, MAPPED or DEFERRED, size, checksum, tier bit, and slab and offset of a mapped one.

    DEFERRED: the value exceeds the answer or the node's read budget. At least one key has another status.

    Inline values follow as payload, in order. `lease` covers all mapped ones (0: none) until `lease_until_ns` on the
    host's CLOCK_MONOTONIC, or ReleaseLeases; `lease_ms` is the same as a duration, for readers with another clock.

    `hints` are the live retention hints of the blocks, for a reader that is a node (protocol/retention.py).
    """

    TYPE = 46
    lease: U64
    lease_until_ns: U64
    lease_ms: U32
    statuses: CountedU8s
    sizes: U64s
    checksums: U64s
    tiers: U8s
    slabs: U32s
    offsets: U64s
    hints: Rest = b""


@message
class ReleaseLeases(Message):
    """Release these leases. No answer; request id 0."""

    TYPE = 47
    leases: CountedU64s


@message
class MapSlabs(Message):
    """Request descriptors of these slabs (at most 64), read-only or writable. Unix sockets only. Answer: MapSlabsReply.

    `mapped`: slabs that the client has mapped (at most 4096), of which the answer lists the freed ones.
    """

    TYPE = 48
    WIRE = ("writable", "slabs", "mapped")
    slabs: CountedU32s
    writable: U8 = 0
    mapped: CountedU32s = ()


@message
class MapSlabsReply(Message):
    """Sizes of the requested slabs, in order, 0 for a freed one; a descriptor for each of the others, by SCM_RIGHTS.

    `freed`: those of the request's `mapped` that are freed.
    """

    TYPE = 49
    sizes: CountedU64s
    freed: CountedU32s = ()


@message
class ExportSlabs(Message):
    """Export these slabs (at most 64) to the client's transfer engine, for reading. Answer: ExportSlabsReply."""

    TYPE = 50
    slabs: CountedU32s


@message
class ExportSlabsReply(Message):
    """The slabs as the node's transfer engine exports them, in order; b"" for a freed one."""

    TYPE = 51
    regions: CountedBlobs


@message
class OpenIndex(Message):
    """Request descriptors of the tenant's shared-memory index (read-only) and of the client's reader slots:
    protocol/shared_index.py.

    Unix sockets only. The reader slots belong to this connection; a later OpenIndex returns the same ones, with the
    current index. Answer: MapSlabsReply, both sizes.
    """

    TYPE = 54


@message
class WaitCommitted(Message):
    """Wait until this tenant's uncommitted blocks are committed: puts with `ack` 1, or by OpenSlots without a
    reservation.

    Answer: Flags, empty, once each block that was uncommitted at the request is durable in the directory, was dropped
    for another version, or has left the node.
    """

    TYPE = 55


@message
class HoldBlocks(Message):
    """Hold these blocks in their tier for `ttl_ms`, until ReleaseHolds, or until this connection closes.

    A generation of 0 matches any.

    `number` is chosen by the client. A known number adds the blocks to that hold, which keeps the later end. Not an
    access. Answer: Flags, HOLD_MISS, HOLD_GRANTED or HOLD_REFUSED for each key.
    """

    TYPE = 56
    number: U64
    ttl_ms: U32
    keys: Keys
    generations: U64s


@message
class ReleaseHolds(Message):
    """Release these holds of the tenant, taken by any connection. No answer; request id 0. Unknown ones are ignored."""

    TYPE = 57
    numbers: CountedU64s


@message
class OpenSlotAhead(Message):
    """Open a slot of this size for this connection's next put; it replaces an earlier one (Unix sockets only).

    The node writes the slot into the connection's page (protocol/writer_page.py). Answer: MapSlabsReply of one size:
    the page's, with its descriptor, the first time; 0 afterwards.
    """

    TYPE = 58
    size_bytes: U64


@message
class PutFromSlot(Message):
    """Store the value in slot `number` of this connection's page, and open a slot of `next_bytes` for the next put (0:
    none).

    The other fields and the answer (one flag) are those of a Put of one unreserved block with `ack` 1. 2: the slot was
    withdrawn, or another writer has the key; put it by OpenSlots or Put.
    """

    TYPE = 59
    WIRE = ("number", "next_bytes", "ack", "namespace", "keys", "sizes", "generations", "checksums", "parents")
    number: U64
    next_bytes: U64
    namespace: Text
    keys: Keys
    sizes: U64s
    generations: U64s
    checksums: U64s
    parents: Parents
    ack: U8 = ACK_NODE


@message
class Prefetch(Message):
    """Bring these blocks (at most MAX_PREFETCH_KEYS) into the node in the background. `to` TO_LOCAL: those that the
    node lacks are copied from other nodes into its DRAM. TO_DRAM: in addition its own blocks below DRAM are copied into
    DRAM.

    Answer: Count, at once: the blocks that are queued or requested from the masters. Not an access.
    """

    TYPE = 80
    WIRE = ("to", "keys")
    keys: Keys
    to: U8 = TO_DRAM


@message
class Retain(Message):
    """Apply a retention hint (protocol/retention.py) to those of these blocks (at most MAX_BATCH) that are here.
    Answer: Flags. 1: applied; 0: not here.

    `ttl_ms` and `reuse_ms`: 0 for None. `session`: `session_id` of its name, 0 without one. `cause`: why the caller
    sends it. With RETAIN_PUT the session owns those of the blocks that have none; with RETAIN_READ it used them.
    """

    TYPE = 81
    WIRE = ("cause", "priority", "ttl_ms", "reuse_ms", "session", "keys")
    keys: Keys
    priority: U8
    ttl_ms: U32 = 0
    reuse_ms: U32 = 0
    session: U64 = 0
    cause: U8 = RETAIN_PUT


@message
class ReleaseSession(Message):
    """End a session of retention hints of the tenant (`session_id` of its name): its blocks that no other session used are evicted first.
    Answer: Count of these blocks. An unknown session has none."""

    TYPE = 82
    session: U64
