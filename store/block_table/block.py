"""Blocks of a node, in columns: identity, where the copies are, and who uses them. A block is the number of its row.

An object with all of that took 200 bytes a block, its slot in DRAM 110, and numbers too large to be shared 140: here they are 90, the key
beside. What few blocks have is beside them. What happens to many blocks at once is an assignment a column, in a C loop. rows.py makes
the rows.
"""

from array import array
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple

from kvstore.protocol.message import TIER_BITS
from kvstore.tiers.tier import Slot
from kvstore.tiers.value_codec import Encoding

NOT_SHOWN: Final = -1

GONE: Final = 1

PINNED: Final = 2

MOVING: Final = 4

STAYS_RAW: Final = 8

GUEST: Final = 16

ON_HOLD: Final = (32, 64, 128)
"""Bits of `BlockColumns.states`; the last ones by tier, for the copy that a hold keeps there (holds.py)."""

TIERS: Final = ("hbm", "dram", "nvme")
"""Tier indexes from the fastest down; a block's `slots` and the table's tiers are in this order."""

HBM, DRAM, NVME = range(3)

HELD: Final = (1 << HBM, 1 << DRAM, 1 << NVME)
"""By tier, its bit among those that hold a copy."""

_HBM, _DRAM, _NVME = HELD

IN_USE: Final = tuple(PINNED | MOVING | bit for bit in ON_HOLD)
"""By tier: of the states, those in which its copy there must stay where it is, as it must while it is read."""

_ANY_HOLD: Final = sum(ON_HOLD)

_MAX_HITS: Final = (1 << 32) - 1
"""They are counted up to here."""

_ALL_HELD: Final = range(1 << len(TIERS))

TIER_MASKS: Final = [sum(TIER_BITS[name] for name, bit in zip(TIERS, HELD, strict=True) if held & bit) for held in _ALL_HELD]

FASTEST: Final = [DRAM if held & _DRAM else HBM if held & _HBM else NVME if held else None for held in _ALL_HELD]

_HOLDING: Final = [tuple(tier for tier, bit in enumerate(HELD) if held & bit) for held in _ALL_HELD]
"""By `held`: the bits of TIER_BITS, the fastest tier, all of them."""

_new_slot = partial(tuple.__new__, Slot)
"""As Slot._make, in a third of the time."""


class Loss(NamedTuple):
    """Why a copy does not give the bytes that were put: it is encoded (`encoding`), or was made from a copy that is or was (None).

    `checksum` is the xxh3_64 of what its readers get.
    """

    checksum: int
    encoding: Encoding | None = None


@dataclass(slots=True, eq=False)
class RareFields:
    """What few blocks have."""

    hbm: Slot | None = None
    lossy: tuple[Loss | None, ...] = ()
    leaving: int | None = None


class BlockColumns:
    """The columns, and a tenant and namespace whose blocks they are: `named` gives the same columns for others. A number by row each.

    `held` has a bit a tier for the copies that there are. Of that in DRAM `places`, `slot_generations` and `groups` are what its Slot is,
    besides the block's size; `nvme` has that in NVMe, and is no longer than it must be. `policy_states` is what eviction policies know of
    it in DRAM (policy_states.py). `free` are rows that are nobody's.
    """

    __slots__ = (
        "checksums",
        "event_seqs",
        "free",
        "generations",
        "groups",
        "held",
        "hits",
        "keys",
        "last_accesses",
        "namespace",
        "nvme",
        "others",
        "parents",
        "places",
        "policy_states",
        "readers",
        "shown",
        "sizes",
        "slot_generations",
        "states",
        "tenant",
    )

    def __init__(self) -> None:
        self.tenant = self.namespace = ""
        self.sizes, self.generations, self.checksums = array("Q"), array("Q"), array("Q")
        self.last_accesses, self.event_seqs = array("Q"), array("Q")
        self.places, self.slot_generations, self.groups = array("Q"), array("Q"), array("I")
        self.shown, self.readers, self.hits = array("i"), array("I"), array("I")
        self.held, self.states = bytearray(), bytearray()
        self.keys: list[bytes] = []
        self.parents: list[bytes] = []
        self.policy_states: list[Any] = []
        self.nvme: list[Slot | None] = []
        self.others: dict[int, RareFields] = {}
        self.free: list[int] = []

    def named(self, tenant: str, namespace: str) -> "BlockColumns":
        """The same columns, of blocks of these."""
        found = copy(self)
        found.tenant, found.namespace = tenant, namespace
        return found

    def lengthen(self, count: int) -> None:
        """So many rows more."""
        for wide in (self.sizes, self.generations, self.checksums, self.last_accesses, self.event_seqs, self.places, self.slot_generations):
            wide.frombytes(bytes(8 * count))
        for narrow in (self.groups, self.shown, self.readers, self.hits):
            narrow.frombytes(bytes(4 * count))
        for byte in (self.held, self.states):
            byte.extend(bytes(count))
        for objects in (self.keys, self.parents):
            objects.extend([b""] * count)
        self.policy_states.extend([None] * count)

    def __len__(self) -> int:
        """Rows that there are."""
        return len(self.sizes)


