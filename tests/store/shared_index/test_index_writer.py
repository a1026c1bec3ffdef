"""Tests of index_writer.py: clients see their tenant's blocks only, including earlier ones, and never a reused slot."""

import os
from collections.abc import Iterator

import pytest
import xxhash

from kvstore.client.local.reader_slots import LocalReaderSlots
from kvstore.client.local.shared_index import SharedIndexReader
from kvstore.protocol.event_messages import READ, FetchEvents
from kvstore.protocol.shared_index import ACCESSES, WAYS
from kvstore.store.block_table.block import DRAM, Block
from kvstore.store.block_table.uncommitted import UNCOMMITTED
from kvstore.store.shared_index.index import FIRST_SETS
from kvstore.store.shared_index.index_writer import MAX_ACCESSES_PER_STEP, MIN_BATCH, MIN_BATCH_LIMIT
from kvstore.store.shared_index.reader_slots import ReaderSlots
from tests.store.integrity import check
from tests.store.made import made
from tests.store.tables import MAX_HAZARD_NS, MAX_HOLD_NS, Store, value_of

SIZE = 100


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store(1 << 20)
    yield store
    check(store.table)
    check(store.shared_index)
    store.close()


def test_a_client_finds_earlier_and_later_blocks(store: Store) -> None:
    before = store.put("before")
    client = store.client()
    after = store.put("after")
    assert [client.read(name) for name in ("before", "after", "never")] == [value_of(before), value_of(after), None]


@pytest.mark.promise("tenant-isolation")
def test_tenants_have_indexes_of_their_own(store: Store) -> None:
    red, blue = store.client("red", "one"), store.client("blue", "two")
    store.put("key", tenant="red")
    assert red.find("key") is not None
    assert blue.find("key") is None


def test_a_grown_index_keeps_the_clients_reader_slots(store: Store) -> None:
    client = store.client()
    count = 0
    while not client.index.is_over:
        store.put(f"b{count}", 16)
        count += 1
    assert count <= FIRST_SETS * WAYS
    store.shared_index.heartbeat(1)
    of_larger = store.client()
    assert all(of_larger.find(f"b{i}") is not None for i in range(count)), "those, too, that the smaller one had no place for"
    again = store.client()
    assert not again.index.is_over
    assert again.find("b0") is not None
    assert again.find(f"b{count - 1}") is not None
    hazard = again.look("b0")
    assert hazard is not None
    assert client.desk._words.obj is not again.desk._words.obj
    assert store.shared_index.is_protected("red", slot_of(store, "b0").index)


@pytest.mark.promise("no-partial-blocks")
def test_clients_find_exactly_the_blocks_during_growth(store: Store) -> None:
    client = store.client()
    there: dict[str, Block] = {}
    indexes = {id(client.index): client.index}
    for i in range(4000):
        there[f"b{i}"] = store.put(f"b{i}", 16)
        if i % 3 == 0 and f"b{i // 2}" in there:
            store.table.copies.drop(there.pop(f"b{i // 2}"))
        if i % 5 == 0:
            name = f"b{i // 3}"
            if name in there:
                store.table.copies.drop(there.pop(name))
            there[name] = store.put(name, 16)
        if i % 50 == 0:
            store.shared_index.heartbeat(i)
            check(store.shared_index)
            for name in [f"b{j}" for j in range(i % 97, i, 97)]:
                assert client.read(name) in (None, value_of(there[name]) if name in there else None)
            if client.index.is_over:
                client = store.client()
                indexes[id(client.index)] = client.index
    while store.shared_index.heartbeat(1):
        pass
    client = store.client()
    assert len(indexes) > 1
    assert all(client.read(name) == value_of(block) for name, block in there.items())


def put_batch(store: Store, names: list[str], size_bytes: int = 16) -> list[Block]:
    """As a batch that was written through shared memory is put."""
    puts = []
    for name in names:
        put = store.table.open(made("red", name.encode(), size_bytes, UNCOMMITTED), "writer", now_ns=0)
        assert put is not None
        store.write(put)
        puts.append(put)
    store.table.store_all_uncommitted(puts, [xxhash.xxh3_64_intdigest(store.value_of(put.block)) for put in puts])
    return [put.block for put in puts]


