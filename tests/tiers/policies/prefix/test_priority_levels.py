"""Weights of priority levels: nominal without evidence, then reads over those that class and age predict."""

import pytest

from kvstore.tiers.policies.prefix.priority_levels import DEFAULT_LEVEL, FIRST_TO_LEAVE, LEVELS, NOMINAL_WEIGHTS, LevelReuse, level_of
from kvstore.tiers.policies.prefix.reuse_hazard import EDGES_S, ReuseHazard, bucket_of

HIGHEST = level_of(100)


def observe(of_all: ReuseHazard, count: int, *, is_read: bool, of_level: LevelReuse | None = None, level: int = HIGHEST) -> None:
    """Watch blocks of one class, and of a level, from second 0 until they are read, or dropped, at second 30."""
    bucket = bucket_of(30.0)
    of_all.enter(0, 0, count, 0.0)
    of_all.grow_older(0, 0, bucket, count, 0.0)
    (of_all.read if is_read else of_all.drop)(0, bucket, count, EDGES_S[bucket], 30.0)
    if of_level is not None:
        of_level.enter(level, 0, 0, count, 0.0)
        of_level.grow_older(level, 0, 0, bucket, count, 0.0)
        of_level.leave(level, 0, bucket, count, EDGES_S[bucket], 30.0, was_read=is_read)


def weights(*, read: int, unread: int, others_read: int, others_unread: int, level: int = HIGHEST) -> list[float]:
    of_all, of_level = ReuseHazard(2), LevelReuse(2)
    observe(of_all, read, is_read=True, of_level=of_level, level=level)
    observe(of_all, unread, is_read=False, of_level=of_level, level=level)
    observe(of_all, others_read, is_read=True)
    observe(of_all, others_unread, is_read=False)
    found: list[float] = of_level.weights(of_all, 100.0)[1].tolist()
    return found


def test_level_of_has_five_ranges() -> None:
    levels = [level_of(priority) for priority in range(101)]
    assert levels[0] == FIRST_TO_LEAVE
    assert {level_of(priority) for priority in range(40, 61)} == {DEFAULT_LEVEL}
    assert len(set(levels)) == LEVELS
    by_priority = [NOMINAL_WEIGHTS[level] for level in levels]
    assert by_priority == sorted(by_priority)


def test_weights_are_nominal_without_evidence() -> None:
    assert weights(read=0, unread=0, others_read=0, others_unread=0) == pytest.approx(NOMINAL_WEIGHTS)


def test_a_priority_that_is_read_no_more_loses_its_weight() -> None:
    found = weights(read=0, unread=500, others_read=250, others_unread=250)
    assert found[HIGHEST] == 1
    same = weights(read=250, unread=250, others_read=250, others_unread=250)
    assert 1 <= same[HIGHEST] < 1.3


def test_a_priority_that_is_read_more_keeps_a_weight() -> None:
    found = weights(read=400, unread=100, others_read=50, others_unread=450)
    assert found[HIGHEST] > 2


def test_priority_0_that_is_read_as_others_counts_as_others() -> None:
    found = weights(read=250, unread=250, others_read=250, others_unread=250, level=FIRST_TO_LEAVE)
    assert 0.8 < found[FIRST_TO_LEAVE] <= 1
    unread = weights(read=0, unread=500, others_read=250, others_unread=250, level=FIRST_TO_LEAVE)
    assert unread[FIRST_TO_LEAVE] < 0.001


def test_weights_fade_back_to_nominal_with_age() -> None:
    of_all, of_level = ReuseHazard(2), LevelReuse(2)
    observe(of_all, 500, is_read=False, of_level=of_level)
    observe(of_all, 500, is_read=True)
    assert of_level.weights(of_all, 100.0)[1][HIGHEST] == 1
    of_all.age(10**6)
    of_level.age(10**6)
    assert of_level.weights(of_all, 100.0)[1][HIGHEST] == pytest.approx(NOMINAL_WEIGHTS[HIGHEST], rel=0.5)
