"""What this node shows to the clients of its host: an index for each tenant that has one here, and their desks.

The block table tells it what gets a place in DRAM (`show`) and what loses it (`hide`), before the place can be used again, and asks whether
somebody still looks there (`is_looked_at`, `keep`). It owns the indexes, the desks, and the slots that were given up while a client looked.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import compress
from typing import Final

import numpy as np

from kvstore.protocol.errors import TierFailed
from kvstore.protocol.node_messages import MapSlabsReply
from kvstore.protocol.shared_index import ACCESSES, KEY_WORDS, MAX_KEY_BYTES, READER_SLOTS_BYTES, WAYS, key_words_for
from kvstore.store.block_table.block import DRAM, GONE, HELD, NOT_SHOWN, Block
from kvstore.store.block_table.copies import IsLookedAt, Place
from kvstore.store.block_table.holds import Holds
from kvstore.store.block_table.rows import keys_of, places_of, rows_of
from kvstore.store.shared_index.index import FIRST_SETS, FULL_SHARE, MAX_SETS, SharedIndexTable
from kvstore.store.shared_index.index_growth import IndexGrowth
from kvstore.store.shared_index.reader_slots import ReaderSlots, slot_of
from kvstore.tiers.dram import DramTier
from kvstore.tiers.tier import Slot

SHOWN_A_TURN: Final = 1000
"""Blocks that a new index is given before the loop's other work has its turn."""
SHOWN_A_PART: Final = 200
"""An index that grows does its next part whenever so many blocks have been shown, besides one a turn: puts in a row do not fill it up
meanwhile. Beginning at 0.5 it is copied at 0.7."""
SHOWN_AT_ONCE: Final = 512
MIN_SHOWN_AT_ONCE: Final = 16
SHARE_AT_ONCE_SHIFT: Final = 5
"""Blocks of a batch that are shown in one go: fewer than the least are as quick one by one, and no index is filled much beyond the share
at which it grows, by a thirty-second of its entries."""
SAMPLE_BLOCKS: Final = 1000
"""Looked at to find out how large a new index is to be."""
TAKEN_A_TURN: Final = 4096
"""Accesses of one client that are counted before others have their turn."""
TURNS_OF_A_RING: Final = ACCESSES // TAKEN_A_TURN + 1
"""In so many all that a client's ring holds is counted: none goes beyond the ring's end."""


@dataclass(slots=True, eq=False)
class _Tenant:
    """`left` are blocks that its new index does not show yet. `growth` is set while it grows: blocks are shown and hidden there then."""

    index: SharedIndexTable
    """The one that clients are given."""
    growth: IndexGrowth | None = None
    shown: int = 0
    """Blocks shown while it grew."""
    desks: dict[object, ReaderSlots] = field(default_factory=dict)
    left: deque[Block] = field(default_factory=deque)


_Look = tuple[object, ReaderSlots, int]
"""By owner, desk and word."""


