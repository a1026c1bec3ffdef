"""Tests of tags.py: a tag restores its block."""

import pytest

from kvstore.protocol.errors import ProtocolError
from kvstore.protocol.wire import Writer
from kvstore.store.block_table.block import DRAM, NVME, Block, Loss
from kvstore.store.block_table.tags import TAG_VERSION, from_recovered, tag_of
from kvstore.tiers.tier import Recovered, Slot
from kvstore.tiers.value_codec import Encoding
from tests.store.integrity import check
from tests.store.made import ROWS, made

SLOT = Slot(7, 1, 100)


def block_in(*tiers: int) -> Block:
    block = made("red", b"key", 100, 5, "ns", b"parent", checksum=9)
    for tier in tiers:
        block.set_slot(tier, SLOT)
    return block


def test_the_form_of_a_tag() -> None:
    tag = Writer().u8(1).u8(0).u64(5).text("red").blob(b"key").text("ns").blob(b"parent").done()
    assert tag_of(block_in(NVME)) == tag
    assert from_recovered(Recovered(SLOT, 9, tag), ROWS).generation == 5


@pytest.mark.parametrize("encoding", [Encoding(100, 60, 480), None], ids=["encoded", "came back from an encoded copy"])
def test_the_tag_of_a_lossy_copy_restores_both_checksums(encoding: Encoding | None) -> None:
    block = made("red", b"key", 200 if encoding is not None else 100, 5, checksum=9)
    block.set_slot(NVME, SLOT)
    block.set_loss(NVME, Loss(77, encoding))
    found = from_recovered(Recovered(SLOT, checksum=12345, tag=tag_of(block, block.loss_in(NVME))), ROWS)
    assert (found.size_bytes, found.checksum) == (block.size_bytes, 9), "its identity, not that of the bytes on the disk"
    assert found.loss_in(NVME) == Loss(77, encoding)
    assert (found.checksum_in(NVME), found.checksum_in(DRAM)) == (77, 9)
    check(found)


@pytest.mark.parametrize(("size_bytes", "elements"), [(200, 0), (100, 5), (99, 0)], ids=["of nothing", "no smaller", "larger"])
def test_a_tag_that_does_not_fit_its_slot_is_refused(size_bytes: int, elements: int) -> None:
    block = made("red", b"key", size_bytes, 1)
    with pytest.raises(ProtocolError, match=f"of {size_bytes} bytes has a slot of 100 bytes"):
        from_recovered(Recovered(SLOT, 0, tag_of(block, Loss(7, Encoding(100, 60, elements)))), ROWS)


@pytest.mark.parametrize("tag", [b"", Writer().u8(TAG_VERSION + 1).done(), tag_of(made("red", b"key", 1, 1)) + b"x"])
def test_a_tag_of_another_form_is_refused(tag: bytes) -> None:
    with pytest.raises(ProtocolError):
        from_recovered(Recovered(SLOT, 0, tag), ROWS)
