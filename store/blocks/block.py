"""A block as a node knows it: its identity, where its copies are, and who is using it. And the tag that a durable tier keeps of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, cast

from kvstore.protocol.errors import ProtocolError
from kvstore.protocol.message import TIER_BITS
from kvstore.protocol.wire import Reader, Writer
from kvstore.tiers.tier import Recovered, Slot
from kvstore.tiers.value_codec import Encoding

TIERS: Final = ("hbm", "dram", "nvme")
"""Tier indexes from the fastest down; a block's `slots` and the table's tiers are in this order."""
HBM, DRAM, NVME = range(3)
NOT_SHOWN: Final = -1
TAG_VERSION: Final = 1
LOSSY_TAG_VERSION: Final = 2
"""Of copies that are not what was put. All others are tagged as ever, so that releases before this version find them."""


class Loss(NamedTuple):
    """Why a copy does not give the bytes that were put: it is encoded (`encoding`), or was made from a copy that is or was (None).

    `checksum` is the xxh3_64 of what its readers get.
    """

    checksum: int
    encoding: Encoding | None = None


@dataclass(slots=True, eq=False)
class Block:
    """One value under one key of one tenant. Owned by the BlockTable; compared and hashed by identity.

    `hbm`, `dram` and `nvme`, by index `slots[tier]`, are its complete copies, or None; a list of them would take 80 bytes. `readers` counts
    leases and copies in flight: while it is above zero no slot of the block is reused. `moving` is set while a copy to another tier is
    being made, `leaving` then is the tier that the copy is to make room in, if that is its purpose. `event_seq` is the newest event about
    it.

    `size_bytes` and `checksum` are those of the value as it was put: they are the block's identity at the master, whatever its copies
    have become. `lossy` is empty, or by tier what is known of copies that give other bytes, all of them the same ones: else nobody could
    read the block twice. `shown` is its entry in the index that clients of this host read (store/shown/). `stays_raw` is set once the
    codec has refused it. `is_guest`: another node has spilled it here, and it is not spilled again.
    """

    tenant: str
    key: bytes
    size_bytes: int
    generation: int
    namespace: str = ""
    parent: bytes = b""
    checksum: int = 0
    hbm: Slot | None = None
    dram: Slot | None = None
    nvme: Slot | None = None
    readers: int = 0
    pinned: bool = False
    moving: bool = False
    leaving: int | None = None
    is_gone: bool = False
    hits: int = 0
    last_access: int = 0
    event_seq: int = 0
    lossy: tuple[Loss | None, ...] = ()
    stays_raw: bool = False
    is_guest: bool = False
    shown: int = NOT_SHOWN

    @property
    def slots(self) -> tuple[Slot | None, Slot | None, Slot | None]:
        return self.hbm, self.dram, self.nvme

    def set_slot(self, tier: int, slot: Slot | None) -> None:
        """Its copy in that tier is there from now on; None: it has none."""
        if tier == DRAM:
            self.dram = slot
        elif tier == NVME:
            self.nvme = slot
        else:
            self.hbm = slot

    def loss_in(self, tier: int) -> Loss | None:
        return self.lossy[tier] if self.lossy else None

    def checksum_in(self, tier: int) -> int:
        """xxh3_64 of what a reader of that tier's copy gets."""
        loss = self.lossy[tier] if self.lossy else None
        return self.checksum if loss is None else loss.checksum

    def loss_of_copy(self, source: int) -> Loss | None:
        """That of what readers of tier `source` get, once it is copied byte by byte."""
        loss = self.lossy[source] if self.lossy else None
        return None if loss is None else Loss(loss.checksum)

    def lossy_checksum(self) -> int | None:
        """xxh3_64 of what the lossy copies give; None where there are none."""
        return next((loss.checksum for loss in self.lossy if loss is not None), None) if self.lossy else None

    def set_loss(self, tier: int, loss: Loss | None) -> None:
        """Say what that tier's copy gives its readers; None: what was put, or there is none."""
        known = [loss if other == tier else self.loss_in(other) for other in range(len(TIERS))]
        self.lossy = tuple(known) if any(known) else ()

    def tier_mask(self) -> int:
        """Bits of TIER_BITS for the tiers that hold a copy; none for a block that is gone, whose slots may still wait for readers."""
        if self.is_gone:
            return 0
        return sum(TIER_BITS[name] for name, slot in zip(TIERS, self.slots, strict=True) if slot is not None)

    def fastest(self) -> int | None:
        """Index of the fastest tier for a reader on a CPU: DRAM can be mapped, HBM has to be copied out, NVMe read."""
        if self.dram is not None:
            return DRAM
        if self.hbm is not None:
            return HBM
        return NVME if self.nvme is not None else None

    def is_also_outside(self, tier: int) -> bool:
        """Whether there is a copy in another tier."""
        slots = self.slots
        return len(slots) - slots.count(None) > (slots[tier] is not None)

    def check_integrity(self) -> None:
        """Assert what holds of every visible block. For tests."""
        assert not self.is_gone
        assert self.fastest() is not None
        assert self.leaving is None or self.moving
        assert all(slot is not None or self.loss_in(tier) is None for tier, slot in enumerate(self.slots))
        assert {loss.checksum for loss in self.lossy if loss is not None} <= {self.lossy_checksum()}
        assert any(self.lossy) == bool(self.lossy)

    def tag(self, loss: Loss | None = None) -> bytes:
        """What a durable tier remembers of the block and of its copy there; `from_recovered` reads it back. At most 1,150 bytes."""
        writer = Writer().u8(TAG_VERSION if loss is None else LOSSY_TAG_VERSION).u64(self.generation).text(self.tenant)
        writer.blob(self.key).text(self.namespace).blob(self.parent)
        if loss is not None:
            payload_bytes, elements = loss.encoding[1:] if loss.encoding is not None else (0, 0)
            writer.u64(self.size_bytes).u64(self.checksum).u64(loss.checksum).u64(payload_bytes).u64(elements)
        return writer.done()


