"""What nodes and masters tell each other, so that the catalog has what the nodes hold. Either side may ask."""

from kvstore.protocol.message import Ints, Message, message

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


@message
class Digests(Message):
    """Node to master, after SYNC_BEGIN: the digests of runs of blocks that it holds (digests.py), by ascending generation, in one message
    or in several, each of which but the last has `more`. Answer, once all of them are compared: Flags, one a run. 1: the master knows the
    same blocks, and takes them as named; 0: the node names what it has of the run before SYNC_END.

    `epoch` is the registration's. Columns by run: the generation of its first block, how many blocks, their sum under `seed`, tier mask.
    """

    TYPE = 25
    FORM = (
        ("epoch", "u64"),
        ("seed", "u64"),
        ("more", "u8"),
        ("firsts", "count"),
        ("firsts", "u64s"),
        ("counts", "u8s"),
        ("sums", "u64s"),
        ("tiers", "u8s"),
    )
    epoch: int
    seed: int
    more: int
    firsts: Ints
    counts: bytes
    sums: Ints
    tiers: bytes


@message
class Drop(Message):
    """Master to node: delete these blocks of `tenant`. Answer: Flags (1: it is not there, 0: it stays, for it is in use).

    A block whose generation is above the one named is newer than the command and stays. `epoch` is the master's.
    """

    TYPE = 31
    FORM = (("epoch", "u64"), ("tenant", "text"), ("force", "u8"), ("keys", "keys"), ("generations", "u64s"))
    epoch: int
    tenant: str
    keys: list[bytes]
    generations: Ints
    force: int = 0


@message
class Hold(Message):
    """Master to node: pin (1) or unpin (0) these blocks of `tenant`. Answer: Flags (1: it is there)."""

    TYPE = 32
    FORM = (("epoch", "u64"), ("tenant", "text"), ("pinned", "u8"), ("keys", "keys"))
    epoch: int
    tenant: str
    keys: list[bytes]
    pinned: int = 1


