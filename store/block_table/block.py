"""Blocks of a node in columns: identity, locations of the copies, and users. A `Block` is the number of its row.

A row takes 90 bytes plus the key. Objects would take 200 bytes per block, 110 for the DRAM slot, and 140 for unshared
integers. Rare fields are in a dict beside the columns. Batch operations are one numpy assignment per column. rows.py
makes the rows.
"""

from array import array
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple

from kvstore.protocol.message import TIER_BITS
from kvstore.tiers.tier import Slot
from kvstore.tiers.value_codec import Encoding

NOT_INDEXED: Final = -1

DROPPED: Final = 1

PINNED: Final = 2

MOVING: Final = 4

STAYS_RAW: Final = 8

SECONDARY: Final = 16

ON_HOLD: Final = (32, 64, 128)
"""Bits of `BlockColumns.states`. ON_HOLD is by tier: a hold keeps the copy there (holds.py)."""

TIERS: Final = ("hbm", "dram", "nvme")
"""Tier names by index, fastest first; the order of a block's `slots`."""

HBM, DRAM, NVME = range(3)

HELD: Final = (1 << HBM, 1 << DRAM, 1 << NVME)
"""By tier: its bit in `BlockColumns.held`."""

_HBM, _DRAM, _NVME = HELD

IN_USE: Final = tuple(PINNED | MOVING | bit for bit in ON_HOLD)
"""By tier: state bits with which its copy must keep its slot, as while it is read."""

_ANY_HOLD: Final = sum(ON_HOLD)

_MAX_HITS: Final = (1 << 32) - 1
"""Saturation of the counter."""

_ALL_HELD: Final = range(1 << len(TIERS))

TIER_MASKS: Final = [sum(TIER_BITS[name] for name, bit in zip(TIERS, HELD, strict=True) if held & bit) for held in _ALL_HELD]

FASTEST: Final = [DRAM if held & _DRAM else HBM if held & _HBM else NVME if held else None for held in _ALL_HELD]

_HOLDING: Final = [tuple(tier for tier, bit in enumerate(HELD) if held & bit) for held in _ALL_HELD]
"""By `held`: TIER_BITS, the fastest tier, all tiers with a copy."""

_new_slot = partial(tuple.__new__, Slot)
"""As Slot._make, in a third of the time."""


class Loss(NamedTuple):
    """Reason why a copy differs from the value that was put. `encoding`: it is encoded; None: it was made from a lossy
    copy.

    `checksum` is the xxh3_64 of the bytes that its readers get.
    """

    checksum: int
    encoding: Encoding | None = None


@dataclass(slots=True, eq=False)
class RareFields:
    """Fields that few blocks have."""

    hbm: Slot | None = None
    lossy: tuple[Loss | None, ...] = ()
    demoted_from: int | None = None


class BlockColumns:
    """Columns of all blocks, one value per row. `named` returns the same columns bound to a tenant and namespace.

    - `held`: a bit per tier with a copy
    - `slot_indexes`, `slot_generations`, `groups`: the DRAM slot, whose size is the block's
    - `nvme`: the NVMe slot; only as long as needed
    - `policy_states`: state of the tenant's eviction policies (policy_states.py)
    - `retention`: words of the retention hints (retention.py); empty until the node has got one
    - `free`: unused rows
    """

    __slots__ = (
        "checksums",
        "event_seqs",
        "free",
        "generations",
        "groups",
        "held",
        "hits",
        "index_entries",
        "keys",
        "last_accesses",
        "namespace",
        "nvme",
        "others",
        "parents",
        "policy_states",
        "readers",
        "retention",
        "sizes",
        "slot_generations",
        "slot_indexes",
        "states",
        "tenant",
    )

    def __init__(self) -> None:
        self.tenant = self.namespace = ""
        self.sizes, self.generations, self.checksums = array("Q"), array("Q"), array("Q")
        self.last_accesses, self.event_seqs = array("Q"), array("Q")
        self.slot_indexes, self.slot_generations, self.groups = array("Q"), array("Q"), array("I")
        self.index_entries, self.readers, self.hits = array("i"), array("I"), array("I")
        self.retention = array("Q")
        self.held, self.states = bytearray(), bytearray()
        self.keys: list[bytes] = []
        self.parents: list[bytes] = []
        self.policy_states: list[Any] = []
        self.nvme: list[Slot | None] = []
        self.others: dict[int, RareFields] = {}
        self.free: list[int] = []

    def named(self, tenant: str, namespace: str) -> "BlockColumns":
        """Return these columns bound to a tenant and namespace."""
        found = copy(self)
        found.tenant, found.namespace = tenant, namespace
        return found

    def lengthen(self, count: int) -> None:
        """Append `count` rows."""
        for wide in (
            self.sizes,
            self.generations,
            self.checksums,
            self.last_accesses,
            self.event_seqs,
            self.slot_indexes,
            self.slot_generations,
        ):
            wide.frombytes(bytes(8 * count))
        for narrow in (self.groups, self.index_entries, self.readers, self.hits):
            narrow.frombytes(bytes(4 * count))
        for byte in (self.held, self.states):
            byte.extend(bytes(count))
        for objects in (self.keys, self.parents):
            objects.extend([b""] * count)
        self.policy_states.extend([None] * count)
        if self.retention:
            self.keep_retention()

    def keep_retention(self) -> None:
        """Give all rows a word for retention hints: 8 bytes each."""
        self.retention.frombytes(bytes(8 * (len(self) - len(self.retention))))

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.sizes)