def slots_of(blocks: Sequence[Block]) -> list[Slot]:
    """Those in DRAM, of blocks that have one there."""
    found = [block.dram for block in blocks]
    assert None not in found
    return cast(list[Slot], found)


def from_recovered(found: Recovered) -> Block:
    """The block of a value that outlived the process. Raises ProtocolError if its tag is not one of ours."""
    reader = Reader(found.tag)
    if (version := reader.u8()) not in (TAG_VERSION, LOSSY_TAG_VERSION):
        raise ProtocolError(f"a stored block has a tag of version {version}, this release reads {TAG_VERSION} and {LOSSY_TAG_VERSION}")
    block = Block(
        generation=reader.u64(),
        tenant=reader.text(),
        key=reader.blob(),
        namespace=reader.text(),
        parent=reader.blob(),
        size_bytes=found.slot.size_bytes,
        checksum=found.checksum,
    )
    if version == LOSSY_TAG_VERSION:
        _read_loss(reader, block, found.slot)
    reader.end()
    block.nvme = found.slot
    return block


def _read_loss(reader: Reader, block: Block, slot: Slot) -> None:
    """The end of a tag of a lossy copy. Raises ProtocolError where it does not fit the slot."""
    block.size_bytes, block.checksum, checksum = reader.u64(), reader.u64(), reader.u64()
    payload_bytes, elements = reader.u64(), reader.u64()
    if (slot.size_bytes < block.size_bytes) != (elements > 0) or slot.size_bytes > block.size_bytes:
        raise ProtocolError(f"a stored block of {block.size_bytes} bytes has {slot.size_bytes} bytes and {elements} encoded elements")
    block.set_loss(NVME, Loss(checksum, Encoding(slot.size_bytes, payload_bytes, elements) if elements else None))