@pytest.mark.parametrize("count", [1, MIN_BATCH, MIN_BATCH_LIMIT + 3, 4 * MIN_BATCH_LIMIT])
def test_batches_of_any_size_are_added_during_growth(store: Store, count: int) -> None:
    client = store.client()
    for turn in range(3):
        names = [f"{turn}-{number:05d}" for number in range(count)]
        blocks = put_batch(store, names)
        check(store.shared_index)
        while store.shared_index.heartbeat(1):
            pass
        if client.index.is_over:
            client = store.client()
        assert [client.read(name) for name in names] == [value_of(block) for block in blocks]
    check(store.table)


def slot_of(store: Store, name: str):  # type: ignore[no-untyped-def]
    block = store.table.find("red", name.encode())
    assert block is not None
    slot = block.dram
    assert slot is not None
    return slot


def test_local_reads_are_accesses(store: Store) -> None:
    client = store.client()
    block = store.put("key")
    for _ in range(3):
        client.read("key")
    assert not store.shared_index.take_accesses(store.table.record_local_reads, "blue")
    assert block.hits == 0
    assert not store.shared_index.take_accesses(store.table.record_local_reads)
    assert block.hits == 3


def test_local_reads_are_recorded_with_lost_ones_counted(store: Store) -> None:
    client, asker = store.client(), object()
    store.put("a")
    store.put("b")
    events = store.table.events
    begun = events.answer(asker, "red", FetchEvents(0, 100)).next_cursor
    client.read("b")
    client.read("a")
    store.shared_index.take_accesses(store.table.record_local_reads, "red")
    recorded = events.answer(asker, "red", FetchEvents(begun, 100))
    assert (bytes(recorded.kinds), recorded.keys, recorded.lost) == (bytes([READ]), [b"b", b"a"], 0)
    found = client.find("a")
    assert found is not None
    for _ in range(ACCESSES + 7):
        client.count(found)
    while store.shared_index.take_accesses(store.table.record_local_reads):
        pass
    cursor, lost, read = recorded.next_cursor, 0, 0
    while (batch := events.answer(asker, "red", FetchEvents(cursor, 4096))).keys or batch.lost:
        cursor, lost, read = batch.next_cursor, lost + batch.lost, read + len(batch.keys)
    assert (lost, read) == (7, ACCESSES)
    hits = next(counts.hits for index, _, counts, _ in store.table.levels() if index == DRAM)
    assert hits == ACCESSES + 9


def test_the_accesses_of_many_clients_are_counted_in_steps(store: Store) -> None:
    clients = [store.client(owner=number) for number in range(8)]
    block, counted = store.put("key"), list[int]()
    for client in clients:
        found = client.find("key")
        assert found is not None
        for _ in range(MAX_ACCESSES_PER_STEP):
            client.count(found)

    def note(tenant: str, blocks: list[Block], uncounted: int) -> None:
        assert set(blocks) == {block}
        counted[-1] += len(blocks)

    is_more = True
    while is_more:
        counted.append(0)
        is_more = store.shared_index.take_accesses(note)
    assert max(counted) <= MAX_ACCESSES_PER_STEP
    assert sum(counted) == len(clients) * MAX_ACCESSES_PER_STEP


