"""Invariants of a node's tables and indexes, asserted from outside. O(blocks)."""

from collections.abc import Iterable, Mapping
from functools import singledispatch
from itertools import pairwise
from typing import Any

import numpy as np

from kvstore.protocol.shared_index import CHECK, KEY, SEQUENCE, checks_of, hash_of, tag_of
from kvstore.store.block_table.block import ON_HOLD, TIERS, Block, BlockColumns
from kvstore.store.block_table.copies import BlockCopies
from kvstore.store.block_table.eviction_order import EvictionOrder
from kvstore.store.block_table.free_slots import SlotsAhead
from kvstore.store.block_table.holds import _COUNT_SHIFT, _ONE, MAX_ENTRIES, Holds
from kvstore.store.block_table.limits import SlabLimits, TierLimits
from kvstore.store.block_table.open_puts import MAX_WHOLE, EndedPuts, OpenBatch, OpenPuts
from kvstore.store.block_table.rows import FIRST_ROW, BlockRows
from kvstore.store.block_table.slab_index import SlabIndex
from kvstore.store.block_table.table import BlockTable
from kvstore.store.block_table.tier_view import EncodedTotals, TierView
from kvstore.store.block_table.uncommitted import UNCOMMITTED, UncommittedBlocks
from kvstore.store.block_table.visible_blocks import VisibleBlocks
from kvstore.store.reads.read_limiter import ReadLimiter
from kvstore.store.shared_index.index import SharedIndexTable
from kvstore.store.shared_index.index_growth import IndexGrowth
from kvstore.store.shared_index.index_writer import SharedIndexWriter
from kvstore.tiers.policies.block_values import BlockValues
from kvstore.tiers.policies.prefix.policy import PrefixPolicy


@singledispatch
def check(self: Any, *_: Any) -> None:
    """Assert what holds of it."""
    raise AssertionError(f"nothing is known of {type(self).__name__}")


@check.register
def _block(self: Block) -> None:
    """Assert what holds of every visible block."""
    assert not self.is_dropped
    assert self.fastest() is not None
    assert self.demoted_from is None or self.moving
    assert self.tiers() == tuple(tier for tier, slot in enumerate(self.slots) if slot is not None)
    assert all(slot is not None or self.loss_in(tier) is None for tier, slot in enumerate(self.slots))
    assert {loss.checksum for loss in self.lossy if loss is not None} <= {self.lossy_checksum()}
    assert any(self.lossy) == bool(self.lossy)
    assert self not in self.columns.free


@check.register
def _columns(self: BlockColumns) -> None:
    """Assert that all are of one length."""
    columns = (self.sizes, self.generations, self.checksums, self.last_accesses, self.event_seqs, self.slot_indexes, self.slot_generations)
    narrow = (self.groups, self.index_entries, self.readers, self.hits, self.held, self.states, self.keys, self.parents, self.policy_states)
    assert {len(column) for column in (*columns, *narrow)} == {len(self)}
    assert len(self.nvme) <= len(self)
    assert len(set(self.free)) == len(self.free)
    assert not any(self.policy_states[row] is not None for row in self.free)


@check.register
def _copies(self: BlockCopies) -> None:
    """Assert that slots, orders and blocks agree."""
    for index, level in self._levels.items():
        check(level, (block for block in self._visible if block.is_in(index)))
    for block in self._visible:
        check(block)
    assert set(self._uncommitted.blocks()) == {block for block in self._visible if block.generation == UNCOMMITTED}


@check.register
def _eviction_order(self: EvictionOrder) -> None:
    """Assert the policies' invariants, and that none is empty."""
    self._families.flush_touches()
    for members in self._groups.values():
        members.policy.check_integrity()
        assert len(members.policy)
        assert all(key in members.policy for key in members.retired)
    assert self._rebalance_credits.keys() <= self._groups.keys()
    assert {group: members.tenant for group, members in self._groups.items()} == {
        group: tenant for tenant, groups in self._groups_of.items() for group in groups
    }
    assert all(self._groups_of.values())
    assert self._families._ledger.holders.keys() >= {id(members) for members in self._groups.values()}
    assert self._families._tenants.keys() >= self._groups_of.keys()
    memories: dict[int, int] = {}
    for holder in self._families._ledger.holders.values():
        policy = holder.policy._blocks if isinstance(holder.policy, BlockValues) else holder.policy
        memories[id(policy.model if isinstance(policy, PrefixPolicy) else policy)] = policy.remembered
    assert self._families.remembered == sum(memories.values())


