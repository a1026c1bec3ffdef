"""What nodes and masters tell each other, so that the catalog has what the nodes hold. Either side may ask."""

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
    Text,
    Texts,
    U8s,
    U32s,
    U64s,
    message,
)

EVENT_COMMIT, EVENT_GONE, EVENT_MOVED = 1, 2, 3
PHASE_STREAM, PHASE_SYNC_BEGIN, PHASE_SYNC, PHASE_SYNC_END = 0, 1, 2, 3
DRAIN_NOT, DRAIN_CLOSED, DRAIN_SAVE = 0, 1, 2


@message
class Publish(Message):
    """A node tells the master what happened to its blocks, in order. Answer: Ok, once the catalog has it.

    `epoch` is the registration's; `phase` marks a full inventory (SYNC_BEGIN, SYNC ..., SYNC_END: what was not named is gone).
    Columns by event: kind, key, index into `tenants` and `namespaces`, size, checksum, generation, tier mask, parent ("" none).
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


@message
class Digests(Message):
    """Node to master, after SYNC_BEGIN: the digests of runs of blocks that it holds (digests.py), by ascending generation, in one message
    or in several, each of which but the last has `more`. Answer, once all of them are compared: Flags, one a run. 1: the master knows the
    same blocks, and takes them as named; 0: the node names what it has of the run before SYNC_END.

    `epoch` is the registration's. Columns by run: the generation of its first block, how many blocks, their sum under `seed`, tier mask.
    """

    TYPE = 25
    epoch: U64
    seed: U64
    more: U8
    firsts: CountedU64s
    counts: U8s
    sums: U64s
    tiers: U8s


@message
class DeleteBlocks(Message):
    """Master to node: delete these blocks of `tenant`. Answer: Flags (1: it is not there, 0: it stays, for it is in use).

    A block whose generation is above the one named is newer than the command and stays. `epoch` is the master's.
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
    """Master to node: pin (1) or unpin (0) these blocks of `tenant`. Answer: Flags (1: it is there)."""

    TYPE = 32
    WIRE = ("epoch", "tenant", "pinned", "keys")
    epoch: U64
    tenant: Text
    keys: Keys
    pinned: U8 = 1


@message
class CommitBlocks(Message):
    """Node to master: these values of `tenant` are in its DRAM, unreserved: may all see them? Reserve and Publish in one.

    `epoch` is the registration's. Answer: Grants, once the catalog has those that are GRANTED: they are visible at the master from then
    on, under the generation named; the node forgets the others. With `held` 1 the blocks can be read at the node already, and what is
    PRESENT with the same size and checksum has a generation, too: the node is one more holder of that version from then on. It asks again
    for what is BUSY, and forgets what is PRESENT without a generation: the cluster has another version.
    """

    TYPE = 33
    WIRE = ("epoch", "held", "tenant", "namespace", "keys", "sizes", "checksums", "parents")
    epoch: U64
    tenant: Text
    namespace: Text
    keys: Keys
    sizes: U64s
    checksums: U64s
    parents: Parents
    held: U8 = 0


@message
class CopyBlocks(Message):
    """Master to node: fetch these blocks of `tenant` from another node, which holds them, and then ask with Copied.

    The source is node `source`, at the socket `unix` where that is the file that `host_id` tells of, else at `tcp`; `transfer` is how
    its transfer engine is reached, if it has one. `shown` is the pass to show it (security/tickets/ticket.py), b"" where none is needed.
    `epoch` is the master's. Answer, at once: Flags (1: it will be tried, once the master has decided about a block of that key here;
    0: it is here, or being written, or too much is waiting already). With `guests` 1 the blocks are spilled by their source: nothing of the
    receiver's own is to leave for them, and it spills them to nobody else.
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
    shown: CountedU8s = b""
    guests: U8 = 0


@message
class CopyResult(Message):
    """Node to master: what became of blocks that a Copy ordered. Those that arrived are in its DRAM, not visible: may they become so?

    `epoch` is the registration's. Answer: Flags. 1: the master names this node as a holder from now on. 0: the order is over (the block
    was removed or replaced since, its last holder gave it up, or it did not arrive); the node forgets what it has of it.
    """

    TYPE = 35
    epoch: U64
    tenant: Text
    keys: Keys
    generations: U64s
    arrived: U8s


@message
class SetDraining(Message):
    """Master to node: it is to be stopped, or (`mode` DRAIN_NOT) it is not any more. It takes no new blocks of clients; with DRAIN_SAVE it
    copies to its NVMe what it has nowhere else, too. Answer: Ok, before that is done. `epoch` is the master's."""

    TYPE = 36
    epoch: U64
    mode: U8


@message
class TicketKey(Message):
    """Master to node: this key, made `age_ms` ago, is one that tickets for this node are issued under from now on; those of the keys before
    are good until they end. Answer: Ok. `epoch` is the master's."""

    TYPE = 37
    epoch: U64
    key_id: U32
    age_ms: U64
    secret: CountedU8s


@message
class RevokeCredentials(Message):
    """Master to node: these credentials of `tenant`, as tickets number them, are good no more, nor is any ticket of his that a master
    before this one issued: sessions that showed one end. Answer: Count, of those. `epoch` is the master's."""

    TYPE = 38
    epoch: U64
    tenant: Text
    credentials: CountedU64s


@message
class Heartbeat(Message):
    """Node to master: it lives. `said` is a HeartbeatRequest of control.proto. Answer: Heard."""

    TYPE = 26
    said: CountedU8s


@message
class HeartbeatResponse(Message):
    """Answer to Heartbeat: a HeartbeatReply of control.proto."""

    TYPE = 27
    said: CountedU8s


@message
class PrefetchBlocks(Message):
    """Master of partition 0 to node: an engine of this node's host is about to need these blocks of `tenant`, which node `source` has. The
    node asks the masters of their partitions with Want. Answer: Ok, at once. `epoch` is the master's."""

    TYPE = 28
    epoch: U64
    tenant: Text
    source: U32
    keys: Keys


@message
class RequestCopy(Message):
    """Node to master: it has been told to have copies of these blocks of `tenant`, which node `source` has. Answer: Ok, at once; the master
    orders (Copy) those that the node lacks. `epoch` is the registration's."""

    TYPE = 29
    epoch: U64
    tenant: Text
    source: U32
    keys: Keys


@message
class QueryVictims(Message):
    """Node to master: these blocks of `tenant` are among the coldest of its lowest tier, and leave it next. `epoch` is the registration's.

    Answer: Flags. 1: other nodes hold the block and keep it, as many as its replica target wants: it may leave first. 0: it may be the last
    copy that leaves. Of those answered with 0 the master may have copies made where there is room for them, where `spill` is 1; it has a
    flag a key, or none where nothing is to be spilled.
    """

    TYPE = 39
    epoch: U64
    tenant: Text
    keys: Keys
    spill: CountedU8s = b""
