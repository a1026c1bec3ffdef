"""A shown index: what is shown is found, what is hidden is not, and no reader takes one block's bytes for another's whenever it looks.

The reader is the client's own (client/local/index.py), on a mapping of its own.
"""

import os
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.client.local.index import Found, IndexView
from kvstore.protocol.errors import Broken
from kvstore.protocol.shown_index import AT_SETS, MAX_KEY_BYTES, WAYS, index_bytes, words_of
from kvstore.store.blocks.block import NOT_SHOWN, Block
from kvstore.store.shown.index import FULL_SHARE, ShownIndex

SETS = 8


def block(key: bytes, generation: int = 1) -> Block:
    return Block("red", key, 100 + generation, generation)


def view_of(index: ShownIndex) -> IndexView:
    fd = index.export()
    try:
        return IndexView(fd, index.size_bytes, is_ordered=False)
    finally:
        os.close(fd)


@pytest.fixture
def index() -> Iterator[ShownIndex]:
    index = ShownIndex(SETS, is_ordered=False)
    yield index
    index.check_integrity()
    index.close()


def test_what_is_shown_is_found_with_all_that_was_said_of_it(index: ShownIndex) -> None:
    index.show(block(b"k" * 20), 7, 4096, 0xABC, 33)
    found = view_of(index).find(b"k" * 20)
    assert found is not None
    assert (found.slab, found.offset, found.size, found.checksum, found.slot) == (7, 4096, 101, 0xABC, 33)


def test_keys_of_all_lengths_are_told_apart(index: ShownIndex) -> None:
    keys = [b"\0" * length for length in range(1, MAX_KEY_BYTES + 1)]
    view = view_of(index)
    for key in keys:
        shown = block(key)
        index.show(shown, 1, len(key), 0, 0)
        for other in (one for one in keys if one != key):
            assert view.find(other) is None
            assert not view.exist_batch(words_of([other], len(other)), len(other)).any()
        found = view.find(key)
        assert found is not None
        assert found.offset == len(key)
        index.hide(shown)


def test_a_longer_key_is_not_shown(index: ShownIndex) -> None:
    long = block(b"k" * (MAX_KEY_BYTES + 1))
    index.show(long, 1, 0, 0, 0)
    assert long.shown == NOT_SHOWN
    assert index.count == 0


def test_what_is_hidden_is_not_found_and_a_reader_who_had_it_notices(index: ShownIndex) -> None:
    shown = block(b"key")
    index.show(shown, 1, 0, 0, 0)
    view = view_of(index)
    found, batch = view.find(b"key"), view.find_batch(words_of([b"key"], 3), 3)
    assert found is not None
    assert view.still(found)
    assert view.still_batch(batch).all()
    index.hide(shown)
    assert shown.shown == NOT_SHOWN
    assert view.find(b"key") is None
    assert not view.still(found)
    assert not view.still_batch(batch).any()
    index.show(shown, 1, 0, 0, 0)
    assert not view.still(found)
    assert not view.still_batch(batch).any()


def test_a_full_set_shows_the_newest_and_the_one_pushed_out_is_not_found(index: ShownIndex) -> None:
    view = view_of(index)
    blocks = [block(b"%d" % i) for i in range(4 * SETS * WAYS)]
    for one in blocks:
        index.show(one, 1, 0, 0, 0)
        assert view.find(one.key) is not None
    shown = [one for one in blocks if one.shown != NOT_SHOWN]
    assert len(shown) == index.count <= SETS * WAYS
    assert [view.find(one.key) is not None for one in blocks] == [one.shown != NOT_SHOWN for one in blocks]
    index.check_integrity()


def test_one_and_many_are_found_alike(index: ShownIndex) -> None:
    blocks = [block(b"key-%04d" % i, i) for i in range(SETS * WAYS)]
    for i, one in enumerate(blocks):
        index.show(one, i, 64 * i, i * i, i)
    view, keys = view_of(index), [one.key for one in blocks]
    words = words_of(keys, 8)
    batch, one_by_one = view.find_batch(words, 8), [view.find(key) for key in keys]
    assert batch.is_there.tolist() == view.exist_batch(words, 8).tolist() == [found is not None for found in one_by_one]
    there = [found for found in one_by_one if found is not None]
    assert batch.slabs.tolist() == [found.slab for found in there]
    assert batch.offsets.tolist() == [found.offset for found in there]
    assert batch.sizes.tolist() == [found.size for found in there]
    assert batch.checksums.tolist() == [found.checksum for found in there]
    assert [index.accessed(word) for word in view.access_words(batch).tolist()] == [one for one in blocks if one.shown != NOT_SHOWN]
    assert [index.accessed(view.access_word(found)) for found in there] == [one for one in blocks if one.shown != NOT_SHOWN]


def test_many_keys_are_looked_up_in_parts(index: ShownIndex) -> None:
    index.show(block(b"%05d" % 9999), 1, 77, 0, 0)
    keys = [b"%05d" % i for i in range(10_000)]
    words = words_of(keys, 5)
    batch = view_of(index).find_batch(words, 5)
    assert np.flatnonzero(batch.is_there).tolist() == np.flatnonzero(view_of(index).exist_batch(words, 5)).tolist() == [9999]
    assert batch.offsets.tolist() == [77]


