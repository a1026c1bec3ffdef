"""Tests of free_slots.py: a writer has at most one slot ahead; it counts as used and is freed unless it is being
written."""

from collections.abc import Callable, Sequence

import pytest

from kvstore.store.block_table.free_slots import MAX_SHARE
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


def test_slot_ahead_is_kept_while_its_disconnected_writer_writes(store: Store) -> None:
    page = PageInMemory()
    page.writing = opened(store, "one", page)
    assert store.table.may_write("one")
    assert store.dram.used_bytes == 100
    page.writing = 0
    assert not store.table.may_write("one")
    assert (len(store.table.ahead), store.dram.used_bytes) == (0, 0)
    assert not store.table.may_write("never had one")


def test_slots_ahead_take_at_most_a_sixteenth_of_dram(store: Store) -> None:
    assert all(opened(store, f"{number}") for number in range(4))
    assert not opened(store, "one more")
    assert opened(store, "0"), "in place of its own"
    check(store.table)