@pytest.mark.promise("shm-reads-whole")
def test_a_protected_block_is_not_evicted() -> None:
    store = Store(300)
    client = store.client()
    for name in ("a", "b", "c"):
        store.put(name)
    look = client.look("a")
    assert look is not None
    store.put("d")
    assert [store.table.find("red", name) is not None for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    client.desk.release_hazard(look[1])
    store.put("e")
    assert store.table.find("red", b"a") is None
    store.close()


def test_hazards_are_read_a_few_times_per_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(100 * 100)
    client = store.client()
    for number in range(100):
        store.put(f"a{number}")
    look = client.look("a0")
    assert look is not None
    looked = list[ReaderSlots]()
    looks = ReaderSlots.hazards

    def count(desk: ReaderSlots) -> list[int]:
        looked.append(desk)
        return looks(desk)

    monkeypatch.setattr(ReaderSlots, "hazards", count)
    slots = store.table.slots.free_slots("red", 100, 60)
    assert len(slots) == 60
    assert store.table.find("red", b"a0") is not None
    assert len(looked) < 10
    store.table.slots.free(slots)
    store.close()


@pytest.mark.promise("shm-reads-whole")
def test_a_protected_slot_keeps_its_bytes_until_released() -> None:
    store = Store(300)
    client = store.client()
    block = store.put("a")
    look = client.look("a")
    assert look is not None
    memory, hazard = look
    store.table.copies.drop(block)
    assert len(store.shared_index._kept) == 1
    assert store.dram.quarantined_bytes == 100
    for name in ("b", "c", "d", "e"):
        store.put(name)
    store.shared_index.release_unprotected()
    assert bytes(memory) == value_of(block)
    client.desk.release_hazard(hazard)
    store.shared_index.release_unprotected()
    assert (len(store.shared_index._kept), store.dram.quarantined_bytes) == (0, 0)
    store.close()


def test_a_client_with_a_stalled_hazard_is_disconnected() -> None:
    store = Store(300)
    stopped, other = store.client(owner="stopped"), store.client(owner="other")
    looks = []
    for name in ("a", "b", "c"):
        store.put(name)
        looks.append(stopped.look(name))
    assert all(looks)
    assert store.try_put("d") is None
    store.shared_index.heartbeat(MAX_HAZARD_NS)
    store.shared_index.release_unprotected()
    assert store.try_put("d") is None
    store.shared_index.heartbeat(MAX_HAZARD_NS + 1)
    store.shared_index.release_unprotected()
    assert (stopped.desk.is_over, other.desk.is_over) == (True, False)
    store.put("d")
    store.close()


def test_successive_hazards_are_not_one_stalled_hazard() -> None:
    store = Store(100)
    client = store.client()
    store.put("a")
    for now_ns in range(0, 3 * MAX_HAZARD_NS, 1000):
        look = client.look("a")
        assert look is not None
        store.shared_index.heartbeat(now_ns)
        assert store.try_put("b") is None
        store.shared_index.release_unprotected()
        client.desk.release_hazard(look[1])
    assert not client.desk.is_over
    store.close()


def test_a_closed_connection_protects_nothing(store: Store) -> None:
    client = store.client(owner="one")
    block = store.put("a")
    look = client.look("a")
    assert look is not None
    store.table.copies.drop(block)
    store.shared_index.forget_owner("another")
    assert len(store.shared_index._kept) == 1
    store.shared_index.forget_owner("one")
    assert (len(store.shared_index._kept), store.dram.quarantined_bytes) == (0, 0)
    assert client.desk.is_over


def test_attach_returns_two_descriptors_owned_by_the_caller(store: Store) -> None:
    before = len(os.listdir("/proc/self/fd"))
    sizes, fds = store.shared_index.attach("one", "red", list)
    views = SharedIndexReader(fds[0], sizes.sizes[0]), LocalReaderSlots(fds[1], sizes.sizes[1])
    for fd in fds:
        os.close(fd)
    store.shared_index.forget_owner("one")
    assert views[0].is_over
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_victim_search_applies_recorded_holds_first() -> None:
    store = Store(10 * SIZE, slab_bytes=SIZE)
    client = store.client()
    for number in range(10):
        store.put(f"a{number}", SIZE)
    assert client.hold(["a0", "never"], 1, MAX_HOLD_NS) == ["a0"]
    for number in range(9):
        store.put(f"b{number}", SIZE)
    assert (client.find("a0") is not None, client.find("a9"), client.desk.unheld) == (True, None, 0)
    assert client.desk.release(1)
    store.put("c", SIZE)
    assert client.find("a0") is None
    store.close()


def test_holds_recorded_during_growth_are_applied() -> None:
    store = Store(1 << 20)
    client = store.client()
    first = store.put("a0", 16)
    client.hold(["a0"], 1, 1000)
    for number in range(1, 2000):
        store.put(f"a{number}", 16)
        if number == 1800:
            assert not first.hold_bits
            client.hold(["a0"], 2, 1000)
    while store.shared_index.heartbeat(1):
        pass
    assert (bool(first.hold_bits), len(store.holds)) == (True, 2)
    store.table.expire(now_ns=1000)
    assert (bool(first.hold_bits), len(store.holds)) == (False, 0)
    store.close()
