"""Tests of table.py over real tiers: visibility, evictions, and which slots may be reused."""

from collections.abc import Callable

import pytest

from kvstore.protocol.catalog_messages import EVENT_COMMIT, EVENT_REMOVED
from kvstore.store.block_table.block import DRAM, NVME
from kvstore.store.block_table.quotas import TABLE_BYTES
from kvstore.store.storage import readable_blocks
from tests.store.integrity import check
from tests.store.tables import PUT_TTL_NS, Store, value_of

MakeStore = Callable[..., Store]


def kinds(store: Store) -> list[tuple[int, str, int]]:
    """The events since the last call, as (kind, key, tier mask)."""
    said = [(kind, block.key.decode(), mask) for kind, block, mask in store.events]
    store.events.clear()
    return said


# --- puts ---


@pytest.mark.promise("no-partial-blocks")
def test_a_block_is_invisible_until_its_commit(make_store: MakeStore) -> None:
    store = make_store()
    put = store.open("a")
    assert put is not None
    assert store.table.find("red", b"a") is None
    assert store.table.puts.of_key("red", b"a") is put
    block = store.commit(put)
    assert store.table.find("red", b"a") is block
    assert store.table.find("blue", b"a") is None
    assert store.table.puts.of_key("red", b"a") is None
    assert store.bytes_of(block, DRAM) == value_of(block)
    assert kinds(store) == [(EVENT_COMMIT, "a", 2)]


def test_a_block_that_is_not_here_can_be_retracted(make_store: MakeStore) -> None:
    store = make_store()
    put = store.open("a")
    assert put is not None
    store.table.abort(put)
    store.table.retract(put.block, 42)
    assert kinds(store) == [(EVENT_REMOVED, "a", 0)]
    assert put.block.generation == 42


@pytest.mark.promise("slots-not-reused-early")
def test_an_expired_puts_slot_is_kept_until_its_writer_ends(make_store: MakeStore) -> None:
    store = make_store(200)
    put = store.open("a", owner="slow")
    store.put("b")
    assert put is not None
    assert store.table.expire(now_ns=PUT_TTL_NS - 1) == 0
    assert store.table.expire(now_ns=PUT_TTL_NS) == 1
    assert not store.table.puts.holds(put)
    assert store.table.puts.of_key("red", b"a") is None
    other = store.open("a", owner="quick", now_ns=PUT_TTL_NS)
    assert other is not None
    assert other.slot.index != put.slot.index
    assert store.open("c", owner="quick", now_ns=PUT_TTL_NS) is None
    store.table.forget_owner("slow")
    assert store.open("c", owner="quick", now_ns=PUT_TTL_NS) is not None


@pytest.mark.promise("slots-not-reused-early")
@pytest.mark.parametrize("ending", ["aborted", "expired", "its writer is gone"])
def test_a_remotely_written_slot_is_kept_until_writes_end(make_store: MakeStore, ending: str) -> None:
    store = make_store(100)
    put, writer = store.open_remote("a", owner="far")
    writer.begin()
    if ending == "aborted":
        store.table.abort(put)
    elif ending == "expired":
        assert store.table.expire(now_ns=PUT_TTL_NS) == 1
    else:
        store.table.forget_owner("far")
    assert writer.is_revoked
    assert store.table.puts.of_key("red", b"a") is None, "another may write the key"
    store.table.expire(now_ns=PUT_TTL_NS)
    assert store.open("b", now_ns=PUT_TTL_NS) is None
    assert store.dram.quarantined_bytes == 100
    writer.scribble()
    writer.end()
    assert store.table.expire(now_ns=PUT_TTL_NS) == 0
    assert store.dram.quarantined_bytes == 0
    assert store.try_put("b") is not None


# --- reads ---


def test_a_put_waits_while_all_blocks_are_pinned_or_read(make_store: MakeStore) -> None:
    store = make_store(200)
    pinned, read = store.put("a"), store.put("b")
    pinned.pinned = True
    store.table.copies.acquire(read)
    assert store.open("c") is None
    store.table.copies.release(read)
    assert store.open("c") is not None
    assert store.names() == "a"


