"""What clients ask a node: to write, to read, and to share its memory.

Keys belong to the tenant that the connection said in its Hello.
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
    Text,
    U8s,
    U32s,
    U64s,
    message,
)

ALREADY_THERE, STORED, ASK_AGAIN = 0, 1, 2
"""Answers to Put and Commit: there before; stored; no room beside the rest of the batch, or being written."""
ACK_CLUSTER, ACK_NODE, ACK_NODE_NOW = 0, 1, 2
"""When a Put is answered: once the master has made its blocks durable; once this node holds them; as ACK_NODE, and ASK_AGAIN in place of a
wait for room."""
KEPT_ACKS: Final = (ACK_NODE, ACK_NODE_NOW)
"""Those of puts that are stored once the node holds them, whatever the master knows."""
MISS, INLINE, MAPPED, LATER = 0, 1, 2, 3
"""Answers to Read: not here; its bytes are in the payload; its bytes are in a slab that this connection may map; it is here, and did not
fit into this answer: ask again."""
HOLD_MISS, HOLD_GRANTED, HOLD_REFUSED = 0, 1, 2
"""Answers to HoldBlocks: not here; it stays; it is here, and no more may be held."""


@message
class Put(Message):
    """Write these blocks; the values follow as payload, in order. A generation of 0: not reserved, the node claims it at the master.

    Answer: Flags: 1 stored, 0 already there, 2 no room beside the rest of the batch, being written, or not known to the master yet:
    ask again. With `ack` 0 after publication. With 1, which takes generations of 0 only, at once: the blocks can be read at this node,
    which claims them in its own time (Flush waits for it). With 2 as with 1, and a block without room is answered 2 in place of waiting.
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
    """Give slots for these blocks, to be written through shared memory (Unix sockets only), or with `engine` 1 by the transfer engine.

    A generation of 0: not reserved; its Commit is answered as a Put with `ack` 1 is. Answer: Opened.
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
    """For each key GRANTED, PRESENT or BUSY, the put's id and its place: the slab and offset, or for a writer by the transfer engine the
    region (as its node's engine exports it), else b""; then slabs that later puts will use, to be mapped ahead."""

    TYPE = 42
    statuses: CountedU8s
    put_ids: U64s
    slabs: U32s
    offsets: U64s
    regions: Blobs
    ahead: CountedU32s


@message
class CommitPuts(Message):
    """These puts are written; checksums are xxh3_64 of their values.

    Answer: Flags, after publication of those that were reserved: 1 stored, 2 the put had expired: ask again.
    """

    TYPE = 43
    put_ids: CountedU64s
    checksums: U64s


@message
class AbortPuts(Message):
    """Forget these puts and free their slots. Answer: Ok; unknown ids are ignored."""

    TYPE = 44
    put_ids: CountedU64s


@message
class ReadBlocks(Message):
    """Give these blocks. A generation of 0 takes any. Answer: Blocks.

    Values in mappable memory and larger than `inline_bytes` come MAPPED, under a lease of `lease_ms`, if the connection can map
    (a Unix socket) or the reader fetches them by the transfer engine (`engine` 1); all others come INLINE.
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
    """For each key MISS, INLINE, MAPPED or LATER, size, checksum, tier bit, and the place of a mapped one.

    LATER: the value is here, and more than one answer, or the node at the time, has room for. At least one key is answered otherwise.

    Inline values follow as payload, in order. `lease` covers all mapped ones (0: none) until `lease_until_ns` on the host's
    CLOCK_MONOTONIC, or Release; `lease_ms` is the same as a length of time, for readers with another clock.
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


@message
class ReleaseLeases(Message):
    """These leases are over. No answer; request id 0."""

    TYPE = 47
    leases: CountedU64s


@message
class MapSlabs(Message):
    """Send descriptors of these slabs (at most 64), read-only or writable, and say which of those `held` (mapped before, at most 4096) are
    gone. Unix sockets only. Answer: MapSlabsReply."""

    TYPE = 48
    WIRE = ("writable", "slabs", "held")
    slabs: CountedU32s
    writable: U8 = 0
    held: CountedU32s = ()


@message
class MapSlabsReply(Message):
    """Sizes of the slabs asked for, in order, 0 for one that is gone; a descriptor each for the others by SCM_RIGHTS; and those that the
    asker held and are gone."""

    TYPE = 49
    sizes: CountedU64s
    gone: CountedU32s = ()


@message
class ExportSlabs(Message):
    """Show these slabs (at most 64) to my transfer engine, for reading. Answer: ExportSlabsReply."""

    TYPE = 50
    slabs: CountedU32s


@message
class ExportSlabsReply(Message):
    """The slabs as the node's transfer engine exports them, in order, b"" for one that is gone."""

    TYPE = 51
    regions: CountedBlobs


@message
class OpenIndex(Message):
    """Send descriptors of my tenant's index, to be read, and of my desk, to be written: protocol/shared_index.py. Unix sockets only; the
    desk is this connection's, and a later OpenIndex gives it again, with the index of then. Answer: MapSlabsReply, both sizes."""

    TYPE = 54


@message
class WaitCommitted(Message):
    """Which of this tenant's blocks were put here with `ack` 1, or unreserved by Open, and the master has not decided about yet?

    Answer: Flags, empty, once it has decided about all that were here when this was asked: they are durable there, or it has another
    version, or they have left the node.
    """

    TYPE = 55


@message
class HoldBlocks(Message):
    """Keep these blocks in their tier for `ttl_ms`, or until ReleaseHolds, or the end of this connection. A generation of 0 takes any.

    `number` is the client's own. A number that the node knows already gets these blocks besides its own, and the later end. Not an access.
    Answer: Flags, HOLD_MISS, HOLD_GRANTED or HOLD_REFUSED for each key.
    """

    TYPE = 56
    number: U64
    ttl_ms: U32
    keys: Keys
    generations: U64s


@message
class ReleaseHolds(Message):
    """These holds of the tenant are over, whatever connection they were taken by. No answer; request id 0. Unknown ones are ignored."""

    TYPE = 57
    numbers: CountedU64s


@message
class OpenSlotAhead(Message):
    """Open a slot of this size for this connection's next put, in place of the one that it has (Unix sockets only).

    The slot is offered in the connection's page (protocol/writer_page.py). Answer: MapSlabsReply of one size: the
    page's, with its descriptor,
    the first time; 0 afterwards.
    """

    TYPE = 58
    size_bytes: U64


@message
class PutFromSlot(Message):
    """Store the value that was written into slot `number` of this connection's page. Then open another slot of `next_bytes` there; 0: none.

    The rest is the body of a Put of one unreserved block with `ack` 1, and so is the answer: Flags, of one flag. 2: the slot was taken
    back, or another writer has the key; the put has to be made by Open or Put.
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
