"""Promises of slots_ahead.py: one slot a writer at most, which counts as used, and goes back unless it is being written."""

from collections.abc import Callable, Sequence

import pytest

from kvstore.store.block_table.free_slots import IDLE_NS, MAX_SHARE
from tests.store.integrity import check
from tests.store.tables import Store

MakeStore = Callable[..., Store]
DRAM_BYTES = 100 * 4 * MAX_SHARE
"""Four slots ahead of 100 bytes."""


class PageInMemory:
    """A page of which the test is the writer."""

    def __init__(self) -> None:
        self.number = 0
        self.writing = 0

    def offer(self, number: int, slab: int, offset: int, size_bytes: int, slabs_ahead: Sequence[int] = ()) -> None:
        self.number = number

    def clear(self) -> None:
        self.number = 0

    def withdraw(self, number: int) -> bool:
        return self.writing != number


@pytest.fixture
def store(make_store: MakeStore) -> Store:
    return make_store(DRAM_BYTES)


def opened(store: Store, owner: str, page: PageInMemory | None = None, *, size: int = 100, now_ns: int = 0) -> int:
    """The number of the slot, 0 if there is none."""
    ahead = store.table.ahead.open(owner, "red", size, page or PageInMemory(), now_ns=now_ns)
    return 0 if ahead is None else ahead.number


def test_a_slot_is_its_owners_and_counts_as_used(store: Store) -> None:
    ahead = store.table.ahead
    number = opened(store, "one")
    assert ahead.of("one", number) is not None
    assert ahead.of("one", number + 1) is None
    assert ahead.of("two", number) is None
    assert (len(ahead), ahead.bytes, store.dram.used_bytes, store.dram.tenant_bytes["red"]) == (1, 100, 100, 100)


def test_the_end_of_the_owner_gives_it_back_even_in_the_midst_of_writing(store: Store) -> None:
    page = PageInMemory()
    page.writing = opened(store, "one", page)
    store.table.forget_owner("one")
    store.table.forget_owner("never had one")
    assert (len(store.table.ahead), store.dram.used_bytes) == (0, 0)


def test_slot_of_an_ended_connection_stays_while_its_writer_writes(store: Store) -> None:
    page = PageInMemory()
    page.writing = opened(store, "one", page)
    assert store.table.may_write("one")
    assert store.dram.used_bytes == 100
    page.writing = 0
    assert not store.table.may_write("one")
    assert (len(store.table.ahead), store.dram.used_bytes) == (0, 0)
    assert not store.table.may_write("never had one")


def test_an_idle_one_goes_back(store: Store) -> None:
    opened(store, "one", now_ns=5)
    opened(store, "two", now_ns=6)
    store.table.expire(now_ns=IDLE_NS + 4)
    assert len(store.table.ahead) == 2
    store.table.expire(now_ns=IDLE_NS + 5)
    assert (len(store.table.ahead), store.table.ahead.taken_back, store.dram.used_bytes) == (1, 1, 100)


def test_one_that_is_being_written_stays(store: Store) -> None:
    page = PageInMemory()
    page.writing = number = opened(store, "one", page)
    store.table.expire(now_ns=10 * IDLE_NS)
    assert not store.table.ahead.take_back()
    assert store.table.ahead.of("one", number) is not None
    page.writing = 0
    assert store.table.ahead.take_back()
    assert (len(store.table.ahead), store.table.ahead.taken_back) == (0, 1)


def test_all_together_take_a_sixteenth_at_most(store: Store) -> None:
    assert all(opened(store, f"{number}") for number in range(4))
    assert not opened(store, "one more")
    assert opened(store, "0"), "in place of its own"
    check(store.table)