# --- groups ---


def test_slabs_that_cannot_be_emptied_are_not_evicted_from(make_store: MakeStore) -> None:
    """A lease in every slab of the others: evicting their other blocks would free no slab."""
    store = make_store(4 * 400, slab_bytes=400)
    blocks = [store.put(f"{number:02}") for number in range(16)]
    for leased in blocks[::4]:
        store.table.copies.acquire(leased)
    assert store.open("big", 300) is None
    assert len(list(store.table.blocks())) == 16
    store.table.copies.release(blocks[8])
    assert store.open("big", 300) is not None
    assert [block.key for block in store.table.blocks()] == [b"%02d" % number for number in (*range(8), *range(12, 16))]


def test_memory_follows_the_load_a_slab_at_a_time(make_store: MakeStore) -> None:
    store = make_store(4 * 1000, slab_bytes=1000)
    for number in range(30):
        store.put(f"old{number}", 100)
    for number in range(200):
        store.put(f"new{number}", 100, tenant="blue")
        assert sum(block.tenant == "red" for block in store.table.blocks()) % 10 == 0, "whole slabs change hands"
    assert sum(block.tenant == "red" for block in store.table.blocks()) == 0
    assert sum(block.tenant == "blue" for block in store.table.blocks()) == 40


# --- the whole ---


def test_recovery_keeps_the_higher_generation_of_a_key(make_store: MakeStore) -> None:
    store = make_store(100, nvme_bytes=1000)
    blocks = [store.block(name) for name in ("a", "b", "a", "b")]
    for block in blocks:
        block.set_slot(NVME, store.tiers[NVME].allocate(100))
    assert store.table.recover([blocks[0], blocks[3], blocks[2], blocks[1]]) == 2
    assert set(store.table.blocks()) == {blocks[2], blocks[3]}
    assert store.tiers[NVME].used_bytes == 200


@pytest.mark.promise("tenant-isolation")
def test_blocks_of_many_small_tenants_stay_while_space_is_free(make_store: MakeStore) -> None:
    """Many more tenants than whole slabs: each has slabs of its own, which other tenants may not map."""
    store = make_store(64 << 20)
    blocks = [store.put("only", 1024, tenant=f"tenant {number}") for number in range(300)]
    assert [block.is_dropped for block in blocks] == [False] * 300
    assert all(store.bytes_of(block, DRAM) == store.value_of(block) for block in blocks)
    assert len({store.dram.locate(slot)[0] for block in blocks if (slot := block.dram) is not None}) == 300
    check(store.table)


# --- the table's own memory ---


@pytest.mark.promise("space-accounted")
def test_at_the_block_limit_the_coldest_block_is_evicted(make_store: MakeStore) -> None:
    store = make_store(100_000, max_blocks=3)
    for name in "abc":
        store.put(name)
    store.read("red", b"a", 0)
    store.put("d", tenant="blue")
    assert store.names() == "acd"
    assert store.table.table_bytes == 3 * TABLE_BYTES
    assert [counts.evictions for _, _, counts, _ in store.table.levels()] == [1]


@pytest.mark.promise("space-accounted")
def test_recovery_keeps_the_newest_up_to_the_block_limit(make_store: MakeStore) -> None:
    store = make_store(1000, nvme_bytes=10_000)
    for name in "abcd":
        store.table.evictor.evict(store.put(name), store.table._ingest_tier)
        store.settle()
    store.tiers[NVME].close()
    again = make_store(1000, nvme_bytes=10_000, max_blocks=2)
    assert again.table.recover(readable_blocks(again.tiers[NVME], again.table.rows)) == 2
    assert again.names() == "cd"


