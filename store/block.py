"""A block as a node knows it: its identity, where its copies are, and who is using it. And the tag that a durable tier keeps of it."""

from dataclasses import dataclass, field
from typing import Final

from kvstore.protocol.errors import ProtocolError
from kvstore.protocol.message import TIER_BITS
from kvstore.protocol.wire import Reader, Writer
from kvstore.tiers.tier import Recovered, Slot

TIERS: Final = ("hbm", "dram", "nvme")
"""Tier indexes from the fastest down; a block's `slots` and the table's tiers are in this order."""
HBM, DRAM, NVME = range(3)
TAG_VERSION: Final = 1


@dataclass(slots=True, eq=False)
class Block:
    """One value under one key of one tenant. Owned by the BlockTable; compared and hashed by identity.

    `slots[tier]` is its complete copy there, or None. `readers` counts leases and copies in flight: while it is above zero no slot
    of the block is reused. `moving` is set while a copy to another tier is being made, `leaving` then is the tier that the copy is to
    make room in, if that is its purpose. `event_seq` is the newest event about it.
    """

    tenant: str
    key: bytes
    size_bytes: int
    generation: int
    namespace: str = ""
    parent: bytes = b""
    checksum: int = 0
    slots: list[Slot | None] = field(default_factory=lambda: [None, None, None])
    readers: int = 0
    pinned: bool = False
    moving: bool = False
    leaving: int | None = None
    is_gone: bool = False
    hits: int = 0
    last_access: int = 0
    event_seq: int = 0

    def tier_mask(self) -> int:
        """Bits of TIER_BITS for the tiers that hold a copy; none for a block that is gone, whose slots may still wait for readers."""
        if self.is_gone:
            return 0
        return sum(TIER_BITS[name] for name, slot in zip(TIERS, self.slots, strict=True) if slot is not None)

    def fastest(self) -> int | None:
        """Index of the fastest tier for a reader on a CPU: DRAM can be mapped, HBM has to be copied out, NVMe read."""
        if self.slots[DRAM] is not None:
            return DRAM
        if self.slots[HBM] is not None:
            return HBM
        return NVME if self.slots[NVME] is not None else None

    def tag(self) -> bytes:
        """What a durable tier remembers of the block; `from_recovered` reads it back. At most 1,100 bytes."""
        writer = Writer().u8(TAG_VERSION).u64(self.generation).text(self.tenant)
        return writer.blob(self.key).text(self.namespace).blob(self.parent).done()


def from_recovered(found: Recovered) -> Block:
    """The block of a value that outlived the process. Raises ProtocolError if its tag is not one of ours."""
    reader = Reader(found.tag)
    if (version := reader.u8()) != TAG_VERSION:
        raise ProtocolError(f"a stored block has a tag of version {version}, this release reads {TAG_VERSION}")
    block = Block(
        generation=reader.u64(),
        tenant=reader.text(),
        key=reader.blob(),
        namespace=reader.text(),
        parent=reader.blob(),
        size_bytes=found.slot.size_bytes,
        checksum=found.checksum,
    )
    reader.end()
    block.slots[NVME] = found.slot
    return block
