"""Promises of block.py: which copy a reader gets, and the tag by which a durable tier remembers a block."""

import pytest

from kvstore.protocol.errors import ProtocolError
from kvstore.protocol.wire import Writer
from kvstore.store.blocks.block import DRAM, HBM, LOSSY_TAG_VERSION, NVME, Block, Loss, from_recovered
from kvstore.tiers.tier import Recovered, Slot
from kvstore.tiers.value_codec import Encoding

SLOT = Slot(7, 1, 100)


def block_in(*tiers: int) -> Block:
    block = Block("red", b"key", 100, 5, "ns", b"parent", checksum=9)
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


def test_a_block_comes_back_from_its_tag() -> None:
    block = block_in(NVME)
    found = from_recovered(Recovered(SLOT, checksum=9, tag=block.tag()))
    assert (found.tenant, found.key, found.generation, found.namespace, found.parent) == ("red", b"key", 5, "ns", b"parent")
    assert (found.size_bytes, found.checksum, found.slots) == (100, 9, (None, None, SLOT))


def test_a_tag_with_every_field_at_its_longest_is_within_its_bound() -> None:
    block = Block("t" * 128, b"k" * 255, 1, 2**64 - 1, "n" * 255, b"p" * 255)
    assert len(block.tag()) <= 1100
    assert from_recovered(Recovered(SLOT, 0, block.tag())).generation == 2**64 - 1
    assert len(block.tag(Loss(2**64 - 1))) <= 1150


def test_the_last_releases_tag_is_read_and_still_written_for_whatever_is_stored_as_it_was_put() -> None:
    tag = Writer().u8(1).u64(5).text("red").blob(b"key").text("ns").blob(b"parent").done()
    assert block_in(NVME).tag() == tag
    assert from_recovered(Recovered(SLOT, 9, tag)).generation == 5


@pytest.mark.parametrize("encoding", [Encoding(100, 60, 480), None], ids=["encoded", "came back from an encoded copy"])
def test_a_block_whose_copy_gives_other_bytes_comes_back_as_what_was_put_with_what_its_copy_gives(encoding: Encoding | None) -> None:
    block = block_in(NVME)
    block.size_bytes = 200 if encoding is not None else 100
    block.set_loss(NVME, Loss(77, encoding))
    found = from_recovered(Recovered(SLOT, checksum=12345, tag=block.tag(block.loss_in(NVME))))
    assert (found.size_bytes, found.checksum) == (block.size_bytes, 9), "its identity, not that of the bytes on the disk"
    assert found.loss_in(NVME) == Loss(77, encoding)
    assert (found.checksum_in(NVME), found.checksum_in(DRAM)) == (77, 9)
    found.check_integrity()


@pytest.mark.parametrize(("size_bytes", "elements"), [(200, 0), (100, 5), (99, 0)], ids=["of nothing", "no smaller", "larger"])
def test_a_tag_that_does_not_fit_its_slot_is_refused(size_bytes: int, elements: int) -> None:
    block = Block("red", b"key", size_bytes, 1)
    with pytest.raises(ProtocolError, match=f"of {size_bytes} bytes has 100 bytes"):
        from_recovered(Recovered(SLOT, 0, block.tag(Loss(7, Encoding(100, 60, elements)))))


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


@pytest.mark.parametrize("tag", [b"", Writer().u8(LOSSY_TAG_VERSION + 1).done(), Block("red", b"key", 1, 1).tag() + b"x"])
def test_a_tag_of_another_form_is_refused(tag: bytes) -> None:
    with pytest.raises(ProtocolError):
        from_recovered(Recovered(SLOT, 0, tag))


def test_blocks_are_told_apart_by_identity() -> None:
    one, other = block_in(), block_in()
    assert one != other
    assert len({one, other}) == 2
