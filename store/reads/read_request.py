"""One Read while it is being answered: the columns of its Blocks message, and what is held for it until the answer is sent.

A cold block without a place of its own in DRAM is read there all the same, for one reader: its bytes cross no socket. Its slot is in
quarantine: it belongs to no visible block, evicts nothing that is not on a lower tier too, and is free once the lease is over. No slot is
pointed at before the disk has filled it.
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
from kvstore.store.wait_queue import begin_part
from kvstore.tiers.dram import DramTier
from kvstore.tiers.tier import Slot


class Staged(NamedTuple):
    """`copy` is acquired; releasing it frees the slot. `memory` is the slot's, writable; `place` its slab and offset."""

    copy: Block
    memory: memoryview
    place: tuple[int, int]


def stage(table: BlockTable, dram: DramTier, block: Block) -> Staged | None:
    """A slot to read the block into. None: the table gives none now."""
    slot = table.staging_slot(block)
    if slot is None:
        return None
    memory, place = dram.view(slot), dram.locate(slot)
    copy = table.rows.make(block.tenant, block.key, block.size_bytes, block.generation, block.namespace)
    table.copies.stage(copy, slot)
    return Staged(copy, memory, place)


class SlowEntry(NamedTuple):
    """A block to be fetched for the answer's entry `position`: into DRAM's `slot` if it is to stay there, into the `staged` copy for this
    reader alone, or into memory that goes along with the answer."""

    position: int
    read: SlowRead
    slot: Slot | None
    staged: Staged | None


class ReadRequest:
    """Filled key by key. Blocks in `mapped`, `sent` and `slow` have been acquired for it, `charge` has been taken of the turns."""

    __slots__ = (
        "caller", "charge", "checksums", "fetching", "header", "is_cut", "is_reachable", "mapped", "message", "offsets", "payload", "sent",
        "sent_bytes", "session", "sizes", "slabs", "slow", "statuses", "tiers",
    )  # fmt: skip

    def __init__(self, session: Session, header: FrameHeader, caller: Caller, message: ReadBlocks, *, is_reachable: bool) -> None:
        """`is_reachable`: this reader reaches the node's DRAM itself, over its mapping or with the transfer engine."""
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
        """The time that slower tiers take, where the request is traced."""
        self.is_cut = False
        """A value that would have to be sent did not fit: no later one is tried, for the order is the reader's."""

    def cut(self, index: int) -> None:
        """The value of this entry is to be asked for again."""
        self.is_cut = True
        self.statuses[index] = DEFERRED

    def is_pointed_at(self, block: Block) -> bool:
        """Whether the reader gets the value itself once it is in DRAM."""
        return self.is_reachable and block.size_bytes > self.message.inline_bytes

    @property
    def gives_nothing(self) -> bool:
        """There are values for it, and none of them fits now."""
        return self.is_cut and not (self.mapped or self.sent or self.slow)

    def point_at(self, index: int, block: Block, place: tuple[int, int], *, held: Block | None = None) -> None:
        """The reader gets the value at that slab and offset itself. Its lease is on `held`, the staged copy, instead of the block."""
        self._fill(index, MAPPED, block, DRAM)
        self.slabs[index], self.offsets[index] = place
        if self.caller.blocks is not None:
            self.caller.pointed_at.add(place[0])
        self.mapped.append(block if held is None else held)

    def send(self, index: int, block: Block, tier: int, value: memoryview) -> None:
        """The value goes along with the answer."""
        self._fill(index, INLINE, block, tier)
        self.payload[index] = value
        self.sent.append(block)
        self.sent_bytes += block.size_bytes

    def fetch(self, index: int, read: SlowRead, slot: Slot | None, staged: Staged | None) -> None:
        """The value is to be fetched before it is pointed at or sent."""
        self.slow.append(SlowEntry(index, read, slot, staged))
        if staged is None:
            self.sent_bytes += read.block.size_bytes

    def begin_fetching(self) -> None:
        """The values of `slow` are about to be fetched."""
        self.fetching = begin_part(self.session, self.header, "fetch")
        if self.fetching is not None:
            self.fetching.set("kvstore.tier", ",".join(sorted({TIERS[entry.read.tier] for entry in self.slow})))
            self.fetching.set("kvstore.blocks", len(self.slow))

    def _fill(self, index: int, status: int, block: Block, tier: int) -> None:
        self.statuses[index] = status
        self.tiers[index] = TIER_BITS[TIERS[tier]]
        self.sizes[index] = block.size_bytes
        self.checksums[index] = block.checksum_in(tier) if block.lossy else block.checksum

    def answer(self, *, lease: int = 0, until_ns: int = 0, lease_ms: int = 0) -> tuple[ReadBlocksReply, Sequence[memoryview]]:
        """The message, and the values that go with it."""
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