@check.register
def _slots_ahead(self: SlotsAhead) -> None:
    """Assert that the bytes add up and that no two writers have one slot."""
    assert self.bytes == sum(ahead.slot.size_bytes for ahead in self._of_owner.values()) <= self._max_bytes
    assert len({ahead.slot.index for ahead in self._of_owner.values()}) == len(self._of_owner)


@check.register
def _holds(self: Holds) -> None:
    """Assert that states, counts and limits agree."""
    counts: dict[Block, int] = {}
    for hold in self._holds.values():
        assert hold.blocks
        for block in hold.blocks:
            counts[block] = counts.get(block, 0) + 1
    assert counts == {block: held >> _COUNT_SHIFT for block, held in self._held.items()}
    assert self._entries == sum(counts.values()) <= MAX_ENTRIES
    of_tier = [0] * len(TIERS)
    for block, held in self._held.items():
        of_tier[held % _ONE] += block.size_bytes
        assert block.hold_bits == ON_HOLD[held % _ONE]
    assert of_tier == self._bytes
    assert all(of_tier[tier] <= self._most_bytes.get(tier, 0) for tier in range(len(TIERS)))
    assert [sum(use[at] for use in self._of_tenant.values()) for at in range(len(TIERS) + 1)] == [*of_tier, len(self._held)]
    assert {name for _, name in self._expiry} >= self._holds.keys()
    assert {hold for mine in self._by_owner.values() for hold in mine} == set(self._holds.values())
    assert all(hold.owner is owner for owner, mine in self._by_owner.items() for hold in mine)


@check.register
def _level(self: TierView, blocks: Iterable[Block]) -> None:
    """Assert that slots, order and bytes agree. `blocks` are those with a copy here."""
    blocks = list(blocks)
    self.tier.check_integrity()
    check(self.order)
    check(self._by_slot)
    assert len(self.order) == self._count == len(blocks)
    encoded = EncodedTotals()
    for block in blocks:
        slot = self._slot(block)
        loss = block.loss_in(self.index)
        encoded.count(block, loss, 1)
        assert slot.size_bytes == (block.size_bytes if loss is None or loss.encoding is None else loss.encoding.size_bytes)
        assert self._slabs is None or self._by_slot.get(slot.index) is block
        assert self.order.holds(block, slot.group)
    assert encoded == self.encoded
    total_bytes = self.tier.used_bytes + self.tier.quarantined_bytes + self.tier.free_bytes
    assert total_bytes == self.tier.capacity_bytes
    leaving: dict[str, int] = {}
    assert self.demoting_blocks == sum(block.demoted_from == self.index for block in blocks)
    for block in blocks:
        if block.demoted_from == self.index:
            leaving[block.tenant] = leaving.get(block.tenant, 0) + block.size_bytes
    assert self.demoting_bytes == sum(leaving.values())
    check(self.limits, leaving)
    check(self.slab_limits)


@check.register
def _tier_limits(self: TierLimits, leaving: Mapping[str, int]) -> None:
    """Assert that demotions are counted and tenants over quota known; `leaving` are the demoting bytes by tenant."""
    assert self._demoting_bytes == leaving
    assert {tenant for tenant in self._tier.tenant_bytes if self.is_above(tenant)} <= self.over_quota


@check.register
def _slab_limits(self: SlabLimits) -> None:
    """Assert that tenants with too many are known."""
    assert {tenant for tenant in self.held() if self.is_above(tenant)} <= self.over_quota


@check.register
def _open_puts(self: OpenPuts) -> None:
    """Assert that both indexes agree, that no key or number has two puts, and that every open put will expire."""
    assert all(self._writers.values())
    writers = {put for of_tenant in self._writers.values() for put in of_tenant.values()}
    of_batches = [put for batch in self._expiry if isinstance(batch, OpenBatch) for put in batch.puts]
    assert writers == set(self._puts.values()) <= {*self._expiry, *of_batches}
    assert set(self._batches.values()) <= set(self._expiry)
    assert all(self._of_owner.values())
    owned = [(owner, number, one) for owner, of_owner in self._of_owner.items() for number, one in of_owner.items()]
    assert {number: one for _, number, one in owned} == self._puts | self._batches
    assert all(one.owner is owner for owner, _, one in owned)
    assert list(self._batches) == sorted(self._batches) == [batch.first_id for batch in self._batches.values()] == self._first_ids
    assert all(0 < len(of_tenant) <= MAX_WHOLE for of_tenant in self._of_tenant.values())
    assert sorted(first for of_tenant in self._of_tenant.values() for first in of_tenant) == self._first_ids
    names = [(put.block.tenant, put.block.key) for put in writers]
    names += [(block.tenant, block.key) for batch in self._batches.values() for block in batch.blocks]
    assert len(names) == len(set(names)) == len(self)
    assert len(self) == len({*self._puts, *(put_id for batch in self._batches.values() for put_id in batch.ids)})