_NOTHING: Final = RareFields()


class Block(int):
    """Value under one key of one tenant, as the number of its row: an int of 48 bytes, where an object takes 96.

    Made by BlockRows, owned by the BlockTable. Each tenant and namespace has a subclass (`block_type`) that binds the
    columns. The number is unique among live blocks, is kept as long as the block is referenced, and is never 0.

    - `hbm`, `dram`, `nvme`, or `slots[tier]`: complete copies, or None
    - `readers`: leases and copies in progress; while above zero no slot is reused
    - `moving`: a copy to another tier is in progress; `demoted_from`: the tier that it is to free
    - `event_seq`: newest event about the block
    - `size_bytes`, `checksum`: of the value that was put; the block's identity at the master
    - `lossy`: empty, or by tier the Loss of copies that give other bytes, the same bytes in all
    - `index_entry`: its entry in the shared-memory index
    - `stays_raw`: the codec has refused it
    - `is_secondary`: its home is another node, which has a copy; it is evicted first, and never demoted
    """

    __slots__ = ()

    columns: ClassVar[BlockColumns]
    tenant: ClassVar[str]
    namespace: ClassVar[str]
    key: bytes
    parent: bytes
    size_bytes: int
    generation: int
    checksum: int
    readers: int
    last_access: int
    event_seq: int
    index_entry: int

    def __del__(self) -> None:
        # Any thread: the append that frees a row is atomic, as is the pop.
        columns = self.columns
        columns.keys[self] = columns.parents[self] = b""
        columns.free.append(int(self))

    @property
    def is_secondary(self) -> bool:
        return bool(self.columns.states[self] & SECONDARY)

    @is_secondary.setter
    def is_secondary(self, is_secondary: bool) -> None:
        self._set_state(SECONDARY, is_secondary)

    # --- copies ---

    @property
    def hbm(self) -> Slot | None:
        return self.columns.others[self].hbm if self.columns.held[self] & _HBM else None

    @property
    def dram(self) -> Slot | None:
        columns = self.columns
        if not columns.held[self] & _DRAM:
            return None
        return _new_slot((columns.slot_indexes[self], columns.slot_generations[self], columns.sizes[self], columns.groups[self]))

    @property
    def nvme(self) -> Slot | None:
        return self.columns.nvme[self] if self.columns.held[self] & _NVME else None

    @property
    def slots(self) -> tuple[Slot | None, Slot | None, Slot | None]:
        return self.hbm, self.dram, self.nvme

    def slot_in(self, tier: int) -> Slot | None:
        """Return its slot in that tier."""
        return self.dram if tier == DRAM else self.nvme if tier == NVME else self.hbm

    def set_slot(self, tier: int, slot: Slot | None) -> None:
        """Set or clear its slot in a tier. A DRAM slot has the block's size."""
        columns = self.columns
        if slot is None:
            columns.held[self] &= ~HELD[tier]
            return
        columns.held[self] |= HELD[tier]
        if tier == DRAM:
            columns.slot_indexes[self], columns.slot_generations[self], size_bytes, columns.groups[self] = slot
            assert size_bytes == columns.sizes[self]
        elif tier == NVME:
            if self >= len(columns.nvme):
                columns.nvme.extend([None] * (self + 1 - len(columns.nvme)))
            columns.nvme[self] = slot
        else:
            self._others().hbm = slot

    def group_in(self, tier: int) -> int:
        """Return the group of its slot in a tier that has a copy."""
        if tier == DRAM:
            return self.columns.groups[self]
        slot = self.slot_in(tier)
        assert slot is not None
        return slot.group

    def is_in(self, tier: int) -> bool:
        """Return True if the tier has a copy."""
        return bool(self.columns.held[self] & HELD[tier])

    def is_also_outside(self, tier: int) -> bool:
        """Return True if another tier has a copy."""
        return bool(self.columns.held[self] & ~HELD[tier])

    def tiers(self) -> tuple[int, ...]:
        """Tiers with a copy, fastest first."""
        return _HOLDING[self.columns.held[self]]

    def fastest(self) -> int | None:
        """Index of the fastest tier for a reader on a CPU: DRAM can be mapped, HBM is copied out, NVMe read."""
        return FASTEST[self.columns.held[self]]

    def tier_mask(self) -> int:
        """TIER_BITS of the tiers with a copy; 0 for a dropped block."""
        return 0 if self.is_dropped else TIER_MASKS[self.columns.held[self]]

    # --- users ---

    @property
    def pinned(self) -> bool:
        return bool(self.columns.states[self] & PINNED)

    @pinned.setter
    def pinned(self, pinned: bool) -> None:
        self._set_state(PINNED, pinned)

    @property
    def moving(self) -> bool:
        return bool(self.columns.states[self] & MOVING)

    @moving.setter
    def moving(self, moving: bool) -> None:
        self._set_state(MOVING, moving)

    @property
    def hold_bits(self) -> int:
        """ON_HOLD bits: tiers whose copy a lookup's hold keeps."""
        return self.columns.states[self] & _ANY_HOLD

    @hold_bits.setter
    def hold_bits(self, bits: int) -> None:
        self.columns.states[self] = self.columns.states[self] & ~_ANY_HOLD | bits

    @property
    def demoted_from(self) -> int | None:
        return self._known_others().demoted_from

    @demoted_from.setter
    def demoted_from(self, tier: int | None) -> None:
        self._others().demoted_from = tier

    @property
    def is_dropped(self) -> bool:
        return bool(self.columns.states[self] & DROPPED)

    @is_dropped.setter
    def is_dropped(self, is_dropped: bool) -> None:
        if is_dropped:  # inlined: called per eviction
            self.columns.states[self] |= DROPPED
        else:
            self.columns.states[self] &= ~DROPPED

    @property
    def hits(self) -> int:
        return self.columns.hits[self]

    @hits.setter
    def hits(self, hits: int) -> None:
        self.columns.hits[self] = min(hits, _MAX_HITS)

    def _set_state(self, bit: int, is_set: bool) -> None:
        if is_set:
            self.columns.states[self] |= bit
        else:
            self.columns.states[self] &= ~bit

    def _known_others(self) -> RareFields:
        """Return its rare fields, read-only."""
        others = self.columns.others
        return others.get(self, _NOTHING) if others else _NOTHING

    def _others(self) -> RareFields:
        """Return its rare fields, made if needed."""
        return self.columns.others.setdefault(int(self), RareFields())

    # --- contents of the copies ---

    @property
    def lossy(self) -> tuple[Loss | None, ...]:
        return self._known_others().lossy

    @property
    def stays_raw(self) -> bool:
        return bool(self.columns.states[self] & STAYS_RAW)

    @stays_raw.setter
    def stays_raw(self, stays_raw: bool) -> None:
        self._set_state(STAYS_RAW, stays_raw)

    def loss_in(self, tier: int) -> Loss | None:
        lossy = self.lossy
        return lossy[tier] if lossy else None

    def checksum_in(self, tier: int) -> int:
        """xxh3_64 of the bytes that a reader of that tier's copy gets."""
        loss = self.loss_in(tier)
        return self.checksum if loss is None else loss.checksum

    def loss_of_copy(self, source: int) -> Loss | None:
        """Return the Loss of a byte-by-byte copy of tier `source`'s copy."""
        loss = self.loss_in(source)
        return None if loss is None else Loss(loss.checksum)

    def lossy_checksum(self) -> int | None:
        """xxh3_64 of the lossy copies' bytes; None without lossy copies."""
        return next((loss.checksum for loss in self.lossy if loss is not None), None)

    def set_loss(self, tier: int, loss: Loss | None) -> None:
        """Set the Loss of that tier's copy; None: it is exact, or does not exist."""
        known = [loss if other == tier else self.loss_in(other) for other in range(len(TIERS))]
        self._others().lossy = tuple(known) if any(known) else ()


def block_type(columns: BlockColumns) -> type[Block]:
    """Return the Block subclass of these columns. Its fields are the columns' own methods; Python functions take three
    times as long."""
    fields: dict[str, Any] = {
        "key": columns.keys,
        "parent": columns.parents,
        "size_bytes": columns.sizes,
        "generation": columns.generations,
        "checksum": columns.checksums,
        "readers": columns.readers,
        "last_access": columns.last_accesses,
        "event_seq": columns.event_seqs,
        "index_entry": columns.index_entries,
    }
    properties = {name: property(column.__getitem__, column.__setitem__) for name, column in fields.items()}
    names = {"columns": columns, "tenant": columns.tenant, "namespace": columns.namespace}
    return type("Block", (Block,), {"__slots__": (), **names, **properties})
