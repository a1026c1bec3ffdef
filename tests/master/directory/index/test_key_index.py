"""Tests of key_index.py; a state machine holds it against a dictionary."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.master.directory.index.key_index import FIRST_BUCKETS, MOVE_BATCH, SMALL_BATCH, WAYS, KeyIndex
from kvstore.master.directory.index.keys import NO_ROW, RowKeys

MANY = 3 * SMALL_BATCH


def index() -> tuple[RowKeys, KeyIndex]:
    keys = RowKeys()
    return keys, KeyIndex(keys)


def enter(keys: RowKeys, rows: KeyIndex, key: bytes) -> int:
    row = keys.append(key)
    rows.insert(key, row)
    return row


def enter_all(keys: RowKeys, rows: KeyIndex, entered: Sequence[bytes]) -> None:
    first = len(keys)
    keys.extend(entered)
    rows.insert_all(entered, np.arange(first, len(keys), dtype=np.uint32))


def numbered(begin: int, end: int) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in range(begin, end)]


def in_bucket(bucket: int, count: int) -> list[bytes]:
    """Keys that an index which has not grown puts there."""
    found: list[bytes] = []

    number = 0
    while len(found) < count:
        number += 1
        key = b"%d" % number
        if hash(key) >> 1 & FIRST_BUCKETS - 1 == bucket:
            found.append(key)
    return found


def test_a_key_is_found_in_its_row_and_no_other_key_is() -> None:
    keys, rows = index()
    assert not rows
    row = enter(keys, rows, b"a")
    assert (rows.get(b"a"), rows[b"a"], rows.get(b"b"), rows.get(b"b", 7)) == (row, row, NO_ROW, 7)
    assert b"a" in rows
    assert b"b" not in rows
    with pytest.raises(KeyError):
        rows[b"b"]
    rows.remove(b"a", row)
    assert b"a" not in rows
    assert not rows


@pytest.mark.parametrize("count", [SMALL_BATCH, MANY])
def test_a_batch_is_found_as_its_keys_one_by_one(count: int) -> None:
    keys, rows = index()
    there = numbered(0, count)
    for key in there:
        enter(keys, rows, key)
    asked = [*there, *numbered(count, 2 * count)]
    assert rows.find(asked).tolist() == [rows.get(key) for key in asked] == [*range(1, count + 1), *[NO_ROW] * count]
    assert rows.find(there).tolist() == list(range(1, count + 1))
    assert rows.find([]).tolist() == []
    new = numbered(count, 2 * count)
    assert (rows.has_any(new), rows.has_any([*new[1:], there[-1]]), rows.has_any([])) == (False, True, False)


def test_a_batch_may_have_keys_of_many_lengths_and_empty_ones() -> None:
    keys, rows = index()
    there = [b"x" * length for length in range(1, MANY)]
    enter_all(keys, rows, there)
    asked = [*there, b"", b"y", b"", b"x" * MANY]
    assert rows.find(asked).tolist() == [*range(1, MANY), 0, 0, 0, 0]
    assert rows.find([b""] * MANY).tolist() == [NO_ROW] * MANY
    rows.check_integrity()


@pytest.mark.parametrize("batch", [1, 7, 5000])
def test_it_grows_while_keys_come_and_go_and_loses_none(batch: int) -> None:
    keys, rows = index()
    count = 3 * int(MOVE_BATCH * WAYS)
    for begin in range(0, count, batch):
        part = numbered(begin, min(begin + batch, count))
        if batch == 1:
            enter(keys, rows, part[0])
        else:
            enter_all(keys, rows, part)
    rows.check_integrity()
    assert rows.find(numbered(0, count)).tolist() == list(range(1, count + 1))
    for key in numbered(0, count - 5):
        row = rows[key]
        rows.remove(key, row)
        keys.clear(row)
    assert dict(rows.items()) == {key: rows[key] for key in numbered(count - 5, count)}
    rows.check_integrity()


@pytest.mark.parametrize("order", [1, -1])
def test_more_keys_than_a_bucket_has_ways_are_found_and_leave(order: int) -> None:
    keys, rows = index()
    crowd, absent = in_bucket(3, WAYS + 4)[:-1], in_bucket(3, WAYS + 4)[-1]
    for key in crowd:
        enter(keys, rows, key)
    rows.check_integrity()
    assert [rows.get(key) for key in crowd] == list(range(1, len(crowd) + 1))
    assert rows.get(absent, 9) == 9
    asked = [*crowd, absent, *crowd]
    assert rows.find(asked).tolist() == [rows.get(key) for key in asked]
    for row, key in list(enumerate(crowd, 1))[::order]:
        rows.remove(key, row)
        assert key not in rows
        rows.check_integrity()
    assert not rows


def test_two_keys_of_one_tag_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tag has 31 bits of a hash: a pair that shares them is made by a hash of fewer bits."""
    monkeypatch.setattr("kvstore.master.directory.index.key_index.hash", lambda key: key[0], raising=False)
    keys, rows = index()
    alike = [b"a%d" % number for number in range(3)]
    for key in alike:
        enter(keys, rows, key)
    assert [rows.get(key) for key in alike] == [1, 2, 3]
    assert rows.get(b"a9", 9) == 9
    asked = [*alike, b"a9"] * SMALL_BATCH
    assert rows.find(asked).tolist() == [1, 2, 3, NO_ROW] * SMALL_BATCH
    rows.remove(b"a1", 2)
    assert [rows.get(key) for key in alike] == [1, NO_ROW, 3]


class AgainstDict(RuleBasedStateMachine):
    """Any order of inserts, of one or many, and removals leaves what a dictionary has."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.rows = index()
        self.model: dict[bytes, int] = {}
        self.next = 0

    @rule(count=st.integers(1, 300), length=st.sampled_from([4, 16]))
    def insert_all(self, count: int, length: int) -> None:
        entered = [number.to_bytes(length, "big") for number in range(self.next, self.next + count)]
        self.next += count
        self.model |= dict(zip(entered, range(len(self.keys), len(self.keys) + count), strict=True))
        enter_all(self.keys, self.rows, entered)

    @rule()
    def insert(self) -> None:
        key = b"%d" % self.next
        self.next += 1
        self.model[key] = enter(self.keys, self.rows, key)

    @rule(seed=st.integers(0, 1000), count=st.integers(1, 200))
    def remove(self, seed: int, count: int) -> None:
        for key in random.Random(seed).sample(sorted(self.model), min(count, len(self.model))):
            row = self.model.pop(key)
            self.rows.remove(key, row)
            self.keys.clear(row)

    @rule(seed=st.integers(0, 1000), count=st.integers(1, 300))
    def remove_all(self, seed: int, count: int) -> None:
        gone = random.Random(seed).sample(sorted(self.model), min(count, len(self.model)))
        rows = np.array(list(map(self.model.pop, gone)), np.uint32)
        self.rows.remove_all(gone, rows)
        self.keys.clear_all(rows)

    @invariant()
    def agrees(self) -> None:
        self.rows.check_integrity()
        assert dict(self.rows.items()) == self.model
        assert self.rows.find(list(self.model)).tolist() == list(self.model.values())


TestAgainstDict = AgainstDict.TestCase
TestAgainstDict.settings = settings(stateful_step_count=20, max_examples=30, deadline=None)