@check.register
def _ended_puts(self: EndedPuts) -> None:
    """Assert that only what is written from another host is waited for."""
    assert all(put.grant is not None for put in self._revoking)


@check.register
def _block_rows(self: BlockRows) -> None:
    """Assert that every row is free, a block's, or still to be used."""
    check(self.columns)
    assert all(FIRST_ROW <= row < self._made <= len(self.columns) for row in self.columns.free)


@check.register
def _slab_index(self: SlabIndex) -> None:
    """Assert that the counts are right."""
    found = {number: sum(block is not None for block in blocks) for number, blocks in self._slabs.items()}
    assert self._counts == found
    assert 0 not in found.values()


@check.register
def _block_table(self: BlockTable) -> None:
    """Assert that slots, orders and blocks agree."""
    check(self._visible)
    check(self.copies)
    check(self.puts)
    check(self._ended)
    check(self.ahead)
    check(self.uncommitted)
    check(self.holds)
    assert self.evictor.under_way >= sum(block.moving for block in self.blocks()), "more of blocks that are gone meanwhile"


@check.register
def _uncommitted(self: UncommittedBlocks) -> None:
    """Assert that every block is in exactly one state, and every wait has something to wait for."""
    known = set(self.blocks())
    to_claim = [block for waiting in self._unsent.values() for block in waiting]
    assert all(self._unsent.values())
    assert len(to_claim) == len(set(to_claim))
    assert not set(to_claim) & set(self._deferred)
    assert set(to_claim) | set(self._deferred) <= known
    assert all(self._in_flight.values())
    assert all(self.is_commit_in_flight(block.tenant, block.key) for block in known - set(to_claim) - set(self._deferred))
    for block in known:
        assert block.generation == UNCOMMITTED
        assert not block.is_dropped
    assert all(self._waits.values())
    for tenant, waits in self._waits.items():
        oldest = next(iter(self._numbers[tenant].values()))
        assert oldest <= waits[0].newest
        assert all(before.newest <= after.newest for before, after in pairwise(waits))


@check.register
def _visible_blocks(self: VisibleBlocks) -> None:
    """Assert that they are counted right and found under their keys."""
    assert all(self._blocks.values())
    assert self._count == sum(1 for _ in self)
    assert all(self.find(block.tenant, block.key) is block for block in self)


@check.register
def _read_turns(self: ReadLimiter) -> None:
    """Assert that the peers' bytes add up."""
    assert self.held_bytes == sum(self._of_peer.values())
    assert all(held > 0 for held in self._of_peer.values())


@check.register
def _growth(self: IndexGrowth) -> None:
    """Assert that each block says where it is, and that both show the same as far as they do."""
    new, old = shown(self._new), shown(self.old)
    assert all(block.index_entry == entry for entry, block in new.items())
    assert all(self._is_in_new(block) or block.index_entry == entry for entry, block in old.items())
    if self._is_copied:
        assert all(entry >= self._next for entry in old)


def shown(self: SharedIndexTable) -> "dict[int, Block]":
    """By entry, all that it shows, after having asserted that entries, tags and blocks agree."""
    found = {entry: block for entry in range(self.entries) if (block := self.block_at(entry)) is not None}
    assert self.count == len(found)
    sequences = self._rows[:, SEQUENCE]
    assert sorted(found) == np.flatnonzero((sequences != 0) & (sequences & np.uint64(1) == 0)).tolist()
    assert all(entry < self.used for entry in found)
    assert not found.keys() & set(self._free)
    assert len(set(self._free)) == len(self._free)
    places = self._positions[list(found)]
    assert sorted(places.tolist()) == np.flatnonzero(self._tag_column).tolist()
    assert self._number_column[places].tolist() == list(found)
    for entry, block in found.items():
        assert self._rows[entry, KEY:].tobytes() == block.key.ljust(self.max_key_bytes, b"\0")
        assert int(self._tag_column[self._positions[entry]]) == tag_of(hash_of(block.key))
    rows = self._rows[list(found)]
    assert self.is_ordered or np.array_equal(rows[:, CHECK], checks_of(rows))
    return found


@check.register
def _shown_index(self: SharedIndexTable) -> None:
    """Assert that it shows each block once, and the block says where."""
    assert all(block.index_entry == entry for entry, block in shown(self).items())


@check.register
def _shared_index(self: SharedIndexWriter) -> None:
    """Each index is whole."""
    for of_tenant in self._tenants.values():
        check(of_tenant.growth or of_tenant.index)