def test_an_access_of_what_is_hidden_since_or_of_nonsense_is_nobodys(index: ShownIndex) -> None:
    shown = block(b"key")
    index.show(shown, 1, 0, 0, 0)
    view = view_of(index)
    found = view.find(b"key")
    assert found is not None
    word = view.access_word(found)
    assert index.accessed(word) is shown
    assert index.accessed(word + (2 << 32)) is None
    assert index.accessed(word | 0xFFFF_FFFF) is None
    index.hide(shown)
    assert index.accessed(word) is None


def test_a_larger_index_shows_the_same_and_the_old_one_says_that_it_is_over() -> None:
    index = ShownIndex(SETS, is_ordered=False)
    old = view_of(index)
    blocks: list[Block] = []
    while not index.is_full:
        blocks.append(block(os.urandom(20), len(blocks)))
        index.show(blocks[-1], len(blocks), 64 * len(blocks), 0, len(blocks))
    assert index.count > FULL_SHARE * SETS * WAYS
    index.beat(17)
    index.tell_slabs_gone(3)
    shown = [one for one in blocks if one.shown != NOT_SHOWN]
    found_before = {one.key: old.find(one.key) for one in shown}
    word = old.access_word(next(found for found in found_before.values() if found is not None))
    larger = index.grown()
    larger.check_integrity()
    view = view_of(larger)
    assert old.is_over
    assert not view.is_over
    assert (view.age_ns(20), view.slabs_gone) == (3, 3)
    for one in shown:
        before, now = found_before[one.key], view.find(one.key)
        assert before is not None
        assert not old.still(before)
        assert old.find(one.key) is None
        assert now is not None
        assert now[2:] == before[2:]
    assert larger.accessed(word) is None
    larger.close()


def test_nobody_can_write_what_a_reader_is_given(index: ShownIndex) -> None:
    fd = index.export()
    try:
        with pytest.raises(OSError, match=r"not permitted|denied|Bad file"):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(OSError, match=r"not permitted|Invalid"):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def test_another_form_is_refused(index: ShownIndex) -> None:
    fd = index.export()
    try:
        with pytest.raises(Broken, match="form"):
            IndexView(fd, 4096)
        with pytest.raises(Broken, match="map"):
            IndexView(fd, index.size_bytes * 1000)
        index._words[AT_SETS] = SETS + 1
        with pytest.raises(Broken, match="form"):
            IndexView(fd, index.size_bytes)
        index._words[AT_SETS] = SETS
    finally:
        os.close(fd)
    assert index_bytes(SETS) == index.size_bytes


class Interleaved(RuleBasedStateMachine):
    """A writer with few slots and few keys, a reader in the middle of several reads: what the reader accepts is the key's value, whole.

    A slot's bytes are its block's generation, many times over; a write of a slot takes two steps, as does a reader's copy.
    """

    SLOTS, SLOT_BYTES = 3, 64

    def __init__(self) -> None:
        super().__init__()
        self.index = ShownIndex(1, is_ordered=False)
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
        """Reuse a slot: whoever it showed is hidden first, and so is the key's older version."""
        for other, one in list(self.shown.items()):
            if other == slot or one.key == b"key-%d" % key:
                if one.shown != NOT_SHOWN:
                    self.index.hide(one)
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
        self.index.show(written, 0, slot * self.SLOT_BYTES, written.generation % 251, slot)
        self.shown[slot] = written

    @precondition(lambda self: self.shown)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        one = self.shown.pop(data.draw(st.sampled_from(sorted(self.shown))))
        if one.shown != NOT_SHOWN:
            self.index.hide(one)

    @rule(key=st.integers(0, 3))
    def begin_to_read(self, key: int) -> None:
        found = self.view.find(b"key-%d" % key)
        current = next((one for one in self.shown.values() if one.key == b"key-%d" % key), None)
        assert (found is not None) == (current is not None and current.shown != NOT_SHOWN)
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
        if self.view.still(found):
            assert bytes(copied) == bytes([generation % 251]) * self.SLOT_BYTES
            assert self.shown[found.slot].key == key

    @invariant()
    def is_whole(self) -> None:
        self.index.check_integrity()


TestInterleaved = Interleaved.TestCase
TestInterleaved.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("stores", range(8))
def test_a_node_that_died_in_the_middle_of_showing_shows_nothing_wrong(stores: int) -> None:
    """Its last stores never came: the entry has an odd sequence, some of its body, or no tag."""
    index = ShownIndex(1, is_ordered=False)
    view = view_of(index)
    old, new = block(b"old"), block(b"new", 2)
    index.show(old, 1, 11, 0, 0)
    at = index._entries + old.shown * 16
    before = index._words[at : at + 16].tolist()
    tag = index._words[index._tags + old.shown]
    index.hide(old)
    index.show(new, 2, 22, 0, 0)
    after = index._words[at : at + 16].tolist()
    # As it was when `stores` words of the new body had come: the sequence is still odd.
    index._words[at] = before[0] + 1
    for word in range(1, 16):
        index._words[at + word] = after[word] if word <= 2 * stores else before[word]
    for name in (b"old", b"new"):
        assert view.find(name) is None
    # And one that says that it is whole, and is not: only the check tells.
    index._words[at] = before[0] + 2
    index._words[index._tags + new.shown] = tag
    found = view.find(b"old")
    assert found is None or index._words[at + 1 : at + 16].tolist() == before[1:]
