"""One ReadBlocks request: columns of its reply, and the blocks held until the reply is sent.

A cold block that is not promoted can be staged in a DRAM slot for one reader, so that its bytes cross no socket. The
slot is quarantined and belongs to no visible block. Staging evicts nothing that has no copy in a lower tier. The slot
is freed with the lease. No slot is reported before it is filled.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.protocol.frames import FrameHeader
from kvstore.protocol.message import TIER_BITS
from kvstore.protocol.node_messages import DEFERRED, INLINE, MAPPED, ReadBlocks, ReadBlocksReply
from kvstore.rpc.server.session import Session
from kvstore.rpc.tracing import TraceSpan
from kvstore.store.block_table.block import DRAM, TIERS, Block
from kvstore.store.block_table.table import BlockTable
from kvstore.store.session_authenticator import Caller
from kvstore.store.tiering.mover import SlowRead
from kvstore.store.wait_queue import begin_child_span
from kvstore.tiers.dram import DramTier
from kvstore.tiers.tier import Slot


class Staged(NamedTuple):
    """Staged copy of a block. `copy` is acquired; its release frees the slot. `memory` is the slot's, writable;
    `location` is its slab and offset."""

    copy: Block
    memory: memoryview
    location: tuple[int, int]


def stage(table: BlockTable, dram: DramTier, block: Block) -> Staged | None:
    """Return a DRAM slot to read the block into for one reader, or None if none is available."""
    slot = table.staging_slot(block)
    if slot is None:
        return None
    memory, location = dram.view(slot), dram.locate(slot)
    copy = table.rows.make(block.tenant, block.key, block.size_bytes, block.generation, block.namespace)
    table.copies.stage(copy, slot)
    return Staged(copy, memory, location)


class SlowEntry(NamedTuple):
    """Block to fetch for entry `position` of the reply: into `slot` if it is promoted, into `staged` for this reader
    alone, or else into memory sent with the reply."""

    position: int
    read: SlowRead
    slot: Slot | None
    staged: Staged | None


class ReadRequest:
    """State of a read, filled key by key. It has acquired the blocks in `mapped`, `sent` and `slow`; `charge` is taken
    from the read limiter."""

    __slots__ = (
        "caller", "charge", "checksums", "fetching", "header", "is_cut", "is_reachable", "mapped", "message", "offsets", "payload", "sent",
        "sent_bytes", "session", "sizes", "slabs", "slow", "statuses", "tiers",
    )  # fmt: skip

    def __init__(self, session: Session, header: FrameHeader, caller: Caller, message: ReadBlocks, *, is_reachable: bool) -> None:
        """`is_reachable`: the reader can access the node's DRAM, by mapping or with the transfer engine."""
        count = len(message.keys)
        self.session = session
        self.header = header
        self.caller = caller
        self.message = message
        self.is_reachable = is_reachable
        self.statuses = bytearray(count)  # MISS
        self.tiers = bytearray(count)
        self.sizes = [0] * count
        self.checksums = [0] * count
        self.slabs = [0] * count
        self.offsets = [0] * count
        self.payload: list[memoryview | None] = [None] * count
        self.mapped: list[Block] = []
        self.sent: list[Block] = []
        self.slow: deque[SlowEntry] = deque()
        self.sent_bytes = 0
        self.charge = 0
        self.fetching: TraceSpan | None = None
        """Span of the fetch from slower tiers, if the request is traced."""
        self.is_cut = False
        """A value to be sent did not fit. No later one is tried: the order is the reader's."""

    def cut(self, index: int) -> None:
        """Answer this entry LATER."""
        self.is_cut = True
        self.statuses[index] = DEFERRED

    def is_pointed_at(self, block: Block) -> bool:
        """Return True if the reader copies the value from DRAM itself."""
        return self.is_reachable and block.size_bytes > self.message.inline_bytes

    @property
    def gives_nothing(self) -> bool:
        """True if no value fits now."""
        return self.is_cut and not (self.mapped or self.sent or self.slow)

    def point_at(self, index: int, block: Block, location: tuple[int, int], *, held: Block | None = None) -> None:
        """Report the value's slab and offset. The lease is on `held`, a staged copy, if given."""
        self._fill(index, MAPPED, block, DRAM)
        self.slabs[index], self.offsets[index] = location
        if self.caller.blocks is not None:
            self.caller.pointed_at.add(location[0])
        self.mapped.append(block if held is None else held)

    def send(self, index: int, block: Block, tier: int, value: memoryview) -> None:
        """Send the value with the reply."""
        self._fill(index, INLINE, block, tier)
        self.payload[index] = value
        self.sent.append(block)
        self.sent_bytes += block.size_bytes

    def fetch(self, index: int, read: SlowRead, slot: Slot | None, staged: Staged | None) -> None:
        """Add a value to fetch before it is reported or sent."""
        self.slow.append(SlowEntry(index, read, slot, staged))
        if staged is None:
            self.sent_bytes += read.block.size_bytes

    def begin_fetching(self) -> None:
        """Begin the fetch span."""
        self.fetching = begin_child_span(self.session, self.header, "fetch")
        if self.fetching is not None:
            self.fetching.set("kvstore.tier", ",".join(sorted({TIERS[entry.read.tier] for entry in self.slow})))
            self.fetching.set("kvstore.blocks", len(self.slow))

    def _fill(self, index: int, status: int, block: Block, tier: int) -> None:
        self.statuses[index] = status
        self.tiers[index] = TIER_BITS[TIERS[tier]]
        self.sizes[index] = block.size_bytes
        self.checksums[index] = block.checksum_in(tier) if block.lossy else block.checksum

    def answer(self, *, lease: int = 0, until_ns: int = 0, lease_ms: int = 0) -> tuple[ReadBlocksReply, Sequence[memoryview]]:
        """Return the reply and the values sent with it."""
        blocks = ReadBlocksReply(
            lease,
            until_ns,
            lease_ms,
            bytes(self.statuses),
            self.sizes,
            self.checksums,
            bytes(self.tiers),
            self.slabs,
            self.offsets,
        )
        return blocks, [part for part in self.payload if part is not None]

    def fail(self, error: Exception) -> None:
        self.session.fail(self.header.request_id, error)
