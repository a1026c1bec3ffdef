"""Memory by its address, and what is done with the parts of a value."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.memory import Memory, checksum, first_bytes, in_pieces, size_of
from kvstore.protocol.errors import InvalidArgument


def test_memory_is_what_lies_there_and_writable() -> None:
    array = np.arange(10, dtype=np.uint8)
    view = Memory(int(array.ctypes.data) + 2, 3).view()
    assert bytes(view) == b"\2\3\4"
    view[0] = 77
    assert array[2] == 77
    assert len(Memory(1, 0).view()) == 0


@pytest.mark.parametrize(("pointer", "size"), [(0, 1), (-1, 1), (1, -1), ("1", 1), (1, 1.0), ((1 << 64) - 1, 2), (True, 1)])
def test_what_is_no_memory_is_refused(pointer: Any, size: Any) -> None:
    with pytest.raises(InvalidArgument):
        Memory(pointer, size)


@given(value=st.binary(min_size=1, max_size=100), places=st.lists(st.integers(0, 100), max_size=6), piece_bytes=st.integers(1, 110))
def test_parts_are_their_value_however_they_are_cut(value: bytes, places: list[int], piece_bytes: int) -> None:
    ends = sorted({0, len(value), *(place for place in places if place < len(value))})
    parts = [memoryview(value)[begin:end] for begin, end in pairwise(ends)]
    assert size_of(parts) == len(value)
    assert checksum(parts) == xxhash.xxh3_64_intdigest(value)
    pieces = [b"".join(piece) for piece in in_pieces(parts, piece_bytes)]
    assert pieces == [value[at : at + piece_bytes] for at in range(0, len(value), piece_bytes)]
    assert b"".join(first_bytes(parts, min(piece_bytes, len(value)))) == value[:piece_bytes]
