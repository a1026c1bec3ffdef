"""Messages between nodes and masters. Both ends of the connection send requests."""

from kvstore.protocol.message import (
    U8,
    U32,
    U64,
    CountedBlobs,
    CountedU8s,
    CountedU64s,
    Keys,
    Message,
    Parents,
    Rest,
    Text,
    Texts,
    U8s,
    U32s,
    U64s,
    message,
)

EVENT_COMMIT, EVENT_REMOVED, EVENT_MOVED = 1, 2, 3
PHASE_STREAM, PHASE_SYNC_BEGIN, PHASE_SYNC, PHASE_SYNC_END = 0, 1, 2, 3
DRAIN_OFF, DRAIN_CLOSED, DRAIN_SAVE = 0, 1, 2
COPY_REASONS = ("replica", "home", "hot", "drain", "prefetch")
"""Why a block is copied to another node: a replica that its writer asked for, a copy at its home, a copy of a block
that many hosts read, a drain, or a request of the receiver (a prefetch, or a transfer for a scheduled request)."""
COPY_REPLICA, COPY_HOME, COPY_HOT, COPY_DRAIN, COPY_PREFETCH = range(len(COPY_REASONS))


@message
class Publish(Message):
    """Node to master: events of its blocks, in order. Answer: Ok, once they are durable in the catalog.

    `epoch` is the registration's. `phase` marks a full resync: SYNC_BEGIN, SYNC ..., SYNC_END; blocks that were not
    listed by then are removed. Columns by event: kind, key, index into `tenants` and `namespaces`, size, checksum,
    generation, tier mask, parent ("" for none).

    `prompts`: with several partitions, PROMPT_BYTES for each event; blocks with equal ones are to have one home node.
    """

    TYPE = 30
    epoch: U64
    phase: U8
    tenants: Texts
    namespaces: Texts
    keys: Keys
    kinds: U8s
    tenant_indexes: U32s
    namespace_indexes: U32s
    sizes: U64s
    checksums: U64s
    generations: U64s
    tiers: U8s
    parents: Parents
    prompts: Rest = b""


@message
class Digests(Message):
    """Node to master, after SYNC_BEGIN: digests of the node's runs of blocks (digests.py), by ascending generation.

    All messages but the last have `has_more`. Answer, once all are compared: Flags, one a run. 1: the master has the
    same blocks and counts them as listed; 0: the node lists the run's blocks before SYNC_END.

    `epoch` is the registration's. Columns by run: generation of its first block, number of blocks, digest under `seed`,
    tier mask.
    """

    TYPE = 25
    epoch: U64
    seed: U64
    has_more: U8
    first_generations: CountedU64s
    counts: U8s
    sums: U64s
    tiers: U8s


@message
class DeleteBlocks(Message):
    """Master to node: delete these blocks of `tenant`.

    Answer: Flags (1: not at the node, 0: kept, because it is in use).

    A block with a higher generation than the one given is newer than the command and is kept. `epoch` is the master's.
    """

    TYPE = 31
    WIRE = ("epoch", "tenant", "force", "keys", "generations")
    epoch: U64
    tenant: Text
    keys: Keys
    generations: U64s
    force: U8 = 0


@message
class SetPinned(Message):
    """Master to node: pin (1) or unpin (0) these blocks of `tenant`. Answer: Flags (1: at the node)."""

    TYPE = 32
    WIRE = ("epoch", "tenant", "pinned", "keys")
    epoch: U64
    tenant: Text
    keys: Keys
    pinned: U8 = 1


@message
class CommitBlocks(Message):
    """Node to master: commit these uncommitted blocks of `tenant`, which are in the node's DRAM.

    Reserve and Publish in one.

    Answer: ReserveReply, once those GRANTED are durable in the catalog, under the generation given. Without
    `acknowledged` the node drops the others. With it the blocks can be read at the node already:

    - PRESENT with a generation: the directory has a block of equal size and checksum, and the node is now one more
      holder.
    - PRESENT without one: the directory has another version, and the node drops its own.
    - BUSY: the node sends the block again.

    `epoch` is the registration's. `prompts` is as in Publish.
    """

    TYPE = 33
    WIRE = ("epoch", "acknowledged", "tenant", "namespace", "keys", "sizes", "checksums", "parents", "prompts")
    epoch: U64
    tenant: Text
    namespace: Text
    keys: Keys
    sizes: U64s
    checksums: U64s
    parents: Parents
    acknowledged: U8 = 0
    prompts: Rest = b""