class SharedIndexWriter:
    """See the module. The node's loop is the only caller."""

    def __init__(self, dram: DramTier, holds: Holds, *, max_look_ns: int, hang_up: Callable[[object], None] = lambda owner: None) -> None:
        """`holds` are told what clients hold at their desks.

        `hang_up` on the owner of a connection whose client has looked for longer than `max_look_ns` at what was to go."""
        self._dram = dram
        self._holds = holds
        self._max_look_ns = max_look_ns
        self._hang_up = hang_up
        self._seen: dict[_Look, int] = {}
        """Looks that were in the way, and since when."""
        self._tenants: dict[str, _Tenant] = {}
        self._kept: list[tuple[str, Slot]] = []
        self._now_ns = 0

    # --- the block table ---

    def show(self, block: Block, place: Place | None = None) -> None:
        """The block has a copy in DRAM from now on, whose bytes are all there. `place`: where it lies, from who knows."""
        tenant = self._tenants.get(block.tenant)
        if tenant is None:
            return
        slot, index = block.dram, tenant.index
        if slot is None or tenant.growth is not None or index.is_full or len(block.key) > index.max_key_bytes:
            self._grow_if_due(tenant, len(block.key))
            self._show(tenant, block)
        else:  # as a rule, in fewer steps
            _, offset = place or self._dram.locate(slot)
            index.show(block, offset, block.checksum_in(DRAM), slot.index)

    def show_all(self, blocks: Sequence[Block]) -> None:
        """As `show`, of blocks of one tenant."""
        tenant = self._tenants.get(blocks[0].tenant) if blocks else None
        if tenant is None:
            return
        shown = 0
        while shown < len(blocks):
            self._grow_if_due(tenant, len(blocks[shown].key))
            at_once = SHOWN_AT_ONCE if tenant.growth is not None else max(SHOWN_AT_ONCE, tenant.index.entries >> SHARE_AT_ONCE_SHIFT)
            part = blocks[shown : shown + at_once]
            shown += len(part)
            left = self._show_part(tenant.growth or tenant.index, part)
            self._have_shown(tenant, len(part) - len(left))
            for block in left:
                self.show(block)

    def _show_part(self, index: SharedIndexTable | IndexGrowth, blocks: Sequence[Block]) -> Sequence[Block]:
        """Those that cannot be shown with the others in one go."""
        lengths = [len(block.key) for block in blocks] if len(blocks) >= MIN_SHOWN_AT_ONCE else [0]
        if lengths.count(lengths[0]) < len(blocks) or lengths[0] > index.max_key_bytes:
            return blocks
        places = places_of(blocks)
        _, offsets = self._dram.locate_all(places)
        left = index.show_all(blocks, offsets, places)
        return [blocks[number] for number in left]

    def _show(self, tenant: _Tenant, block: Block) -> None:
        slot = block.dram
        assert slot is not None
        _, offset = self._dram.locate(slot)
        (tenant.growth or tenant.index).show(block, offset, block.checksum_in(DRAM), slot.index)
        self._have_shown(tenant, 1)

    def _have_shown(self, tenant: _Tenant, count: int) -> None:
        """So many blocks more: an index that grows goes on with it."""
        if tenant.growth is None:
            return
        parts = tenant.shown // SHOWN_A_PART
        tenant.shown += count
        for _ in range(tenant.shown // SHOWN_A_PART - parts):
            if tenant.growth is not None:
                self._grow(tenant, tenant.growth)

    def _grow_if_due(self, tenant: _Tenant, key_bytes: int) -> None:
        """Where the index is full, or made for shorter keys than that of the next block; a longer one than any index shows is not."""
        if tenant.growth is not None:
            return
        is_too_long = tenant.index.max_key_bytes < key_bytes <= MAX_KEY_BYTES
        if is_too_long or tenant.index.is_full:
            with suppress(TierFailed):  # it shows what it can
                tenant.growth = IndexGrowth(tenant.index, key_words_for(key_bytes) if is_too_long else 0)

    def hide(self, block: Block) -> None:
        """The block's copy in DRAM is about to go."""
        if block.shown != NOT_SHOWN:
            tenant = self._tenants[block.tenant]
            (tenant.growth or tenant.index).hide(block)

    def hide_all(self, blocks: Sequence[Block]) -> None:
        """As `hide`, of blocks of one tenant."""
        tenant = self._tenants.get(blocks[0].tenant)
        if tenant is None:
            return
        is_shown = np.frombuffer(blocks[0].columns.shown, np.int32)[rows_of(blocks)] != NOT_SHOWN
        shown = blocks if is_shown.all() else list(compress(blocks, is_shown.tolist()))
        if not shown:
            return
        if tenant.growth is None:
            tenant.index.hide_all(shown)
        else:
            for block in shown:
                tenant.growth.hide(block)

    def is_looked_at(self, tenant: str, index: int) -> bool:
        """Whether a client looks at what is in the slot of that index. What is hidden nobody begins to look at: for that, no is final."""
        of_tenant = self._tenants.get(tenant)
        if of_tenant is None or not of_tenant.desks:
            return False
        of_tenant.index.fence()
        is_looked_at = False
        for owner, desk in of_tenant.desks.items():
            for word in desk.looks_at(index):
                self._seen.setdefault((owner, desk, word), self._now_ns)
                is_looked_at = True
        return is_looked_at

    def who_looks(self, tenant: str) -> IsLookedAt | None:
        """`is_looked_at` of many slots of the tenant, as of now; None: nobody looks at anything. What clients hold is known then, too."""
        of_tenant = self._tenants.get(tenant)
        if of_tenant is None or not of_tenant.desks:
            return None
        of_tenant.index.fence()
        looks: list[_Look] = []
        for owner, desk in of_tenant.desks.items():
            if desk.has_holds:
                self._take_holds(tenant, of_tenant, owner, desk)
            if words := desk.looks():
                looks += [(owner, desk, word) for word in words]
        return self._among(looks) if looks else None

    def _among(self, looks: Sequence[_Look]) -> IsLookedAt:
        """Whether one of these is at a slot. It is in the way then."""
        by_slot: dict[int, list[_Look]] = {}
        for look in looks:
            by_slot.setdefault(slot_of(look[2]), []).append(look)

        def is_looked_at(index: int) -> bool:
            if index not in by_slot:
                return False
            for look in by_slot[index]:
                self._seen.setdefault(look, self._now_ns)
            return True

        return is_looked_at

    def keep(self, tenant: str, slot: Slot) -> None:
        """A quarantined slot is the showing's from now on: it is released when nobody looks any more."""
        self._kept.append((tenant, slot))

    # --- clients ---

    def attach(self, owner: object, tenant: str, blocks: Callable[[], list[Block]]) -> tuple[MapSlabsReply, list[int]]:
        """Give a client the tenant's index and its own desk: their sizes and descriptors, which the caller closes.

        `blocks` gives all of the tenant's, for its first client. Raises TierFailed: the system has no memory or descriptor left.
        """
        of_tenant = self._tenants.get(tenant)
        if of_tenant is None:
            known = blocks()
            of_tenant = _Tenant(SharedIndexTable(_sets_for(_count_to_show(known)), key_words=_key_words_of(known)), left=deque(known))
            of_tenant.index.beat(self._now_ns)
            of_tenant.index.tell_slabs_gone(self._dram.slabs_gone)
            self._tenants[tenant] = of_tenant
            self._show_more(of_tenant)
        desk = of_tenant.desks.get(owner)
        if desk is None:
            desk = of_tenant.desks[owner] = ReaderSlots()
        fds = [of_tenant.index.export()]
        try:
            fds.append(desk.export())
        except OSError as refusal:
            os.close(fds[0])
            raise TierFailed(f"no descriptor is left for a client's desk: {refusal}") from refusal
        return MapSlabsReply([of_tenant.index.size_bytes, READER_SLOTS_BYTES]), fds

    def forget_owner(self, owner: object) -> None:
        """A connection is gone, and with it what its client looked at."""
        for name, of_tenant in list(self._tenants.items()):
            desk = of_tenant.desks.pop(owner, None)
            if desk is not None:
                desk.close()
                self.sweep()
            index = of_tenant.growth or of_tenant.index
            is_there = self._tenants.get(name) is of_tenant  # a sweep may hang up on another client, whose own end comes before this one's
            if is_there and not of_tenant.desks and not index.count and not of_tenant.left:
                index.close()
                del self._tenants[name]

    # --- the clockwork ---

    def take_accesses(self, note: Callable[[str, list[Block], int], None], tenant: str | None = None) -> bool:
        """Call `note` with a tenant, the blocks that one of its clients has read since the last call, in order, and how many more of which
        only the number is known; whether some are left to be taken. `tenant`: only what its clients read.
        """
        is_more = False
        for name in list(self._tenants) if tenant is None else [tenant]:
            of_tenant = self._tenants.get(name)
            for desk in list(of_tenant.desks.values()) if of_tenant is not None else ():
                if desk.has_accesses:
                    self._take(name, desk, note)
                    is_more |= desk.has_accesses
        return is_more

    def take_holds(self, tenant: str) -> None:
        """Have what the tenant's clients hold, or hold no more, be known."""
        of_tenant = self._tenants.get(tenant)
        if of_tenant is not None:
            for owner, desk in of_tenant.desks.items():
                if desk.has_holds:
                    self._take_holds(tenant, of_tenant, owner, desk)

    def _take_holds(self, tenant: str, of_tenant: _Tenant, owner: object, desk: ReaderSlots) -> None:
        index = of_tenant.growth or of_tenant.index
        for number, until_ns, words in desk.hold_records():
            if not until_ns:
                self._holds.release(tenant, number)
                continue
            blocks = index.all_accessed(words)
            self._holds.refused += len(words) - len(blocks)  # they have left meanwhile
            flags = self._holds.add(owner, tenant, number, blocks, until_ns=until_ns, now_ns=self._now_ns)
            if (not_held := len(words) - sum(flags)) > 0:
                desk.not_held(not_held)

    def take_last(self, note: Callable[[str, list[Block], int], None], owner: object) -> None:
        """Call `note` with all that the client of this connection has read and that has not been taken: the connection is gone."""
        of_owner = [(name, desk) for name, of_tenant in self._tenants.items() if (desk := of_tenant.desks.get(owner)) is not None]
        for name, desk in of_owner:
            for _ in range(TURNS_OF_A_RING):  # no more: its client may go on writing there
                self._take(name, desk, note)

    def _take(self, tenant: str, desk: ReaderSlots, note: Callable[[str, list[Block], int], None]) -> None:
        index = self._tenants[tenant].growth or self._tenants[tenant].index
        found = [index.accessed(word) for word in desk.accesses(TAKEN_A_TURN)]
        note(tenant, [block for block in found if block is not None], desk.newly_lost())

    def beat(self, now_ns: int) -> bool:
        """Tell clients that the node lives, and go on with what is begun; whether there is more to do at once."""
        self._now_ns = now_ns
        gone = self._dram.slabs_gone
        is_more = False
        for tenant, of_tenant in self._tenants.items():
            self.take_holds(tenant)
            of_tenant.index.beat(now_ns)
            of_tenant.index.tell_slabs_gone(gone)
            if of_tenant.growth is not None:
                self._grow(of_tenant, of_tenant.growth)
            elif of_tenant.left:
                self._show_more(of_tenant)
            is_more |= of_tenant.growth is not None or bool(of_tenant.left)
        return is_more

    def sweep(self) -> None:
        """Release the slots at which nobody looks any more. Who has been in the way for too long, a stopped process say, is hung up on."""
        self._seen = {seen: since_ns for seen, since_ns in self._seen.items() if not seen[1].is_closed and seen[1].still_looks(seen[2])}
        for owner in {owner for (owner, _, _), since_ns in self._seen.items() if self._now_ns - since_ns > self._max_look_ns}:
            self._hang_up(owner)
        kept, self._kept = self._kept, []
        looks = {tenant: self.who_looks(tenant) for tenant in {tenant for tenant, _ in kept}}
        for tenant, slot in kept:
            is_looked_at = looks[tenant]
            if is_looked_at is not None and is_looked_at(slot.index):
                self._kept.append((tenant, slot))
            else:
                self._dram.release(slot)

    def _show_more(self, of_tenant: _Tenant) -> None:
        left = of_tenant.left
        wanted = _to_be_shown([left.popleft() for _ in range(min(SHOWN_A_TURN, len(left)))])
        lossy = [block for block in wanted if block.checksum_in(DRAM) != block.checksum] if wanted and wanted[0].columns.others else []
        for block in lossy:
            self._show(of_tenant, block)
        self.show_all([block for block in wanted if block.shown == NOT_SHOWN] if lossy else wanted)

    def _grow(self, of_tenant: _Tenant, growth: IndexGrowth) -> None:
        """Do the next part."""
        if not growth.go_on():
            of_tenant.growth = None
        if growth.index is not of_tenant.index:
            of_tenant.index = growth.index
            of_tenant.index.beat(self._now_ns)
            of_tenant.index.tell_slabs_gone(self._dram.slabs_gone)
            of_tenant.left.extend(growth.old.pushed_out)

    @property
    def memory_bytes(self) -> int:
        """Of all indexes and desks."""
        return sum((one.growth or one.index).memory_bytes + READER_SLOTS_BYTES * len(one.desks) for one in self._tenants.values())

    @property
    def clients(self) -> int:
        """Connections that have a desk here."""
        return sum(len(one.desks) for one in self._tenants.values())

    def close(self) -> None:
        """Nothing is shown any more, and clients are told so."""
        for of_tenant in self._tenants.values():
            (of_tenant.growth or of_tenant.index).close()
            for desk in of_tenant.desks.values():
                desk.close()
        self._tenants.clear()


def _to_be_shown(blocks: Sequence[Block]) -> list[Block]:
    """Those of the blocks, all of one node, that are in DRAM and are not shown, but could be."""
    if not blocks:
        return []
    columns, rows = blocks[0].columns, rows_of(blocks)
    is_wanted = np.frombuffer(columns.states, np.uint8)[rows] & GONE == 0
    is_wanted &= np.frombuffer(columns.held, np.uint8)[rows] & HELD[DRAM] != 0
    is_wanted &= np.frombuffer(columns.shown, np.int32)[rows] == NOT_SHOWN
    is_wanted &= np.fromiter(map(len, keys_of(blocks)), np.intp, len(blocks)) <= MAX_KEY_BYTES
    return list(compress(blocks, is_wanted.tolist()))


def _count_to_show(blocks: Sequence[Block]) -> int:
    """About how many of them are, as a sample has it: to look at ten million would stop the loop for two seconds and a half."""
    sample = _sample_of(blocks)
    return len(_to_be_shown(sample)) * len(blocks) // max(len(sample), 1)


def _key_words_of(blocks: Sequence[Block]) -> int:
    """Of an index that is to show them, by a sample."""
    lengths = [len(key) for key in keys_of(_sample_of(blocks)) if len(key) <= MAX_KEY_BYTES]
    return key_words_for(max(lengths)) if lengths else KEY_WORDS[0]


def _sample_of(blocks: Sequence[Block]) -> Sequence[Block]:
    return blocks[:: len(blocks) // SAMPLE_BLOCKS + 1]


def _sets_for(blocks: int) -> int:
    """Sets of an index that begins with so many blocks: it need not grow at once."""
    sets = FIRST_SETS
    while sets < MAX_SETS and blocks > FULL_SHARE / 2 * sets * WAYS:
        sets *= 2
    return sets
