"""Tests of table.py with values encoded on their way to NVMe, over real tiers and codecs: space, identity, and equal
bytes at each read."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xxhash

from kvstore.kvcache.codecs.schemes import NONE
from kvstore.kvcache.codecs.tensor_value import encode_value
from kvstore.store.block_table.block import DRAM, HBM, NVME, Block
from kvstore.store.storage import readable_blocks
from kvstore.tiers.value_codec import make_codec
from tests.store.integrity import check
from tests.store.tables import Store, value_of
from tests.store.tensors import SHAPE, after, is_raw, tensor_value

MakeStore = Callable[..., Store]
SIZE = len(tensor_value(0))


def demote(store: Store, *blocks: Block) -> None:
    for block in blocks:
        store.table.evictor.evict(block, store.table._ingest_tier)
    store.settle()


def promote(store: Store, block: Block) -> None:
    """Read it from NVMe into DRAM, as the node does."""
    slot = store.table.begin_promotion(block)
    source = block.nvme
    assert slot is not None
    assert source is not None
    assert store.tiers[NVME].read_batch_into([source], [store.dram.view(slot)]) == [None]
    store.table.finish_move(block, NVME, DRAM, slot, is_done=True, loss=block.loss_of_copy(NVME))
    check(store.table)


def digest(value: bytes) -> int:
    return xxhash.xxh3_64_intdigest(value)


def test_a_promoted_lossy_block_is_not_encoded_again(make_store: MakeStore) -> None:
    value = tensor_value(1)
    store = make_store(2 * SIZE, nvme_bytes=1 << 20, codec="fp8-head")
    block = store.put_tensor("a", value)
    demote(store, block)
    promote(store, block)
    assert store.bytes_of(block, DRAM) == store.bytes_of(block, NVME) == after("fp8-head", value)
    assert block.checksum_in(DRAM) == block.checksum_in(NVME) == digest(after("fp8-head", value))
    assert store.table.evictor.evict(block, store.table._ingest_tier), "at once: its encoded copy is still there"
    assert block.tier_mask() == 4
    assert block.loss_in(DRAM) is None


@pytest.mark.promise("codec-bounded")
@pytest.mark.parametrize("then", ["int8", "int4/16"])
def test_an_encoded_block_never_changes_again(make_store: MakeStore, then: str) -> None:
    """If encoding it again would change it, as with the codec of another run, it is stored raw."""
    value = tensor_value(1)
    store = make_store(2 * SIZE, nvme_bytes=1 << 20, codec="int8")
    block = store.put_tensor("a", value)
    demote(store, block)
    first = store.bytes_of(block, NVME)
    store.codec = make_codec(then)
    for _ in range(3):
        promote(store, block)
        store.table.copies.drop_copy(block, NVME)
        demote(store, block)
        if then != "int8" and block.tier_mask() == 2:
            assert block.stays_raw
            demote(store, block)
        assert block.tier_mask() == 4
        assert store.bytes_of(block, NVME) == first == after("int8", value)
    loss = block.loss_in(NVME)
    assert loss is not None
    assert (loss.encoding is not None) == (then == "int8")
    nvme = store.tiers[NVME]
    assert (nvme.used_bytes == nvme.slot_bytes(SIZE)) == (then != "int8")


def test_readers_get_the_exact_value_while_dram_has_it(make_store: MakeStore) -> None:
    value = tensor_value(1)
    store = make_store(2 * SIZE, nvme_bytes=1 << 20, hbm_bytes=2 * SIZE, codec="fp8-head")
    block = store.put_tensor("a", value)
    block.pinned = True
    store.table.evictor._plan_move(block, store.table._ingest_tier, store.table._levels[NVME])
    store.settle()
    assert block.tier_mask() == 6
    assert store.bytes_of(block, DRAM) == value
    assert block.checksum_in(DRAM) == digest(value)
    block.hits = 9
    store.table.evictor.promote_to_hbm(block)
    store.settle()
    store.table.copies.drop_copy(block, DRAM)
    assert store.bytes_of(block, HBM) == value
    assert (block.checksum_in(HBM), block.checksum_in(NVME)) == (digest(value), digest(after("fp8-head", value)))
    store.table.copies.drop_copy(block, NVME)
    assert not block.lossy


@pytest.mark.promise("codec-bounded")
def test_values_that_the_codec_refuses_are_stored_raw(make_store: MakeStore) -> None:
    store = make_store(8 * SIZE, nvme_bytes=1 << 20, codec="int4/32")
    infinite = torch.zeros(SHAPE)
    infinite[0, 0, 0, 3, 4] = float("inf")
    plain = store.put("plain", 5000)
    quantised = store.put_tensor("quantised", tensor_value(1, scheme="int8"))
    uncut = store.put_tensor("uncut", tensor_value(1))
    lost = store.put_tensor("lost", bytes(encode_value(infinite.repeat(1, 1, 1, 2, 1), NONE)))
    demote(store, plain, quantised, uncut, lost)
    assert (lost.tier_mask(), lost.stays_raw) == (2, True), "what its numbers are is seen by the codec only"
    demote(store, lost)
    assert store.bytes_of(plain, NVME) == value_of(plain)
    for block in (quantised, uncut, lost):
        assert store.bytes_of(block, NVME) == store.value_of(block)
    assert not any(block.lossy for block in store.table.blocks())
    assert store.table.encoded(NVME).elements == 0


@pytest.mark.parametrize("codec", ["fp8-head", "int2/16", "none"])
def test_encoded_blocks_survive_a_restart_with_any_codec(make_store: MakeStore, tmp_path: Path, codec: str) -> None:
    store = make_store(8 * SIZE, nvme_bytes=1 << 20, codec="int8")
    lossy = store.put_tensor("lossy", tensor_value(1, dtype="float16"))
    demote(store, lossy)
    promote(store, lossy)
    store.table.copies.drop_copy(lossy, NVME)
    demote(store, lossy)
    encoded, plain = store.put_tensor("encoded", tensor_value(2)), store.put("plain", 900)
    demote(store, lossy, encoded, plain)
    was = {block.key: (block.size_bytes, block.checksum, block.generation, block.lossy) for block in store.table.blocks()}
    gave = {block.key: store.bytes_of(block, NVME) for block in store.table.blocks()}
    totals = store.table.encoded(NVME)
    store.tiers[NVME].close()
    again = make_store(8 * SIZE, nvme_bytes=1 << 20, codec=codec)
    assert again.table.recover(readable_blocks(again.tiers[NVME], again.table.rows)) == 3
    check(again.table)
    assert {block.key: (block.size_bytes, block.checksum, block.generation, block.lossy) for block in again.table.blocks()} == was
    assert again.table.encoded(NVME) == totals
    for block in list(again.table.blocks()):
        assert again.bytes_of(block, NVME) == gave[block.key]
        promote(again, block)
        again.table.copies.drop_copy(block, NVME)
        for _ in range(2):
            demote(again, block)
        assert (block.tier_mask(), again.bytes_of(block, NVME)) == (4, gave[block.key])
    assert is_raw(gave[b"encoded"] or b"")
