"""A block as a node knows it: its identity, where its copies are, and who is using it. What is known of it is a row of columns."""

from functools import partial
from typing import Final

from kvstore.protocol.message import TIER_BITS
from kvstore.store.blocks.columns import GONE, GUEST, MOVING, PINNED, STAYS_RAW, Columns, Loss, Others
from kvstore.tiers.tier import Slot

TIERS: Final = ("hbm", "dram", "nvme")
"""Tier indexes from the fastest down; a block's `slots` and the table's tiers are in this order."""
HBM, DRAM, NVME = range(3)
HELD: Final = (1 << HBM, 1 << DRAM, 1 << NVME)
"""By tier, its bit among those that hold a copy."""
_HBM, _DRAM, _NVME = HELD
IN_USE: Final = PINNED | MOVING
"""Of the states, those in which it must stay where it is, as it must while it is read."""
_MAX_HITS: Final = (1 << 32) - 1
"""They are counted up to here."""
_ALL_HELD: Final = range(1 << len(TIERS))
TIER_MASKS: Final = [sum(TIER_BITS[name] for name, bit in zip(TIERS, HELD, strict=True) if held & bit) for held in _ALL_HELD]
_FASTEST: Final = [DRAM if held & _DRAM else HBM if held & _HBM else NVME if held else None for held in _ALL_HELD]
_HOLDING: Final = [tuple(tier for tier, bit in enumerate(HELD) if held & bit) for held in _ALL_HELD]
"""By `held`: the bits of TIER_BITS, the fastest tier, all of them."""
_NOTHING: Final = Others()
_new_slot = partial(tuple.__new__, Slot)
"""As Slot._make, in a third of the time."""


