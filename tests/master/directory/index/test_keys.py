"""Tests of keys.py."""

import random

import numpy as np
import pytest

from kvstore.master.directory.index.keys import RowKeys


def same(keys: RowKeys, rows: list[int], asked: list[bytes]) -> list[bool]:
    length = len(asked[0])
    found: list[bool] = keys.are(np.array(rows, np.uint32), np.frombuffer(b"".join(asked), f"S{length}"), length).tolist()
    return found


def test_rows_of_keys_that_left_get_others_at_once() -> None:
    keys = RowKeys()
    keys.extend([b"a", b"b", b"c", b"d", b"e"])
    for row in (2, 4, 5):
        keys.clear(row)
    keys.set_all(np.array([5, 2], np.uint32), [b"f", b"g"])
    assert [keys[row] for row in range(1, 6)] == [b"a", b"g", b"c", b"", b"f"]
    keys.check_integrity([1, 2, 3, 5])
    for row in (2, 5):
        keys.clear(row)
    keys.extend([b"of three bytes"])
    keys.clear(6)
    keys.set_all(np.array([6, 5, 4, 2], np.uint32), [b"h", b"i", b"j", b"k"])
    assert [keys[row] for row in range(1, 7)] == [b"a", b"k", b"c", b"j", b"i", b"h"], "more than there are places for"
    keys.check_integrity(range(1, 7))
    for row in (2, 4):
        keys.clear(row)
    keys.set_all(np.array([2, 4], np.uint32), [b"x", b"another length"])
    assert [keys[row] for row in (2, 4)] == [b"x", b"another length"]
    keys.clear(2)
    keys.set_all(np.array([2], np.uint32), [b"a new length"])
    assert keys[2] == b"a new length"
    keys.check_integrity(range(1, 7))


def test_many_keys_are_compared_at_once_to_the_last_byte() -> None:
    keys = RowKeys()
    keys.extend([b"a\0", b"b\0", b"\0\0"])
    assert same(keys, [1, 2, 3, 1], [b"a\0", b"bb", b"\0\0", b"b\0"]) == [True, False, True, False]
    assert same(keys, [1], [b"a"]) == [False], "none is of that length"
    keys.append(b"a")
    assert same(keys, [1, 4], [b"a", b"a"]) == [False, True], "zeros at the end count"
    assert same(keys, [4, 1], [b"a\0", b"a\0"]) == [False, True]


@pytest.mark.parametrize("length", [1, 7, 8, 16, 24, 33, 40, 255])
def test_keys_of_any_length_differ_by_every_byte(length: int) -> None:
    key = random.Random(length).randbytes(length)
    others = [key[:at] + bytes((key[at] ^ 1,)) + key[at + 1 :] for at in range(length)]
    keys = RowKeys()
    keys.extend([key, *others, bytes(length)])
    assert same(keys, [*range(1, length + 3)], [key] * (length + 2)) == [True, *[False] * length, key == bytes(length)]
    assert same(keys, [*range(1, length + 3)], [key, *others, bytes(length)]) == [True] * (length + 2)
