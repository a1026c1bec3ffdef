"""Promises of block.py: which copy a reader gets."""

import pytest

from kvstore.store.blocks.block import DRAM, HBM, NVME, Block
from kvstore.store.blocks.columns import ON_HOLD, Loss
from kvstore.store.blocks.level import evictable_in
from kvstore.tiers.tier import Slot
from kvstore.tiers.value_codec import Encoding
from tests.store.made import made

SLOT = Slot(7, 1, 100)


def block_in(*tiers: int) -> Block:
    block = made("red", b"key", 100, 5, "ns", b"parent", checksum=9)
    for tier in tiers:
        block.set_slot(tier, SLOT)
    return block


@pytest.mark.parametrize(
    ("tiers", "mask", "fastest"),
    [((), 0, None), ((NVME,), 4, NVME), ((HBM, NVME), 5, HBM), ((HBM, DRAM, NVME), 7, DRAM), ((DRAM,), 2, DRAM)],
)
def test_the_mask_names_every_copy_and_the_fastest_is_the_one_that_can_be_mapped(
    tiers: tuple[int, ...], mask: int, fastest: int | None
) -> None:
    assert block_in(*tiers).tier_mask() == mask
    assert block_in(*tiers).fastest() == fastest


def test_a_block_that_is_gone_is_in_no_tier_even_while_readers_keep_its_slots() -> None:
    block = block_in(DRAM, NVME)
    block.is_gone = True
    assert block.tier_mask() == 0


def test_a_copy_of_a_lossy_copy_is_as_lossy_and_no_more_encoded() -> None:
    block = block_in(DRAM, NVME)
    assert block.loss_of_copy(NVME) is None
    assert block.lossy_checksum() is None
    block.set_loss(NVME, Loss(77, Encoding(50, 40, 40)))
    assert block.loss_of_copy(NVME) == Loss(77)
    assert block.loss_of_copy(DRAM) is None
    block.set_loss(DRAM, block.loss_of_copy(NVME))
    block.check_integrity()
    assert (block.checksum_in(DRAM), block.lossy_checksum()) == (77, 77)
    block.set_loss(NVME, None)
    assert block.lossy
    block.set_loss(DRAM, None)
    assert not block.lossy
    assert block.checksum_in(DRAM) == 9


def test_copies_elsewhere_are_seen() -> None:
    assert block_in(DRAM, NVME).is_also_outside(DRAM)
    assert not block_in(DRAM).is_also_outside(DRAM)


def test_blocks_are_told_apart_by_identity() -> None:
    one, other = block_in(), block_in()
    assert one != other
    assert len({one, other}) == 2


def test_what_is_said_of_a_block_is_known_and_can_be_taken_back() -> None:
    block = block_in()
    for name in ("pinned", "moving", "stays_raw", "is_guest", "is_gone"):
        assert getattr(block, name) is False
        setattr(block, name, True)
        assert getattr(block, name) is True
        assert sum(getattr(block, other) for other in ("pinned", "moving", "stays_raw", "is_guest", "is_gone")) == 1
        setattr(block, name, False)
        assert getattr(block, name) is False
    for name in ("readers", "hits", "event_seq", "shown", "last_access", "generation", "checksum"):
        setattr(block, name, 12)
        assert getattr(block, name) == 12


@pytest.mark.parametrize("name", ["readers", "pinned", "moving"])
def test_a_block_is_in_use_while_it_is_read_pinned_or_copied(name: str) -> None:
    block = block_in(DRAM)
    assert evictable_in(DRAM)(block)
    setattr(block, name, 1)
    assert not evictable_in(DRAM)(block)


@pytest.mark.parametrize("tier", [HBM, DRAM, NVME])
def test_a_hold_keeps_the_copy_of_its_tier_alone(tier: int) -> None:
    block = block_in(HBM, DRAM, NVME)
    block.pinned = True
    block.hold_bits = ON_HOLD[tier]
    block.pinned = False
    assert [other for other in (HBM, DRAM, NVME) if not evictable_in(other)(block)] == [tier]
    assert block.hold_bits == ON_HOLD[tier]
    block.hold_bits = 0
    assert all(evictable_in(other)(block) for other in (HBM, DRAM, NVME))


@pytest.mark.parametrize("tier", [HBM, DRAM, NVME])
def test_a_copy_comes_and_goes_in_its_tier_alone(tier: int) -> None:
    block = block_in(*{HBM, DRAM, NVME} - {tier})
    block.set_slot(tier, Slot(9, 8, 100, 7))
    assert (block.slot_in(tier), block.slots[tier], block.group_in(tier), block.is_in(tier)) == ((9, 8, 100, 7), (9, 8, 100, 7), 7, True)
    block.set_slot(tier, None)
    assert (block.slot_in(tier), block.slots[tier], block.is_in(tier)) == (None, None, False)
    assert block.tiers() == tuple(other for other in (HBM, DRAM, NVME) if other != tier)
    assert block.is_also_outside(tier)