@message
class CopyBlocks(Message):
    """Master to node: copy these blocks of `tenant` from node `source`, then report with CopyResult.

    - Address: the Unix socket `unix` if it is the file that `host_id` identifies, else `tcp`; `transfer` describes the
      source's transfer engine, if it has one. `ticket` is a pass for the source (security/tickets/ticket.py), b"" where
      none is needed.
    - Answer, at once: Flags. 1: queued, until an uncommitted block of that key here is committed or dropped; 0: the
      block is here or being written, or the queue is full.

    `epoch` is the master's, `reason` an index into COPY_REASONS.
    """

    TYPE = 34
    epoch: U64
    tenant: Text
    namespace: Text
    source: U32
    host_id: Text
    unix: Text
    tcp: Text
    keys: Keys
    sizes: U64s
    checksums: U64s
    generations: U64s
    parents: Parents
    transfer: CountedBlobs
    ticket: CountedU8s = b""
    reason: U8 = 0


@message
class CopyResult(Message):
    """Node to master: results of a CopyBlocks. Blocks that arrived are in its DRAM and not visible yet.

    Answer: Flags. 1: the node is now a holder and makes the block visible. 0: the copy is void (the block was removed
    or replaced, lost its last holder, or did not arrive), and the node drops it. `epoch` is the registration's.
    """

    TYPE = 35
    epoch: U64
    tenant: Text
    keys: Keys
    generations: U64s
    arrived: U8s


@message
class SetDraining(Message):
    """Master to node: start or stop draining (`mode` DRAIN_OFF).

    Answer: Ok, before the drain is complete. `epoch` is the master's.

    A draining node refuses new blocks of clients. With DRAIN_SAVE it also copies to its NVMe the blocks that no other
    node holds.
    """

    TYPE = 36
    epoch: U64
    mode: U8


@message
class TicketKey(Message):
    """Master to node: a new key for this node's tickets, made `age_ms` ago. Answer: Ok. `epoch` is the master's.

    Tickets under earlier keys stay valid until they expire.
    """

    TYPE = 37
    epoch: U64
    key_id: U32
    age_ms: U64
    secret: CountedU8s


@message
class RevokeCredentials(Message):
    """Master to node: these credentials of `tenant`, by their numbers in tickets, are revoked. `epoch` is the master's.

    The node ends the sessions that such a ticket opened, and those opened with a former master's tickets for the
    tenant. Answer: Count of ended sessions.
    """

    TYPE = 38
    epoch: U64
    tenant: Text
    credentials: CountedU64s


@message
class Heartbeat(Message):
    """Node to master: heartbeat.

    `request` is a serialized HeartbeatRequest of control.proto. Answer: HeartbeatResponse.
    """

    TYPE = 26
    request: CountedU8s


@message
class HeartbeatResponse(Message):
    """Answer to Heartbeat. `reply` is a serialized HeartbeatReply of control.proto."""

    TYPE = 27
    reply: CountedU8s


@message
class PrefetchBlocks(Message):
    """Master of partition 0 to node: prefetch these blocks of `tenant` for an engine of this node's host. Answer: Ok, at
    once. `epoch` is the master's.

    From node `source`: the node sends RequestCopy to the masters of the blocks' partitions. A `source` of 0: the node
    copies its own blocks into DRAM, those that are below it.
    """

    TYPE = 28
    epoch: U64
    tenant: Text
    source: U32
    keys: Keys


@message
class RequestCopy(Message):
    """Node to master: request copies of these blocks of `tenant` from node `source`; 0: from any node that holds the
    block. `epoch` is the registration's.

    Answer: Flags, at once. 1: the master has sent a CopyBlocks with the block to this node, now or before, and awaits its
    result. 0: the node holds the block, no other readable node does, or too many copies are under way.
    """

    TYPE = 29
    epoch: U64
    tenant: Text
    source: U32
    keys: Keys


@message
class QueryVictims(Message):
    """Node to master: next eviction victims of its lowest tier, blocks of `tenant`. `epoch` is the registration's.

    Answer: Flags. 1: enough other nodes hold and keep the block to meet its replica target, so it may be evicted first.
    0: it may be the last replica.
    """

    TYPE = 39
    epoch: U64
    tenant: Text
    keys: Keys


@message
class MarkSecondary(Message):
    """Master to node: these blocks of `tenant` have a copy at their home node; the copies here are secondary, and are
    to be evicted first. With `is_over` 1 the copy at the home is gone: those here are evicted by their own value again.
    Answer: Ok, at once. `epoch` is the master's.
    """

    TYPE = 24
    WIRE = ("epoch", "is_over", "tenant", "keys")
    epoch: U64
    tenant: Text
    keys: Keys
    is_over: U8 = 0
