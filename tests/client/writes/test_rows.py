"""Rows of an array are copied to where their slots are, as few copies as there are runs."""

from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.writes.slot_put import RUN_BYTES, runs_of_rows

ROWS = 12


@given(
    rows=st.lists(st.integers(0, ROWS - 1), unique=True, min_size=1),
    places=st.permutations([(slab, position) for slab in (3, 7) for position in range(ROWS)]),
    shuffled=st.booleans(),
    row_bytes=st.sampled_from([1, 5, RUN_BYTES // 3]),
)
def test_every_row_comes_to_its_slot(rows: list[int], places: list[tuple[int, int]], *, shuffled: bool, row_bytes: int) -> None:
    rows, places = (rows, places) if shuffled else (sorted(rows), sorted(places))
    source = bytearray(ROWS * row_bytes)
    for row in range(ROWS):
        source[row * row_bytes : (row + 1) * row_bytes] = bytes([row + 1]) * row_bytes
    slabs = {number: bytearray(ROWS * row_bytes) for number in (3, 7)}
    parts = {number: lambda offset, size, slab=slab: memoryview(slab)[offset : offset + size] for number, slab in slabs.items()}
    chosen = places[: len(rows)]
    offsets = [position * row_bytes for _, position in chosen]
    for target, of in runs_of_rows(memoryview(source), row_bytes, rows, [slab for slab, _ in chosen], offsets, parts):
        assert len(target) == len(of) <= RUN_BYTES
        target[:] = of
    for row, (slab, position) in zip(rows, chosen, strict=True):
        assert slabs[slab][position * row_bytes : (position + 1) * row_bytes] == bytes([row + 1]) * row_bytes


def test_what_lies_in_a_row_in_both_places_is_one_copy() -> None:
    memory = bytearray(100)
    found = runs_of_rows(
        memoryview(bytes(60)), 10, [0, 1, 2, 4, 5], [1] * 5, [20, 30, 40, 50, 60], {1: lambda at, size: memoryview(memory)[at : at + size]}
    )
    assert [len(target) for target, _ in found] == [30, 20]