_NOTHING: Final = RareFields()


class Block(int):
    """One value under one key of one tenant: the number of its row, which it keeps as long as anybody knows the block. Made by BlockRows;
    owned by the BlockTable. A subclass for each tenant and namespace (`block_type`) names the columns. Compared and hashed as the number
    is, which no two blocks of a node have at a time; never 0. It takes 48 bytes, an object that keeps its number, key and columns 96.

    `hbm`, `dram` and `nvme`, by index `slots[tier]`, are its complete copies, or None. `readers` counts leases and copies in flight: while
    it is above zero no slot of the block is reused. `moving` is set while a copy to another tier is being made, `leaving` then is the tier
    that the copy is to make room in, if that is its purpose. `event_seq` is the newest event about it.

    `size_bytes` and `checksum` are those of the value as it was put: they are the block's identity at the master, whatever its copies
    have become. `lossy` is empty, or by tier what is known of copies that give other bytes, all of them the same ones: else nobody could
    read the block twice. `shown` is its entry in the index that clients of this host read (store/shown/). `stays_raw` is set once the
    codec has refused it. `is_guest`: another node has spilled it here, and it is not spilled again.
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
    shown: int

    def __del__(self) -> None:
        # In whatever thread: one instruction gives the row back, and one takes it.
        columns = self.columns
        columns.keys[self] = columns.parents[self] = b""
        columns.free.append(int(self))

    @property
    def is_guest(self) -> bool:
        return bool(self.columns.states[self] & GUEST)

    @is_guest.setter
    def is_guest(self, is_guest: bool) -> None:
        self._set_state(GUEST, is_guest)

    # --- where it is ---

    @property
    def hbm(self) -> Slot | None:
        return self.columns.others[self].hbm if self.columns.held[self] & _HBM else None

    @property
    def dram(self) -> Slot | None:
        columns = self.columns
        if not columns.held[self] & _DRAM:
            return None
        return _new_slot((columns.places[self], columns.slot_generations[self], columns.sizes[self], columns.groups[self]))

    @property
    def nvme(self) -> Slot | None:
        return self.columns.nvme[self] if self.columns.held[self] & _NVME else None

    @property
    def slots(self) -> tuple[Slot | None, Slot | None, Slot | None]:
        return self.hbm, self.dram, self.nvme

    def slot_in(self, tier: int) -> Slot | None:
        """Its copy in that tier."""
        return self.dram if tier == DRAM else self.nvme if tier == NVME else self.hbm

    def set_slot(self, tier: int, slot: Slot | None) -> None:
        """Its copy in that tier is there from now on, of the block's size where it is DRAM; None: it has none."""
        columns = self.columns
        if slot is None:
            columns.held[self] &= ~HELD[tier]
            return
        columns.held[self] |= HELD[tier]
        if tier == DRAM:
            columns.places[self], columns.slot_generations[self], size_bytes, columns.groups[self] = slot
            assert size_bytes == columns.sizes[self]
        elif tier == NVME:
            if self >= len(columns.nvme):
                columns.nvme.extend([None] * (self + 1 - len(columns.nvme)))
            columns.nvme[self] = slot
        else:
            self._others().hbm = slot

    def group_in(self, tier: int) -> int:
        """The group of its slot in a tier that has a copy."""
        if tier == DRAM:
            return self.columns.groups[self]
        slot = self.slot_in(tier)
        assert slot is not None
        return slot.group

    def is_in(self, tier: int) -> bool:
        """Whether there is a copy in that tier."""
        return bool(self.columns.held[self] & HELD[tier])

    def is_also_outside(self, tier: int) -> bool:
        """Whether there is a copy in another tier."""
        return bool(self.columns.held[self] & ~HELD[tier])

    def tiers(self) -> tuple[int, ...]:
        """Those that have a copy, from the fastest down."""
        return _HOLDING[self.columns.held[self]]

    def fastest(self) -> int | None:
        """Index of the fastest tier for a reader on a CPU: DRAM can be mapped, HBM has to be copied out, NVMe read."""
        return FASTEST[self.columns.held[self]]

    def tier_mask(self) -> int:
        """Bits of TIER_BITS for the tiers that hold a copy; none for a block that is gone, whose slots may still wait for readers."""
        return 0 if self.is_gone else TIER_MASKS[self.columns.held[self]]

    # --- who uses it ---

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
        """Those of ON_HOLD: the tiers whose copy stays for a lookup that found it."""
        return self.columns.states[self] & _ANY_HOLD

    @hold_bits.setter
    def hold_bits(self, bits: int) -> None:
        self.columns.states[self] = self.columns.states[self] & ~_ANY_HOLD | bits

    @property
    def leaving(self) -> int | None:
        return self._known_others().leaving

    @leaving.setter
    def leaving(self, tier: int | None) -> None:
        self._others().leaving = tier

    @property
    def is_gone(self) -> bool:
        return bool(self.columns.states[self] & GONE)

    @is_gone.setter
    def is_gone(self, is_gone: bool) -> None:
        if is_gone:  # one call less for each that leaves
            self.columns.states[self] |= GONE
        else:
            self.columns.states[self] &= ~GONE

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
        """To look at only."""
        others = self.columns.others
        return others.get(self, _NOTHING) if others else _NOTHING

    def _others(self) -> RareFields:
        """To change."""
        return self.columns.others.setdefault(int(self), RareFields())

    # --- what its copies give ---

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
        """xxh3_64 of what a reader of that tier's copy gets."""
        loss = self.loss_in(tier)
        return self.checksum if loss is None else loss.checksum

    def loss_of_copy(self, source: int) -> Loss | None:
        """That of what readers of tier `source` get, once it is copied byte by byte."""
        loss = self.loss_in(source)
        return None if loss is None else Loss(loss.checksum)

    def lossy_checksum(self) -> int | None:
        """xxh3_64 of what the lossy copies give; None where there are none."""
        return next((loss.checksum for loss in self.lossy if loss is not None), None)

    def set_loss(self, tier: int, loss: Loss | None) -> None:
        """Say what that tier's copy gives its readers; None: what was put, or there is none."""
        known = [loss if other == tier else self.loss_in(other) for other in range(len(TIERS))]
        self._others().lossy = tuple(known) if any(known) else ()


def block_type(columns: BlockColumns) -> type[Block]:
    """The class of the blocks of these columns. Its fields are the columns' own methods: Python's take three times as long."""
    fields: dict[str, Any] = {
        "key": columns.keys,
        "parent": columns.parents,
        "size_bytes": columns.sizes,
        "generation": columns.generations,
        "checksum": columns.checksums,
        "readers": columns.readers,
        "last_access": columns.last_accesses,
        "event_seq": columns.event_seqs,
        "shown": columns.shown,
    }
    properties = {name: property(column.__getitem__, column.__setitem__) for name, column in fields.items()}
    names = {"columns": columns, "tenant": columns.tenant, "namespace": columns.namespace}
    return type("Block", (Block,), {"__slots__": (), **names, **properties})
