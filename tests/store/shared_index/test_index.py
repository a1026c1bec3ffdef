"""Tests of index.py with the client's reader (client/local/shared_index.py) on its own mapping: added keys are found,
removed ones are not, and no reader accepts another block's bytes."""

import os
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.client.local.shared_index import SharedIndexReader
from kvstore.protocol.errors import Broken
from kvstore.protocol.shared_index import (
    _FACTORS,
    AT_KEY_WORDS,
    AT_SETS,
    KEY_WORDS,
    MASK,
    MAX_KEY_BYTES,
    WAYS,
    hash_of,
    index_bytes,
    key_words_for,
    tag_of,
    words_of,
)
from kvstore.store.block_table.block import NOT_INDEXED, Block
from kvstore.store.shared_index.index import SharedIndexTable
from tests.store.integrity import check, shown
from tests.store.made import made
from tests.store.tables import Found, find, still

SETS = 8


def block(key: bytes, generation: int = 1) -> Block:
    return made("red", key, 100 + generation, generation)


def view_of(index: SharedIndexTable) -> SharedIndexReader:
    fd = index.export()
    try:
        return SharedIndexReader(fd, index.size_bytes, is_ordered=False)
    finally:
        os.close(fd)


@pytest.fixture
def index() -> Iterator[SharedIndexTable]:
    index = SharedIndexTable(SETS, is_ordered=False)
    yield index
    check(index)
    index.close()


@pytest.fixture
def wide() -> Iterator[SharedIndexTable]:
    index = SharedIndexTable(SETS, key_words=KEY_WORDS[-1], is_ordered=False)
    yield index
    check(index)
    index.close()


def test_keys_of_all_lengths_are_distinguished(wide: SharedIndexTable) -> None:
    index = wide
    keys = [b"\0" * length for length in range(1, MAX_KEY_BYTES + 1)]
    view = view_of(index)
    for key in keys:
        shown = block(key)
        index.add(shown, len(key), 0, 0)
        for other in (one for one in keys if one != key):
            assert find(view, other) is None
            assert not view.exist_batch(words_of([other], len(other)), len(other)).any()
        found = find(view, key)
        assert found is not None
        assert found.offset == len(key)
        index.remove(shown)


def test_a_removed_entry_is_not_found_and_fails_validation(index: SharedIndexTable) -> None:
    shown = block(b"key")
    index.add(shown, 0, 0, 0)
    view = view_of(index)
    found, batch = find(view, b"key"), view.find_batch(words_of([b"key"], 3), 3)
    assert found is not None
    assert still(view, found)
    assert view.validate_batch(batch).all()
    index.remove(shown)
    assert shown.index_entry == NOT_INDEXED
    assert find(view, b"key") is None
    assert not still(view, found)
    assert not view.validate_batch(batch).any()
    index.add(shown, 0, 0, 0)
    assert not still(view, found)
    assert not view.validate_batch(batch).any()


def test_remove_all_equals_single_removals(index: SharedIndexTable) -> None:
    one_by_one = SharedIndexTable(index.sets, is_ordered=False)
    blocks = [[block(b"key-%d" % number) for number in range(40)] for _ in range(2)]
    for which, of_index in zip((index, one_by_one), blocks, strict=True):
        for one in of_index:
            which.add(one, 0, 1, 1)
    index.remove_all(blocks[0][5:30])
    for one in blocks[1][5:30]:
        one_by_one.remove(one)
    for which in (index, one_by_one):
        check(which)
    assert shown(index).keys() == shown(one_by_one).keys()
    assert [one.index_entry for one in blocks[0]] == [one.index_entry for one in blocks[1]]
    assert (index._rows == one_by_one._rows).all()
    one_by_one.close()


