"""Promises of job.py: what is written of a copy, and when nothing is. More of them, on real copies: test_table_encoded.py."""

from collections.abc import Callable

import pytest
import xxhash

from kvstore.store.blocks.block import DRAM, HBM, NVME, Block
from kvstore.store.blocks.columns import Loss
from kvstore.store.blocks.room import TierMove
from kvstore.store.blocks.tags import from_recovered, tag_of
from kvstore.store.moves.mover import MoveJob
from kvstore.tiers.tier import Recovered, Slot
from kvstore.tiers.value_codec import ValueCodec, make_codec
from tests.store.made import ROWS
from tests.store.tables import Store, value_of
from tests.store.tensors import after, tensor_value

MakeStore = Callable[..., Store]
VALUE = tensor_value(1)


def job_of(store: Store, block: Block) -> MoveJob:
    """A copy of the block from DRAM to NVMe, encoded if it can be."""
    encoding = store._encoding(block) if store.codec is not None else None
    slot = block.dram
    assert slot is not None
    target = Slot(1, 1, block.size_bytes if encoding is None else encoding.size_bytes)
    return MoveJob(TierMove(block, DRAM, NVME, target, encoding), slot, store.dram)


def test_what_is_not_encoded_is_written_from_its_slot_under_the_blocks_checksum(make_store: MakeStore) -> None:
    store = make_store(1000)
    block = store.put("a")
    record = job_of(store, block).record()
    assert (record.data, record.checksum, record.tag) == (value_of(block), block.checksum, tag_of(block))


def test_what_is_encoded_is_written_under_its_own_checksum_with_the_blocks_in_its_tag(make_store: MakeStore) -> None:
    store = make_store(1 << 20, codec="int8")
    block = store.put_tensor("a", VALUE)
    job = job_of(store, block)
    assert store.codec is not None
    job.encode(store.codec)
    assert job.is_good
    record = job.record()
    assert len(record.data) == record.slot.size_bytes < block.size_bytes
    assert record.checksum == xxhash.xxh3_64_intdigest(record.data)
    found = from_recovered(Recovered(record.slot, record.checksum, record.tag), ROWS)
    assert (found.size_bytes, found.checksum) == (block.size_bytes, block.checksum)
    assert found.loss_in(NVME) == job.loss == Loss(xxhash.xxh3_64_intdigest(after("int8", VALUE)), job.move.encoding)


@pytest.mark.parametrize("tier", [DRAM, HBM, NVME])
def test_a_block_with_a_lossy_copy_is_encoded_only_into_what_that_one_gives(make_store: MakeStore, tier: int) -> None:
    store = make_store(1 << 20, codec="int8")
    block = store.put_tensor("a", VALUE)
    assert store.codec is not None
    for checksum, is_good in ((7, False), (xxhash.xxh3_64_intdigest(after("int8", VALUE)), True)):
        block.set_loss(tier, Loss(checksum))
        job = job_of(store, block)
        job.encode(store.codec)
        assert job.is_good is is_good
    block.set_loss(tier, None)


def test_a_codec_that_fails_refuses_the_value_and_says_so(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_codec: ValueCodec, _value: memoryview) -> None:
        raise RuntimeError("out of memory")

    store = make_store(1 << 20, codec="int8")
    job = job_of(store, store.put_tensor("a", VALUE))
    monkeypatch.setattr(ValueCodec, "encode", fail)
    codec = make_codec("int8")
    assert codec is not None
    job.encode(codec)
    assert (job.is_refused, job.is_good) == (True, False)
    assert "out of memory" in caplog.text
