"""Promises of keys.py."""

import numpy as np

from kvstore.master.directory.keys import Keys


def same(keys: Keys, rows: list[int], asked: list[bytes]) -> list[bool]:
    length = len(asked[0])
    found: list[bool] = keys.are(np.array(rows, np.uint32), np.frombuffer(b"".join(asked), f"S{length}"), length).tolist()
    return found


def test_a_row_gives_back_its_key_whatever_the_lengths() -> None:
    keys = Keys()
    assert [keys.append(b"a"), keys.append(b"long" * 50)] == [1, 2]
    keys.extend([b"x", b"yy", b"x" * 255])
    keys.extend([b"u", b"v"])
    keys.extend([])
    assert [keys[row] for row in range(len(keys))] == [b"", b"a", b"long" * 50, b"x", b"yy", b"x" * 255, b"u", b"v"]
    keys.check_integrity(range(1, 8))


def test_the_place_of_a_key_that_left_is_used_again() -> None:
    keys = Keys()
    keys.extend([b"a", b"b", b"c"])
    keys.clear(2)
    assert keys[2] == b""
    keys.check_integrity([1, 3])
    keys.set(2, b"d")
    assert [keys[row] for row in (1, 2, 3)] == [b"a", b"d", b"c"]
    keys.check_integrity([1, 2, 3])
    keys.clear(2)
    keys.set(2, b"another length")
    assert keys[2] == b"another length"
    keys.check_integrity([1, 2, 3])


def test_many_keys_are_compared_at_once_to_the_last_byte() -> None:
    keys = Keys()
    keys.extend([b"a\0", b"b\0", b"\0\0"])
    assert same(keys, [1, 2, 3, 1], [b"a\0", b"bb", b"\0\0", b"b\0"]) == [True, False, True, False]
    assert same(keys, [1], [b"a"]) == [False], "none is of that length"
    keys.append(b"a")
    assert same(keys, [1, 4], [b"a", b"a"]) == [False, True], "zeros at the end count"
    assert same(keys, [4, 1], [b"a\0", b"a\0"]) == [False, True]