@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("key_bytes", [1, 5, 16, MAX_KEY_BYTES])
def test_add_all_equals_single_additions(key_bytes: int, is_ordered: bool) -> None:
    at_once, each = (SharedIndexTable(16 * SETS, key_words=key_words_for(key_bytes), number=3, is_ordered=is_ordered) for _ in range(2))
    views = [view_of(at_once), view_of(each)] if not is_ordered else []
    for turn in range(3):
        count = min(50, 250 // key_bytes + 30)
        keys = [(turn * count + i).to_bytes(2, "big")[-key_bytes:].rjust(key_bytes, b"k") for i in range(count)]
        blocks = [[block(key, turn + 1) for key in keys] for _ in range(2)]
        for ours in blocks:
            for i, one in enumerate(ours):
                one.checksum = 7 * i
        offsets, slots = [64 * i for i in range(count)], [3 * i for i in range(count)]
        assert at_once.add_all(blocks[0], offsets, slots) == []
        for i, one in enumerate(blocks[1]):
            each.add(one, offsets[i], one.checksum, slots[i])
        assert [one.index_entry for one in blocks[0]] == [one.index_entry for one in blocks[1]]
        for view in views:
            assert [find(view, key) for key in keys] == [find(views[0], key) for key in keys]
        assert np.array_equal(at_once._rows, each._rows)
        assert np.array_equal(at_once._tag_column, each._tag_column)
        assert np.array_equal(at_once._number_column, each._number_column)
        for index, ours in zip((at_once, each), blocks, strict=True):
            for one in ours[::2] if turn < 2 else ours:
                index.remove(one)
        check(at_once)
        check(each)
    at_once.close()
    each.close()


def test_keys_with_equal_hashes_are_distinguished(index: SharedIndexTable) -> None:
    """Collisions of the multilinear hash can be constructed."""
    low, high = _FACTORS[:2]
    step = low * pow(high, -1, 1 << 64)
    keys = [b"".join((word & MASK).to_bytes(8, "little") for word in (5 + i, 7 - i * step)) for i in range(3)]
    assert len({hash_of(key) for key in keys}) == 1
    for i, key in enumerate(keys):
        index.add(block(key), 64 * i, 0, i)
    view = view_of(index)
    words = words_of(keys, 16)
    batch = view.find_batch(words, 16)
    assert batch.which.tolist() == np.flatnonzero(view.exist_batch(words, 16)).tolist() == [0]
    assert batch.offsets.tolist() == [0]
    assert [found and found.offset for found in (find(view, key) for key in keys)] == [0, None, None]


def test_a_key_in_two_entries_is_found_correctly(index: SharedIndexTable) -> None:
    moving, present, absent = b"m" * 16, b"p" * 16, b"a" * 16
    for slot, key in enumerate((moving, present)):
        index.add(block(key), 64 * slot, 0, slot)
    view, hashed = view_of(index), hash_of(moving)
    of_set = (hashed >> index._shift) * WAYS
    free = of_set + int(np.flatnonzero(index._tag_column[of_set : of_set + WAYS] == 0)[-1])
    index._tag_column[free], index._number_column[free] = tag_of(hashed), 0
    batch = view.find_batch(words_of([moving, present, absent], 16), 16)
    assert (batch.which.tolist(), batch.offsets.tolist()) == ([0, 1], [0, 64])
    index._tag_column[free] = 0


def test_stale_or_invalid_access_words_are_ignored(index: SharedIndexTable) -> None:
    shown = block(b"key")
    index.add(shown, 0, 0, 0)
    view = view_of(index)
    [word] = view.access_words(view.find_batch(words_of([b"key"], 3), 3)).tolist()
    assert index.accessed(word) is shown
    assert index.accessed(word + (2 << 32)) is None
    assert index.accessed(word | 0xFFFF_FFFF) is None
    index.remove(shown)
    assert index.accessed(word) is None


def test_the_exported_index_is_read_only(index: SharedIndexTable) -> None:
    fd = index.export()
    try:
        with pytest.raises(OSError, match=r"not permitted|denied|Bad file"):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(OSError, match=r"not permitted|Invalid"):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def test_a_malformed_index_is_refused(index: SharedIndexTable) -> None:
    fd = index.export()
    try:
        with pytest.raises(Broken, match="form"):
            SharedIndexReader(fd, 4096)
        with pytest.raises(Broken, match="map"):
            SharedIndexReader(fd, index.size_bytes * 1000)
        for word, wrong, right in ((AT_SETS, SETS + 1, SETS), (AT_SETS, 2 * SETS, SETS), (AT_KEY_WORDS, 3, 2), (AT_KEY_WORDS, 4, 2)):
            index._words[word] = wrong
            with pytest.raises(Broken, match="form"):
                SharedIndexReader(fd, index.size_bytes)
            index._words[word] = right
    finally:
        os.close(fd)
    assert index_bytes(SETS, KEY_WORDS[0]) == index.size_bytes


@pytest.mark.promise("shm-reads-whole")
class Interleaved(RuleBasedStateMachine):
    """A writer with few slots and few keys, a reader in the middle of several reads: what the reader accepts is the key's value, whole.

    A slot's bytes are its block's generation, many times over; a write of a slot takes two steps, as does a reader's copy.
    """

    SLOTS, SLOT_BYTES = 3, 64

    def __init__(self) -> None:
        super().__init__()
        self.index = SharedIndexTable(1, is_ordered=False)
        self.view = view_of(self.index)
        self.slots = [bytearray(self.SLOT_BYTES) for _ in range(self.SLOTS)]
        self.shown: dict[int, Block] = {}
        self.half_written: dict[int, Block] = {}
        self.reads: list[tuple[bytes, Found, int, bytearray]] = []
        self.generation = 0

    def teardown(self) -> None:
        self.index.close()

    @rule(slot=st.integers(0, SLOTS - 1), key=st.integers(0, 3))
    def begin_to_write(self, slot: int, key: int) -> None:
        """Reuse a slot: its former block is removed first, and so is the key's older version."""
        for other, one in list(self.shown.items()):
            if other == slot or one.key == b"key-%d" % key:
                if one.index_entry != NOT_INDEXED:
                    self.index.remove(one)
                del self.shown[other]
        self.half_written = {at: one for at, one in self.half_written.items() if one.key != b"key-%d" % key}
        self.generation += 1
        self.half_written[slot] = block(b"key-%d" % key, self.generation)
        half = self.SLOT_BYTES // 2
        self.slots[slot][:half] = bytes([self.generation % 251]) * half

    @precondition(lambda self: self.half_written)
    @rule(data=st.data())
    def finish_writing(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.half_written)))
        written = self.half_written.pop(slot)
        self.slots[slot][self.SLOT_BYTES // 2 :] = bytes([written.generation % 251]) * (self.SLOT_BYTES // 2)
        self.index.add(written, slot * self.SLOT_BYTES, written.generation % 251, slot)
        self.shown[slot] = written

    @precondition(lambda self: self.half_written)
    @rule()
    def finish_all_writing(self) -> None:
        written, self.half_written = self.half_written, {}
        for slot, one in written.items():
            self.slots[slot][self.SLOT_BYTES // 2 :] = bytes([one.generation % 251]) * (self.SLOT_BYTES // 2)
            one.checksum = one.generation % 251
        slots = list(written)
        assert self.index.add_all(list(written.values()), [slot * self.SLOT_BYTES for slot in slots], slots) == []
        self.shown.update(written)

    @precondition(lambda self: self.shown)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        one = self.shown.pop(data.draw(st.sampled_from(sorted(self.shown))))
        if one.index_entry != NOT_INDEXED:
            self.index.remove(one)

    @rule(key=st.integers(0, 3))
    def begin_to_read(self, key: int) -> None:
        found = find(self.view, b"key-%d" % key)
        current = next((one for one in self.shown.values() if one.key == b"key-%d" % key), None)
        assert (found is not None) == (current is not None and current.index_entry != NOT_INDEXED)
        if found is not None:
            assert current is not None
            half = self.SLOT_BYTES // 2
            copied = bytearray(self.slots[found.slot][:half])
            self.reads.append((current.key, found, current.generation, copied))

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def finish_reading(self, data: st.DataObject) -> None:
        key, found, generation, copied = self.reads.pop(data.draw(st.integers(0, len(self.reads) - 1)))
        copied += self.slots[found.slot][self.SLOT_BYTES // 2 :]
        if still(self.view, found):
            assert bytes(copied) == bytes([generation % 251]) * self.SLOT_BYTES
            assert self.shown[found.slot].key == key

    @invariant()
    def is_whole(self) -> None:
        check(self.index)


TestInterleaved = Interleaved.TestCase
TestInterleaved.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.promise("shm-reads-whole")
@pytest.mark.parametrize("stores", range(8))
def test_a_writer_that_died_mid_update_leaves_no_wrong_entry(stores: int) -> None:
    """Its last stores are missing: the entry has an odd sequence, part of its body, or no tag."""
    index = SharedIndexTable(1, is_ordered=False)
    view = view_of(index)
    old, new = block(b"old"), block(b"new", 2)
    index.add(old, 11, 0, 0)
    at, count, place = index._entries + old.index_entry * index._entry_words, index._entry_words, int(index._positions[old.index_entry])
    before = index._words[at : at + count].tolist()
    tag = index._tags[place]
    index.remove(old)
    index.add(new, 22, 0, 0)
    after = index._words[at : at + count].tolist()
    # As it was when `stores` words of the new body had come: the sequence is still odd.
    index._words[at] = before[0] + 1
    for word in range(1, count):
        index._words[at + word] = after[word] if word <= stores else before[word]
    for name in (b"old", b"new"):
        assert find(view, name) is None
    # And one that says that it is whole, and is not: only the check tells.
    index._words[at] = before[0] + 2
    index._tags[place], index._numbers[place] = tag, old.index_entry if old.index_entry != NOT_INDEXED else new.index_entry
    found = find(view, b"old")
    assert found is None or index._words[at + 1 : at + count].tolist() == before[1:]
