"""Tests of index_growth.py: at any step, readers of the old or the new index find a block at its present location, or
nothing."""

import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.client.local.shared_index import SharedIndexReader
from kvstore.protocol.shared_index import KEY_WORDS, MAX_KEY_BYTES, WAYS, hash_of, words_of
from kvstore.store.block_table.block import NOT_INDEXED, Block
from kvstore.store.shared_index import index as index_module
from kvstore.store.shared_index import index_growth as growth_module
from kvstore.store.shared_index.index import PAGE_ENTRIES, SharedIndexTable
from kvstore.store.shared_index.index_growth import PART_ENTRIES, IndexGrowth
from tests.store.integrity import check
from tests.store.shared_index.test_index import block, view_of
from tests.store.tables import Found, find, still


def filled(index: SharedIndexTable, count: int) -> list[Block]:
    blocks = [block(os.urandom(16), i + 1) for i in range(count)]
    for i, one in enumerate(blocks):
        index.add(one, 64 * i, i, i)
    return [one for one in blocks if one.index_entry != NOT_INDEXED]


def of_block(view: SharedIndexReader, one: Block) -> Found:
    found = find(view, one.key)
    assert found is not None
    return found


@pytest.fixture
def old() -> Iterator[SharedIndexTable]:
    index = SharedIndexTable(4 * PAGE_ENTRIES // WAYS, is_ordered=False)
    yield index
    index.close()


@pytest.mark.promise("no-partial-blocks")
def test_growth_copies_the_index_then_empties_the_old_one(old: SharedIndexTable) -> None:
    blocks = filled(old, 5000)
    reader = view_of(old)
    before = [of_block(reader, one) for one in blocks]
    growth = IndexGrowth(old)
    steps = 0
    while growth.index is old:
        assert not reader.is_over
        assert [of_block(reader, one) for one in blocks[::100]] == before[::100]
        assert growth.step()
        steps += 1
    assert steps == -(-len(blocks) // PART_ENTRIES), "so many blocks at a time, and no more, whatever the size"
    check(growth)
    new = view_of(growth.index)
    assert reader.is_over
    assert not new.is_over
    for one, place in zip(blocks, before, strict=True):
        assert still(reader, place)
        assert of_block(new, one)[2:] == place[2:]
        assert of_block(reader, one) == place
    while growth.step():
        steps += 1
    assert steps == 2 * -(-len(blocks) // PART_ENTRIES) - 1
    assert old.count == 0
    assert not any(still(reader, place) or find(reader, one.key) for one, place in zip(blocks, before, strict=True))
    assert all(find(new, one.key) for one in blocks)
    check(growth.index)
    growth.close()


@pytest.mark.parametrize("is_full", [False, True])
def test_longer_keys_are_added_to_the_wider_index(old: SharedIndexTable, is_full: bool) -> None:
    blocks = filled(old, old.entries * 6 // 10 if is_full else 1000)
    growth = IndexGrowth(old, KEY_WORDS[-1])
    assert growth.max_key_bytes == MAX_KEY_BYTES
    long = [block(os.urandom(20 + number)) for number in range(40)]
    growth.add(long[0], 64, 7, 1)
    assert growth.add_all(long[1:2], [128], [2]) == []
    while growth.index is old:
        growth.step()
    growth.add(long[2], 64, 7, 1)
    assert growth.add_all(long[3:4], [128], [2]) == []
    view = view_of(growth.index)
    assert all(find(view, one.key) for one in (*blocks, *long[:4]))
    while growth.step():
        pass
    assert growth.index.sets == old.sets * (4 if is_full else 1)
    check(growth.index)
    growth.close()


def keys_of(count: int, *, is_crowded: bool) -> list[bytes]:
    """Keys that all belong to the first set, of however many, or to any."""
    keys = (b"key-%04d" % i for i in itertools.count())
    return list(itertools.islice((key for key in keys if (hash_of(key) >> 58 == 0) == is_crowded), count))


@pytest.mark.promise("no-partial-blocks")
class Growing(RuleBasedStateMachine):
    """A writer of few slots whose index grows repeatedly, one set at a time, and readers of every index so far, in the
    middle of reads.

    A slot's bytes are the generation of its block.
    """

    SLOTS, MAX_SETS = 40, 8
    NAMES = keys_of(30, is_crowded=True) + keys_of(10, is_crowded=False)
    KEYS = st.integers(0, len(NAMES) - 1)

    def __init__(self) -> None:
        super().__init__()
        self.index: SharedIndexTable | IndexGrowth = SharedIndexTable(1, is_ordered=False)
        self.views = [view_of(self.index)]
        """Of the index that clients are given, and before it of those that they were."""
        self.slots = [0] * self.SLOTS
        self.blocks: dict[int, tuple[Block, int]] = {}
        """By key, and in which slot."""
        self.reads: list[tuple[SharedIndexReader, Found, int, int]] = []
        self.generation = 0

    def teardown(self) -> None:
        self.index.close()

    @rule(first=KEYS, count=st.integers(1, 30))
    def put_many(self, first: int, count: int) -> None:
        for key in range(first, min(first + count, len(self.NAMES))):
            self.put(key, key)

    @rule(key=KEYS, slot=st.integers(0, SLOTS - 1))
    def put(self, key: int, slot: int) -> None:
        for other, (_, of_other) in list(self.blocks.items()):
            if other == key or of_other == slot:
                self.drop(other)
        self.generation += 1
        self.slots[slot] = self.generation
        one = block(self.NAMES[key], self.generation)
        self.index.add(one, 64 * slot, self.generation, slot)
        self.blocks[key] = one, slot

    @rule(first=KEYS, count=st.integers(1, 30))
    def put_all(self, first: int, count: int) -> None:
        """Add blocks of unused slots as a batch, then one by one those that did not fit."""
        keys = [key for key in range(first, min(first + count, len(self.NAMES))) if key not in self.blocks]
        taken = {slot for _, slot in self.blocks.values()}
        keys = [key for key in keys if key not in taken]
        if not keys:
            return
        made = []
        for key in keys:
            self.generation += 1
            self.slots[key] = self.generation
            one = block(self.NAMES[key], self.generation)
            one.checksum = self.generation
            made.append(one)
            self.blocks[key] = one, key
        for number in self.index.add_all(made, [64 * key for key in keys], keys):
            self.index.add(made[number], 64 * keys[number], made[number].generation, keys[number])

    def drop(self, key: int) -> None:
        one, _ = self.blocks.pop(key)
        if one.index_entry != NOT_INDEXED:
            self.index.remove(one)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        self.drop(data.draw(st.sampled_from(sorted(self.blocks))))

    @precondition(lambda self: isinstance(self.index, SharedIndexTable) and self.index.sets < self.MAX_SETS)
    @rule()
    def begin_to_grow(self) -> None:
        assert isinstance(self.index, SharedIndexTable)
        self.index = IndexGrowth(self.index)

    @precondition(lambda self: isinstance(self.index, IndexGrowth))
    @rule(steps=st.integers(1, 3))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            growth = self.index
            if isinstance(growth, IndexGrowth):
                before = growth.index
                if not growth.step():
                    self.index = growth.index
                if growth.index is not before:
                    self.views.append(view_of(growth.index))

    @rule(data=st.data(), key=KEYS)
    def begin_to_read(self, data: st.DataObject, key: int) -> None:
        view = data.draw(st.sampled_from(self.views[-2:]))
        found = find(view, self.NAMES[key])
        batch = view.find_batch(words_of([self.NAMES[key]], 8), 8)
        assert len(batch.which) == (found is not None)
        current = self.blocks.get(key)
        if found is None:
            if view is self.views[-1] and not isinstance(self.index, IndexGrowth):
                assert current is None or current[0].index_entry == NOT_INDEXED
            return
        assert current is not None
        assert (found.slot, found.checksum) == (current[1], current[0].generation)
        self.reads.append((view, found, current[0].generation, self.slots[found.slot]))

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def finish_reading(self, data: st.DataObject) -> None:
        view, found, generation, first_half = self.reads.pop(data.draw(st.integers(0, len(self.reads) - 1)))
        if still(view, found):
            assert first_half == self.slots[found.slot] == generation

    @invariant()
    def is_whole(self) -> None:
        check(self.index)
        shown = {one.index_entry for one, _ in self.blocks.values()} - {NOT_INDEXED}
        assert isinstance(self.index, IndexGrowth) or len(shown) == self.index.count


@pytest.fixture(autouse=True)
def a_set_at_a_time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the machine: parts of one set."""
    if request.cls is not None:
        monkeypatch.setattr(growth_module, "PART_ENTRIES", WAYS)
        monkeypatch.setattr(index_module, "PAGE_ENTRIES", 2 * WAYS)


TestGrowing: Any = Growing.TestCase
TestGrowing.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