class Block:
    """One value under one key of one tenant: the name of a row, which it keeps for as long as anybody knows the block. Made by BlockRows;
    owned by the BlockTable; compared and hashed by identity.

    `hbm`, `dram` and `nvme`, by index `slots[tier]`, are its complete copies, or None. `readers` counts leases and copies in flight: while
    it is above zero no slot of the block is reused. `moving` is set while a copy to another tier is being made, `leaving` then is the tier
    that the copy is to make room in, if that is its purpose. `event_seq` is the newest event about it.

    `size_bytes` and `checksum` are those of the value as it was put: they are the block's identity at the master, whatever its copies
    have become. `lossy` is empty, or by tier what is known of copies that give other bytes, all of them the same ones: else nobody could
    read the block twice. `shown` is its entry in the index that clients of this host read (store/shown/). `stays_raw` is set once the
    codec has refused it. `is_guest`: another node has spilled it here, and it is not spilled again.
    """

    __slots__ = ("columns", "key", "parent", "row")

    def __init__(self, columns: Columns, row: int, key: bytes, parent: bytes) -> None:
        self.columns = columns
        self.row = row
        self.key = key
        self.parent = parent

    def __del__(self) -> None:
        # In whatever thread: one instruction gives the row back, and one takes it.
        self.columns.free.append(self.row)

    # --- what it is ---

    @property
    def tenant(self) -> str:
        return self.columns.tenant

    @property
    def namespace(self) -> str:
        return self.columns.namespace

    @property
    def size_bytes(self) -> int:
        return self.columns.sizes[self.row]

    @property
    def generation(self) -> int:
        return self.columns.generations[self.row]

    @generation.setter
    def generation(self, generation: int) -> None:
        self.columns.generations[self.row] = generation

    @property
    def checksum(self) -> int:
        return self.columns.checksums[self.row]

    @checksum.setter
    def checksum(self, checksum: int) -> None:
        self.columns.checksums[self.row] = checksum

    @property
    def is_guest(self) -> bool:
        return bool(self.columns.states[self.row] & GUEST)

    @is_guest.setter
    def is_guest(self, is_guest: bool) -> None:
        self._set_state(GUEST, is_guest)

    # --- where it is ---

    @property
    def hbm(self) -> Slot | None:
        return self.columns.others[self.row].hbm if self.columns.held[self.row] & _HBM else None

    @property
    def dram(self) -> Slot | None:
        columns, row = self.columns, self.row
        if not columns.held[row] & _DRAM:
            return None
        return _new_slot((columns.places[row], columns.slot_generations[row], columns.sizes[row], columns.groups[row]))

    @property
    def nvme(self) -> Slot | None:
        return self.columns.nvme[self.row] if self.columns.held[self.row] & _NVME else None

    @property
    def slots(self) -> tuple[Slot | None, Slot | None, Slot | None]:
        return self.hbm, self.dram, self.nvme

    def slot_in(self, tier: int) -> Slot | None:
        """Its copy in that tier."""
        return self.dram if tier == DRAM else self.nvme if tier == NVME else self.hbm

    def set_slot(self, tier: int, slot: Slot | None) -> None:
        """Its copy in that tier is there from now on, of the block's size where it is DRAM; None: it has none."""
        columns, row = self.columns, self.row
        if slot is None:
            columns.held[row] &= ~HELD[tier]
            return
        columns.held[row] |= HELD[tier]
        if tier == DRAM:
            columns.places[row], columns.slot_generations[row], size_bytes, columns.groups[row] = slot
            assert size_bytes == columns.sizes[row]
        elif tier == NVME:
            if row >= len(columns.nvme):
                columns.nvme.extend([None] * (row + 1 - len(columns.nvme)))
            columns.nvme[row] = slot
        else:
            self._others().hbm = slot

    def group_in(self, tier: int) -> int:
        """The group of its slot in a tier that has a copy."""
        if tier == DRAM:
            return self.columns.groups[self.row]
        slot = self.slot_in(tier)
        assert slot is not None
        return slot.group

    def is_in(self, tier: int) -> bool:
        """Whether there is a copy in that tier."""
        return bool(self.columns.held[self.row] & HELD[tier])

    def is_also_outside(self, tier: int) -> bool:
        """Whether there is a copy in another tier."""
        return bool(self.columns.held[self.row] & ~HELD[tier])

    def tiers(self) -> tuple[int, ...]:
        """Those that have a copy, from the fastest down."""
        return _HOLDING[self.columns.held[self.row]]

    def fastest(self) -> int | None:
        """Index of the fastest tier for a reader on a CPU: DRAM can be mapped, HBM has to be copied out, NVMe read."""
        return _FASTEST[self.columns.held[self.row]]

    def tier_mask(self) -> int:
        """Bits of TIER_BITS for the tiers that hold a copy; none for a block that is gone, whose slots may still wait for readers."""
        return 0 if self.is_gone else TIER_MASKS[self.columns.held[self.row]]

    # --- who uses it ---

    @property
    def readers(self) -> int:
        return self.columns.readers[self.row]

    @readers.setter
    def readers(self, readers: int) -> None:
        self.columns.readers[self.row] = readers

    @property
    def pinned(self) -> bool:
        return bool(self.columns.states[self.row] & PINNED)

    @pinned.setter
    def pinned(self, pinned: bool) -> None:
        self._set_state(PINNED, pinned)

    @property
    def moving(self) -> bool:
        return bool(self.columns.states[self.row] & MOVING)

    @moving.setter
    def moving(self, moving: bool) -> None:
        self._set_state(MOVING, moving)

    @property
    def leaving(self) -> int | None:
        return self._known_others().leaving

    @leaving.setter
    def leaving(self, tier: int | None) -> None:
        self._others().leaving = tier

    @property
    def is_gone(self) -> bool:
        return bool(self.columns.states[self.row] & GONE)

    @is_gone.setter
    def is_gone(self, is_gone: bool) -> None:
        if is_gone:  # one call less for each that leaves
            self.columns.states[self.row] |= GONE
        else:
            self.columns.states[self.row] &= ~GONE

    @property
    def hits(self) -> int:
        return self.columns.hits[self.row]

    @hits.setter
    def hits(self, hits: int) -> None:
        self.columns.hits[self.row] = min(hits, _MAX_HITS)

    @property
    def last_access(self) -> int:
        return self.columns.last_accesses[self.row]

    @last_access.setter
    def last_access(self, number: int) -> None:
        self.columns.last_accesses[self.row] = number

    @property
    def event_seq(self) -> int:
        return self.columns.event_seqs[self.row]

    @event_seq.setter
    def event_seq(self, seq: int) -> None:
        self.columns.event_seqs[self.row] = seq

    @property
    def shown(self) -> int:
        return self.columns.shown[self.row]

    @shown.setter
    def shown(self, entry: int) -> None:
        self.columns.shown[self.row] = entry

    def _set_state(self, bit: int, is_set: bool) -> None:
        if is_set:
            self.columns.states[self.row] |= bit
        else:
            self.columns.states[self.row] &= ~bit

    def _known_others(self) -> Others:
        """To look at only."""
        others = self.columns.others
        return others.get(self.row, _NOTHING) if others else _NOTHING

    def _others(self) -> Others:
        """To change."""
        return self.columns.others.setdefault(self.row, Others())

    # --- what its copies give ---

    @property
    def lossy(self) -> tuple[Loss | None, ...]:
        return self._known_others().lossy

    @property
    def stays_raw(self) -> bool:
        return bool(self.columns.states[self.row] & STAYS_RAW)

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

    def check_integrity(self) -> None:
        """Assert what holds of every visible block. For tests."""
        assert not self.is_gone
        assert self.fastest() is not None
        assert self.leaving is None or self.moving
        assert self.tiers() == tuple(tier for tier, slot in enumerate(self.slots) if slot is not None)
        assert all(slot is not None or self.loss_in(tier) is None for tier, slot in enumerate(self.slots))
        assert {loss.checksum for loss in self.lossy if loss is not None} <= {self.lossy_checksum()}
        assert any(self.lossy) == bool(self.lossy)
        assert self.row not in self.columns.free
