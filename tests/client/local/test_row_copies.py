"""Values of one length are copied from wherever they lie in a slab to the rows they belong to, and no other row is touched."""

import numpy as np
import pytest

from kvstore.client.local.row_copies import GATHER_BYTES, by_slab, gather

ROW_BYTES = {"small": 64, "large": GATHER_BYTES // 3, "beyond what is gathered at once": GATHER_BYTES + 64}


@pytest.mark.parametrize("row_bytes", ROW_BYTES.values(), ids=ROW_BYTES)
@pytest.mark.parametrize("shift", [0, 1], ids=["slots of the values' size", "slots that lie elsewhere"])
@pytest.mark.parametrize("chosen", [[3, 4, 5], [0, 2, 3, 7, 9]], ids=["rows in a row", "rows here and there"])
def test_each_row_has_its_value(row_bytes: int, shift: int, chosen: list[int]) -> None:
    slab = np.random.default_rng(1).integers(0, 256, 12 * row_bytes + shift, dtype=np.uint8)
    rows = np.zeros((10, row_bytes), np.uint8)
    indexes = np.array(chosen)
    offsets = np.random.default_rng(2).permutation(12)[: len(indexes)] * row_bytes + shift
    gather(slab.data, offsets, rows, indexes)
    expected = {index: slab[offset : offset + row_bytes] for index, offset in zip(chosen, offsets.tolist(), strict=True)}
    for index, row in enumerate(rows):
        assert np.array_equal(row, expected[index] if index in expected else np.zeros(row_bytes))


def test_more_rows_than_are_gathered_at_once_are_all_copied() -> None:
    slab = np.random.default_rng(1).integers(0, 256, (3 * GATHER_BYTES // 4096, 4096), dtype=np.uint8)
    rows = np.zeros((2 * len(slab), 4096), np.uint8)
    order = np.random.default_rng(2).permutation(len(slab))
    gather(slab.reshape(-1).data, order * 4096, rows, 2 * np.arange(len(slab)))
    assert np.array_equal(rows[::2], slab[order])
    assert not rows[1::2].any()


@pytest.mark.parametrize("beyond", [0, 1 << 20])
def test_slabs_are_told_apart_with_their_indexes_in_order(beyond: int) -> None:
    slabs = np.random.default_rng(3).integers(0, 5, 1000).astype(np.uint64) + np.uint64(beyond)
    found = list(by_slab(slabs))
    assert [slab for slab, _ in found] == [beyond + i for i in range(5)]
    for slab, indexes in found:
        assert indexes.tolist() == np.flatnonzero(slabs == slab).tolist()
