"""Promises of spilled_rows.py: a dictionary of lists by bucket, of which the garbage collector sees nothing."""

import gc

from hypothesis import given
from hypothesis import strategies as st

from kvstore.master.directory.key_index import PART_BUCKETS, SpilledRows

BUCKETS = st.sampled_from([0, 1, PART_BUCKETS - 1, PART_BUCKETS, 5 * PART_BUCKETS + 3])
ROWS = st.lists(st.integers(1, (1 << 32) - 1), min_size=1, max_size=3)


@given(st.lists(st.tuples(BUCKETS, ROWS | st.none())))
def test_it_is_a_dictionary_of_lists(steps: list[tuple[int, list[int] | None]]) -> None:
    found = SpilledRows()
    model: dict[int, list[int]] = {}
    for bucket, rows in steps:
        if rows is None:
            assert found.pop(bucket) == model.pop(bucket, [])
        else:
            found.add(bucket, *rows)
            model.setdefault(bucket, []).extend(rows)
        assert found[bucket] == model.get(bucket, [])
        assert sorted(found) == sorted(model)
        assert bool(found) == bool(model)


def test_no_row_is_anything_that_the_garbage_collector_looks_at() -> None:
    found = SpilledRows()
    for bucket in range(0, 3 * PART_BUCKETS, 100):
        found.add(bucket, bucket + 1, bucket + 2)
    assert len(found._parts) == 3
    assert not any(gc.is_tracked(part) for part in found._parts.values())
