"""Promises of digests.py: runs are alike and short, and every difference shows in a sum."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.digests import MAX_RUN, as_numbers, numbers, run_of, starts


@given(st.lists(st.tuples(st.integers(1, 7), st.integers(1, 3 * MAX_RUN)), max_size=8))
def test_a_run_is_in_the_same_tiers_and_no_longer_than_its_limit(parts: list[tuple[int, int]]) -> None:
    tiers = np.array([mask for mask, count in parts for _ in range(count)], np.uint8)
    begins = starts(tiers).tolist()
    ends = [*begins[1:], len(tiers)]
    assert begins == sorted(set(begins))
    assert (begins[:1] == [0]) == bool(len(tiers))
    for begin, end in zip(begins, ends, strict=len(begins) > 0):
        assert len(set(tiers[begin:end].tolist())) == 1
        assert end - begin <= MAX_RUN
        assert end == len(tiers) or tiers[end] != tiers[begin] or end - begin == MAX_RUN


def test_run_of_is_the_last_run_that_begins_at_or_before() -> None:
    assert run_of(as_numbers([10, 20]), as_numbers([9, 10, 19, 20, 2**64 - 1])).tolist() == [-1, 0, 0, 1, 1]
    assert run_of(as_numbers([]), as_numbers([9])).tolist() == [-1]


@pytest.mark.parametrize("other", [(2, 5, 6, 7), (1, 6, 6, 7), (1, 5, 7, 7), (1, 5, 6, 8), (1, 5, 7, 6)])
def test_number_depends_on_seed_generation_checksum_and_size(other: tuple[int, int, int, int]) -> None:
    def number(seed: int, *columns: int) -> int:
        return int(numbers(seed, *(as_numbers([column]) for column in columns))[0])

    assert number(1, 5, 6, 7) != number(*other)


def test_number_of_a_block_matches_the_protocol_description() -> None:
    def mix(x: int) -> int:
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) % 2**64
        return x ^ x >> 31

    seed, generation, checksum, size = 2**64 - 1, 1_790_000_000_000_000_000, 2**63 + 5, 1 << 30
    expected = mix(mix(mix(generation ^ seed) ^ checksum) ^ size)
    assert numbers(seed, as_numbers([generation]), as_numbers([checksum]), as_numbers([size])).tolist() == [expected]
