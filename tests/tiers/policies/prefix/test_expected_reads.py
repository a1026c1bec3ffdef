"""Expected reads: their worth rises as the time nears, as far as earlier ones came true."""

import random
from itertools import pairwise

import numpy as np
import pytest

from kvstore.tiers.policies.prefix import expected_reads
from kvstore.tiers.policies.prefix.expected_reads import FIRST_EXPECTED, MAGNITUDES, PART_EDGES, PARTS, ExpectedRead, ExpectedReads
from kvstore.tiers.policies.prefix.visits import Cohort


class Watched:
    """Expected reads, with the parts that cohorts passed into."""

    def __init__(self) -> None:
        self.passed = list[int]()
        self.reads: ExpectedReads[int] = ExpectedReads(self.on_older)

    def on_older(self, cohort: Cohort[int], part: int) -> None:
        self.passed.append(part)

    def begin(self, after_s: float, now_s: float) -> ExpectedRead[int]:
        found = self.reads.begin(after_s, now_s)
        assert found is not None
        return found


def learned(*, is_true: bool, count: int = 400, after_s: float = 100.0) -> ExpectedReads[int]:
    """Expectations one after the other, read at their time, or at random ones if at all."""
    watched, chance = Watched(), random.Random(1)
    for number in range(count):
        begun_s = number * 1000.0
        expected = watched.begin(after_s, begun_s)
        read_s = after_s if is_true else 400 * chance.random()
        for step in range(1, 41):
            at_s = step * after_s / 20
            if read_s < at_s:
                break
            watched.reads.advance(begun_s + at_s)
        watched.reads.advance(begun_s + read_s)
        watched.reads.end(expected, was_read=True)
        watched.reads.worth()
    return watched.reads


def magnitude(reads: ExpectedReads[int], after_s: float = 100.0) -> int:
    found = reads.begin(after_s, 1e9)
    assert found is not None
    return found.klass - FIRST_EXPECTED


def test_expectation_passes_through_its_parts_and_ends() -> None:
    watched = Watched()
    expected = watched.begin(100.0, 50.0)
    unfiled = [bool(watched.reads.advance(50.0 + 100.0 * edge)) for edge in PART_EDGES[1:]]
    assert watched.passed == list(range(1, PARTS))
    assert unfiled == [False] * (PARTS - 1) + [True]
    assert expected.is_over
    watched.reads.end(expected, was_read=True)
    assert watched.reads.advance(1e9) == []


def test_expectation_passes_several_parts_at_once() -> None:
    watched = Watched()
    expected = watched.begin(100.0, 0.0)
    watched.reads.advance(100.0)
    assert watched.passed == [expected.bucket]
    assert PART_EDGES[expected.bucket] <= 1 < PART_EDGES[expected.bucket + 1]


def test_worth_rises_until_the_expected_time() -> None:
    worth = learned(is_true=True).worth()
    at = magnitude(learned(is_true=True, count=1))
    until = next(part for part in range(PARTS) if PART_EDGES[part + 1] > 1)
    assert all(earlier < later for earlier, later in pairwise(worth[at, : until + 1]))
    assert worth[at, until] > 10 * worth[at, 0] > 10 * worth[at, PARTS - 1]
    assert np.all(np.diff(worth[:, 0]) < 0), "the longer the wait, the less"


def test_true_expectations_are_believed_and_random_ones_not() -> None:
    for is_true in (True, False):
        reads = learned(is_true=is_true)
        expected = reads.begin(100.0, 1e9)
        assert expected is not None
        assert reads.is_believed(expected) == is_true


def test_unbelieved_expectations_are_unfiled_at_their_next_part() -> None:
    reads = learned(is_true=False)
    expected = reads.begin(100.0, 1e9)
    assert expected is not None
    assert expected in reads.advance(1e9 + 30)
    assert not expected.is_over


def test_blocks_expected_together_share_a_cohort() -> None:
    watched = Watched()
    first = watched.begin(100.0, 0.0)
    assert watched.begin(100.5, 0.5) is first
    assert watched.begin(100.0, 2.0) is not first
    assert watched.begin(110.0, 0.5) is not first
    assert first.blocks == 2


@pytest.mark.parametrize("after_s", [1e-9, 0.1, 1e9])
def test_expected_times_of_any_length_have_a_class(after_s: float) -> None:
    assert 0 <= magnitude(ExpectedReads(lambda cohort, part: None), after_s) < MAGNITUDES


def test_expectations_under_way_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected_reads, "MAX_EXPECTED", 3)
    reads: ExpectedReads[int] = ExpectedReads(lambda cohort, part: None)
    begun = [reads.begin(100.0, 10.0 * number) for number in range(4)]
    assert [found is None for found in begun] == [False, False, False, True]
    reads.check_integrity()
    reads.advance(1000.0)
    assert reads.begin(100.0, 1000.0) is not None
