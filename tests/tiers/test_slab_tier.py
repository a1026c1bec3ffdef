"""What dram and hbm share: sizes of slabs, and a capacity that is one."""

import os

import numpy as np
import pytest

from kvstore.protocol.errors import ConfigError, StaleHandle
from kvstore.tiers.dram import DramTier
from kvstore.tiers.slab_tier import (
    FIRST_SLABS_A_TIER,
    MAX_SLABS_A_TIER,
    PAGE_BYTES,
    SLAB_BYTES,
    SLABS_A_TIER,
    SlabTier,
    chosen_first_bytes,
    chosen_slab_bytes,
)
from kvstore.tiers.slabs import slab_number_of


@pytest.fixture
def tier() -> SlabTier:
    return DramTier(10 * PAGE_BYTES, slab_bytes=4 * PAGE_BYTES)


@pytest.mark.parametrize(
    ("capacity_bytes", "slab_bytes"),
    [
        (1, PAGE_BYTES),
        (SLABS_A_TIER * PAGE_BYTES * 3 + 17, PAGE_BYTES * 3),
        (SLABS_A_TIER * SLAB_BYTES, SLAB_BYTES),
        (MAX_SLABS_A_TIER * SLAB_BYTES, SLAB_BYTES),
        (MAX_SLABS_A_TIER * SLAB_BYTES + 1, SLAB_BYTES + PAGE_BYTES),
        (1 << 40, 1 << 32),
    ],
)
def test_slabs_are_whole_pages_neither_few_nor_many(capacity_bytes: int, slab_bytes: int) -> None:
    assert chosen_slab_bytes(None, capacity_bytes) == slab_bytes
    assert chosen_slab_bytes(12345, capacity_bytes) == 12345


@pytest.mark.parametrize(("slab_bytes", "capacity_bytes"), [(None, 0), (None, -1), (0, 100), (-1, 100)])
def test_sizes_under_one_cannot_be_met(slab_bytes: int | None, capacity_bytes: int) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        chosen_slab_bytes(slab_bytes, capacity_bytes)


def test_what_tenants_have_and_what_one_more_slot_takes_is_told(tier: SlabTier) -> None:
    tier.allocate(PAGE_BYTES, tenant="red")
    assert tier.tenant_bytes == {"red": PAGE_BYTES}
    assert tier.slot_bytes(PAGE_BYTES, tenant="blue") == PAGE_BYTES


def test_in_how_many_slabs_tenants_have_slots_and_whether_one_more_takes_another_is_told(tier: SlabTier) -> None:
    tier.allocate(100, tenant="red")
    assert tier.tenant_slabs == {"red": 1}
    assert tier.needs_slab(50, tenant="red")
    assert tier.needs_slab(100, tenant="blue")


def test_a_cold_groups_slab_can_be_taken_slot_by_slot(tier: SlabTier) -> None:
    cold = [tier.allocate(PAGE_BYTES, tenant="red") for _ in range(10)]
    assert tier.reclaimable(tier.group(PAGE_BYTES, tenant="red")) == 10
    assert tier.reclaimable(tier.group(2 * PAGE_BYTES, tenant="blue")) == 0
    mates = [slot for slot in cold if slab_number_of(slot) == slab_number_of(cold[0])]
    assert tier.slab_used(cold[0]) == len(mates)
    assert tier.slab_value_bytes(cold[0]) == len(mates) * PAGE_BYTES
    tier.free_batch(mates)
    newcomer = tier.allocate(2 * PAGE_BYTES, tenant="blue")
    assert newcomer.group == tier.group(2 * PAGE_BYTES, tenant="blue")
    assert (tier.used_bytes, tier.quarantined_bytes, tier.free_bytes) == (8 * PAGE_BYTES, 0, 2 * PAGE_BYTES)
    tier.check_integrity()
    tier.close()


def test_a_quarantined_slot_counts_until_its_release(tier: SlabTier) -> None:
    slot = tier.allocate(PAGE_BYTES)
    tier.quarantine(slot)
    assert (tier.used_bytes, tier.quarantined_bytes) == (0, PAGE_BYTES)
    tier.release(slot)
    assert tier.free_bytes == tier.capacity_bytes
    tier.close()


def test_the_rest_of_a_slab_is_unused(tier: SlabTier) -> None:
    first = tier.allocate(PAGE_BYTES, tenant="red")
    found = tier.allocate_unused(PAGE_BYTES, tenant="red", count=2)
    assert [slot.index for slot in found] == [first.index + 1, first.index + 2]
    assert tier.used_bytes == 3 * PAGE_BYTES
    tier.close()


def test_a_slab_reserved_ahead_is_the_next_one_used(tier: SlabTier) -> None:
    group = tier.group(PAGE_BYTES)
    assert tier.reserve_slabs(group, 1) == [0]
    assert tier.reserve_slabs(group, 1) == [0], "it has one"
    assert tier.allocate(PAGE_BYTES).group == group
    tier.close()


def test_the_first_slab_of_a_group_is_a_small_part_of_a_tier() -> None:
    assert chosen_first_bytes(12345, 1 << 30) == 12345
    assert chosen_first_bytes(None, 1 << 30) == (1 << 30) // FIRST_SLABS_A_TIER
    assert chosen_first_bytes(None, 1) == PAGE_BYTES


def test_a_tier_holds_few_values_of_each_of_many_tenants_in_few_descriptors() -> None:
    before = len(os.listdir("/proc/self/fd"))
    tier = DramTier(64 << 20)
    for tenant in range(300):
        tier.allocate(1024, tenant=f"tenant {tenant}")
    tier.check_integrity()
    assert len(os.listdir("/proc/self/fd")) - before <= 2 * (300 + SLABS_A_TIER + 10)
    tier.close()


def test_slots_are_freed_one_by_one_and_many_at_once(tier: SlabTier) -> None:
    slots = [tier.allocate(PAGE_BYTES, tenant="red") for _ in range(4)]
    tier.free(slots[0])
    tier.free_batch(slots[1:])
    assert tier.free_bytes == tier.capacity_bytes
    tier.check_integrity()


def test_slots_are_freed_by_their_indexes_and_generations(tier: SlabTier) -> None:
    slots = [tier.allocate(PAGE_BYTES) for _ in range(3)]
    indexes = np.array([slot.index for slot in slots[:2]], np.int64)
    generations = np.array([slot.generation for slot in slots[:2]], np.uint64)
    tier.free_places(indexes, generations)
    tier.check_integrity()
    assert tier.used_bytes == PAGE_BYTES
    with pytest.raises(StaleHandle):
        tier.free(slots[0])


def test_a_slab_that_is_being_emptied_gives_out_no_slot(tier: SlabTier) -> None:
    slot = tier.allocate(100, tenant="red")
    tier.close_slab(slab_number_of(slot))
    assert tier.needs_slab(100, tenant="red")
    tier.open_slab(slab_number_of(slot))
    assert not tier.needs_slab(100, tenant="red")