@message
class Claim(Message):
    """Node to master: these values of `tenant` are in its DRAM, unreserved: may all see them? Reserve and Publish in one.

    `epoch` is the registration's. Answer: Grants, once the catalog has those that are GRANTED: they are visible at the master from then
    on, under the generation named; the node forgets the others. With `held` 1 the blocks can be read at the node already, and what is
    PRESENT with the same size and checksum has a generation, too: the node is one more holder of that version from then on. It asks again
    for what is BUSY, and forgets what is PRESENT without a generation: the cluster has another version.
    """

    TYPE = 33
    FORM = (
        ("epoch", "u64"),
        ("held", "u8"),
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
    held: int = 0


@message
class Copy(Message):
    """Master to node: fetch these blocks of `tenant` from another node, which holds them, and then ask with Copied.

    The source is node `source`, at the socket `unix` where that is the file that `host_id` tells of, else at `tcp`; `transfer` is how
    its transfer engine is reached, if it has one. `shown` is the pass to show it (security/tickets/form.py), b"" where none is needed.
    `epoch` is the master's. Answer, at once: Flags (1: it will be tried, once the master has decided about a block of that key here;
    0: it is here, or being written, or too much is waiting already). With `guests` 1 the blocks are spilled by their source: nothing of the
    receiver's own is to leave for them, and it spills them to nobody else.
    """

    TYPE = 34
    FORM = (
        ("epoch", "u64"),
        ("tenant", "text"),
        ("namespace", "text"),
        ("source", "u32"),
        ("host_id", "text"),
        ("unix", "text"),
        ("tcp", "text"),
        ("keys", "keys"),
        ("sizes", "u64s"),
        ("checksums", "u64s"),
        ("generations", "u64s"),
        ("parents", "parents"),
        ("transfer", "count"),
        ("transfer", "blobs"),
        ("shown", "count"),
        ("shown", "u8s"),
        ("guests", "u8"),
    )
    epoch: int
    tenant: str
    namespace: str
    source: int
    host_id: str
    unix: str
    tcp: str
    keys: list[bytes]
    sizes: Ints
    checksums: Ints
    generations: Ints
    parents: list[bytes]
    transfer: list[bytes]
    shown: bytes = b""
    guests: int = 0


@message
class Copied(Message):
    """Node to master: what became of blocks that a Copy ordered. Those that arrived are in its DRAM, not visible: may they become so?

    `epoch` is the registration's. Answer: Flags. 1: the master names this node as a holder from now on. 0: the order is over (the block
    was removed or replaced since, its last holder gave it up, or it did not arrive); the node forgets what it has of it.
    """

    TYPE = 35
    FORM = (("epoch", "u64"), ("tenant", "text"), ("keys", "keys"), ("generations", "u64s"), ("arrived", "u8s"))
    epoch: int
    tenant: str
    keys: list[bytes]
    generations: Ints
    arrived: bytes


@message
class Drain(Message):
    """Master to node: it is to be stopped, or (`mode` DRAIN_NOT) it is not any more. It takes no new blocks of clients; with DRAIN_SAVE it
    copies to its NVMe what it has nowhere else, too. Answer: Ok, before that is done. `epoch` is the master's."""

    TYPE = 36
    FORM = (("epoch", "u64"), ("mode", "u8"))
    epoch: int
    mode: int


@message
class TicketKey(Message):
    """Master to node: this key, made `age_ms` ago, is one that tickets for this node are issued under from now on; those of the keys before
    are good until they end. Answer: Ok. `epoch` is the master's."""

    TYPE = 37
    FORM = (("epoch", "u64"), ("key_id", "u32"), ("age_ms", "u64"), ("secret", "count"), ("secret", "u8s"))
    epoch: int
    key_id: int
    age_ms: int
    secret: bytes


@message
class Revoke(Message):
    """Master to node: these credentials of `tenant`, as tickets number them, are good no more, nor is any ticket of his that a master
    before this one issued: sessions that showed one end. Answer: Count, of those. `epoch` is the master's."""

    TYPE = 38
    FORM = (("epoch", "u64"), ("tenant", "text"), ("credentials", "count"), ("credentials", "u64s"))
    epoch: int
    tenant: str
    credentials: Ints


@message
class Heartbeat(Message):
    """Node to master: it lives. `said` is a HeartbeatRequest of control.proto. Answer: Heard."""

    TYPE = 26
    FORM = (("said", "count"), ("said", "u8s"))
    said: bytes


@message
class Heard(Message):
    """Answer to Heartbeat: a HeartbeatReply of control.proto."""

    TYPE = 27
    FORM = (("said", "count"), ("said", "u8s"))
    said: bytes


@message
class Seek(Message):
    """Master of partition 0 to node: an engine of this node's host is about to need these blocks of `tenant`, which node `source` has. The
    node asks the masters of their partitions with Want. Answer: Ok, at once. `epoch` is the master's."""

    TYPE = 28
    FORM = (("epoch", "u64"), ("tenant", "text"), ("source", "u32"), ("keys", "keys"))
    epoch: int
    tenant: str
    source: int
    keys: list[bytes]


@message
class Want(Message):
    """Node to master: it has been told to have copies of these blocks of `tenant`, which node `source` has. Answer: Ok, at once; the master
    orders (Copy) those that the node lacks. `epoch` is the registration's."""

    TYPE = 29
    FORM = (("epoch", "u64"), ("tenant", "text"), ("source", "u32"), ("keys", "keys"))
    epoch: int
    tenant: str
    source: int
    keys: list[bytes]


@message
class Coldest(Message):
    """Node to master: these blocks of `tenant` are among the coldest of its lowest tier, and leave it next. `epoch` is the registration's.

    Answer: Flags. 1: other nodes hold the block and keep it, as many as its replica target wants: it may leave first. 0: it may be the last
    copy that leaves. Of those answered with 0 the master may have copies made where there is room for them, where `spill` is 1; it has a
    flag a key, or none where nothing is to be spilled.
    """

    TYPE = 39
    FORM = (("epoch", "u64"), ("tenant", "text"), ("keys", "keys"), ("spill", "count"), ("spill", "u8s"))
    epoch: int
    tenant: str
    keys: list[bytes]
    spill: bytes = b""