@pytest.mark.promise("last-replica-last")
def test_secondary_copies_are_evicted_first(make_store: MakeStore) -> None:
    store = make_store(400, slab_bytes=400)
    blocks = [store.put(name) for name in "abcd"]
    store.table.mark_secondary("red", [b"c", b"d", b"absent"])
    store.table.mark_secondary("blue", [b"a"])
    assert store.table.secondary_blocks == 2
    store.table.hit(blocks[2])
    for name in "ef":
        store.put(name)
    assert store.names() == "abef", "d is the secondary copy read longest ago"
    [(_, _, counts, _)] = store.table.levels()
    assert store.table.secondary_bytes == 200
    assert counts.by_reason() == {"room": 0, "worth": 0, "secondary": 2, "table": 0, "quota": 0}
    store.table.mark_secondary("red", [b"b"])
    assert store.table.evictor.free_at_once(store.table.lowest, 100, "red", 2)
    assert counts.by_reason()["secondary"] == 3
    assert counts.evictions == 4


def test_secondary_copies_are_dropped_instead_of_demoted(make_store: MakeStore) -> None:
    store = make_store(400, nvme_bytes=5000, slab_bytes=400)
    for name in "abcd":
        store.put(name)
    store.table.mark_secondary("red", [b"d"])
    store.put("e")
    assert store.names() == "abce"
    assert store.table.evictor.take_moves() == []


def test_copies_that_are_primary_again_keep_their_value(make_store: MakeStore) -> None:
    store = make_store(400, slab_bytes=400)
    for name in "abcd":
        store.put(name)
    store.table.mark_secondary("red", [b"c", b"d"])
    store.table.mark_primary("red", [b"d", b"a", b"absent"])
    store.table.mark_primary("blue", [b"c"])
    assert store.table.primary_again == 1
    for name in "ef":
        store.put(name)
    assert store.names() == "bdef", "c is secondary, then a was read longest ago"


def test_a_copy_below_a_promoted_one_stays_secondary(make_store: MakeStore) -> None:
    store = make_store(400, nvme_bytes=400, slab_bytes=400)
    block = store.put("a")
    store.table.evictor.evict(block, store.table._ingest_tier)
    store.settle()
    slot = store.table.begin_promotion(block)
    assert slot is not None
    store.table.finish_move(block, NVME, DRAM, slot, is_done=True)
    nvme = store.table._levels[NVME].order
    store.table.mark_secondary("red", [b"a"])
    store.table.mark_primary("red", [b"a"])
    assert nvme.early_victim(block.group_in(NVME), lambda _block: True) is block
    assert store.table._ingest_tier.order.early_victim(block.group_in(DRAM), lambda _block: True) is None


def test_a_copy_marked_while_it_is_demoted_is_evicted_first(make_store: MakeStore) -> None:
    store = make_store(400, nvme_bytes=400, slab_bytes=400)
    block = store.put("a")
    store.table.evictor.evict(block, store.table._ingest_tier)
    store.table.mark_secondary("red", [b"a"])
    store.settle()
    assert block.tiers() == (NVME,)
    assert store.table.lowest.order.early_victim(block.group_in(NVME), lambda _block: True) is block


def test_a_promoted_secondary_copy_is_evicted_first_and_forgotten(make_store: MakeStore) -> None:
    """Also once its copy below has left."""
    store = make_store(400, nvme_bytes=400, slab_bytes=400)
    block = store.put("a")
    store.table.evictor.evict(block, store.table._ingest_tier)
    store.settle()
    store.table.mark_secondary("red", [b"a"])
    slot = store.table.begin_promotion(block)
    assert slot is not None
    store.table.finish_move(block, NVME, DRAM, slot, is_done=True)
    store.table.copies.drop_copy(block, NVME)
    assert store.table._ingest_tier.order.early_victim(block.group_in(DRAM), lambda _block: True) is block
    store.table.forget_secondary(lambda _key: True)
    store.table.expire(now_ns=0)
    assert not block.is_secondary


def test_secondary_copies_in_use_stay(make_store: MakeStore) -> None:
    store = make_store(300, slab_bytes=300)
    first, second = store.put("a"), store.put("b")
    store.put("c")
    store.table.mark_secondary("red", [b"a", b"b"])
    store.table.copies.acquire(first)
    second.pinned = True
    store.put("d")
    assert store.names() == "abd"
    store.table.copies.release(first)
    store.put("e")
    assert store.names() == "bde"
