"""Tests of replicated_victims.py with the evictor: replicated blocks are evicted first, unless they were read since."""

from collections.abc import Callable

import pytest

from kvstore.protocol.catalog_messages import EVENT_REMOVED
from kvstore.store.block_table.block import DRAM, Block
from kvstore.store.block_table.replicated_victims import MAX_AGE_NS, MAX_QUERY_INTERVAL, QUERY_INTERVAL, ReplicatedVictims
from tests.store.made import made
from tests.store.tables import Store

MakeStore = Callable[..., Store]
SIZE = 100


@pytest.fixture
def full(make_store: MakeStore) -> Store:
    """Ten blocks, a to j, in a tier that has room for no more; two have left it, which has made a question due."""
    store = make_store(10 * SIZE, slab_bytes=10 * SIZE)
    for name in "abcdefghij":
        store.put(name, SIZE)
    return store


def group_of(store: Store) -> int:
    [group] = store.table.lowest.replicated_victims.take_due()
    return group


def tell(store: Store, group: int, spare: str, now_ns: int = 0) -> None:
    """The master's answer about the coldest blocks, of which it names these."""
    blocks = store.table.lowest.coldest(group)
    flags = bytes(block.key.decode() in spare for block in blocks)
    store.table.lowest.replicated_victims.set_answer(group, [(block, block.last_access) for block in blocks], flags, now_ns=now_ns)


@pytest.mark.promise("last-replica-last")
def test_a_replicated_block_is_evicted_before_colder_ones(full: Store) -> None:
    full.put("k", SIZE)
    assert full.names() == "bcdefghijk", "nothing is known yet"
    tell(full, group_of(full), "fh")
    assert len(full.table.lowest.replicated_victims) == 2
    for name in "lmn":
        full.put(name, SIZE)
    assert full.names() == "cdegijklmn"
    assert [block.key for kind, block, _ in full.events if kind == EVENT_REMOVED] == [b"a", b"f", b"h", b"b"]


@pytest.mark.promise("last-replica-last")
def test_a_block_read_since_the_query_is_no_preferred_victim(full: Store) -> None:
    full.put("k", SIZE)
    tell(full, group_of(full), "cdef")
    read, pinned, gone = (full.table.find("red", key) for key in (b"c", b"d", b"e"))
    assert read is not None
    assert pinned is not None
    assert gone is not None
    full.table.hit(read)
    pinned.pinned = True
    full.table.copies.drop(gone)
    full.put("l", SIZE)
    full.put("m", SIZE)
    assert full.names() == "bcdghijklm"
    pinned.pinned = False


def block(name: str) -> Block:
    return made("red", name.encode(), SIZE, 1)


def test_victim_queries_back_off_while_no_replica_is_found() -> None:
    spares, cold = ReplicatedVictims(DRAM), [(block("a"), 0)]

    def evictions_until_due() -> int:
        count = 0
        while not (due := spares.take_due()):
            spares.next(7, lambda block: True)
            count += 1
        assert due == {7}
        assert spares.take_due() == set(), "it is asked already"
        return count

    counted = [evictions_until_due()]
    for flag in (0, 0, 1, 0):
        spares.set_answer(7, cold, bytes((flag,)), now_ns=0)
        counted.append(evictions_until_due())
    assert counted == [1, 2 * QUERY_INTERVAL, 4 * QUERY_INTERVAL, QUERY_INTERVAL, 2 * QUERY_INTERVAL]
    for _ in range(20):
        spares.set_answer(7, cold, b"\0", now_ns=0)
    assert evictions_until_due() == MAX_QUERY_INTERVAL


def test_victim_answers_expire_and_end_with_the_link() -> None:
    spares, cold = ReplicatedVictims(DRAM), [(block("a"), 0)]
    spares.next(7, lambda block: True)
    spares.expire(now_ns=5)
    spares.expire(now_ns=5 + MAX_AGE_NS)
    assert spares.take_due() == {7}, "what is due stays so"
    spares.expire(now_ns=5 + MAX_AGE_NS)
    spares.set_answer(7, cold, b"\1", now_ns=100)
    spares.expire(now_ns=99 + MAX_AGE_NS)
    assert len(spares) == 1
    spares.expire(now_ns=100 + MAX_AGE_NS)
    assert len(spares) == 0
    spares.next(7, lambda block: True)
    spares.forget()
    spares.set_answer(7, cold, b"\1", now_ns=0)
    assert (len(spares), spares.take_due()) == (0, set())
