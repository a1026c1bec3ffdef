"""Promises of block.py: which copy a reader gets, and the tag by which a durable tier remembers a block."""

import pytest

from kvstore.protocol.errors import ProtocolError
from kvstore.protocol.wire import Writer
from kvstore.store.block import DRAM, HBM, NVME, TAG_VERSION, Block, from_recovered
from kvstore.tiers.tier import Recovered, Slot

SLOT = Slot(7, 1, 100)


def block_in(*tiers: int) -> Block:
    block = Block("red", b"key", 100, 5, "ns", b"parent", checksum=9)
    for tier in tiers:
        block.slots[tier] = SLOT
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


def test_a_block_comes_back_from_its_tag() -> None:
    block = block_in(NVME)
    found = from_recovered(Recovered(SLOT, checksum=9, tag=block.tag()))
    assert (found.tenant, found.key, found.generation, found.namespace, found.parent) == ("red", b"key", 5, "ns", b"parent")
    assert (found.size_bytes, found.checksum, found.slots) == (100, 9, [None, None, SLOT])


def test_a_tag_with_every_field_at_its_longest_is_within_its_bound() -> None:
    block = Block("t" * 128, b"k" * 255, 1, 2**64 - 1, "n" * 255, b"p" * 255)
    assert len(block.tag()) <= 1100
    assert from_recovered(Recovered(SLOT, 0, block.tag())).generation == 2**64 - 1


@pytest.mark.parametrize("tag", [b"", Writer().u8(TAG_VERSION + 1).done(), Block("red", b"key", 1, 1).tag() + b"x"])
def test_a_tag_of_another_form_is_refused(tag: bytes) -> None:
    with pytest.raises(ProtocolError):
        from_recovered(Recovered(SLOT, 0, tag))


def test_blocks_are_told_apart_by_identity() -> None:
    one, other = block_in(), block_in()
    assert one != other
    assert len({one, other}) == 2
