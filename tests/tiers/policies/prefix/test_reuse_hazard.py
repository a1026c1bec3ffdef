"""Worth of a block: rates are reads by time at risk, and the index equals a search over all ages."""

import math
import random

import numpy as np
import pytest

from kvstore.tiers.policies.prefix.reuse_hazard import BUCKETS, EDGES_S, WIDTHS_S, YOUNG_BUCKETS, YOUNGER, ReuseHazard, bucket_of


def watched(hazard: ReuseHazard, klass: int, *, count: int, read_at_s: float | None, until_s: float = 4000.0) -> None:
    """`count` observations that begin at second 0 and are read at one age, or watched in vain."""
    end_s = until_s if read_at_s is None else read_at_s
    bucket = bucket_of(end_s)
    hazard.enter(klass, 0, count, 0.0)
    hazard.grow_older(klass, 0, bucket, count, 0.0)
    leave = hazard.drop if read_at_s is None else hazard.read
    leave(klass, bucket, count, EDGES_S[bucket], end_s)


def test_growing_older_step_by_step_is_the_same_as_at_once() -> None:
    at_once, stepwise = ReuseHazard(1), ReuseHazard(1)
    for hazard in (at_once, stepwise):
        hazard.enter(0, 2, 5.0, 100.0 + EDGES_S[2])
    at_once.grow_older(0, 2, 9, 5.0, 100.0)
    for bucket in range(2, 9):
        stepwise.drop(0, bucket, 5.0, 100.0 + EDGES_S[bucket], 100.0 + EDGES_S[bucket + 1])
        stepwise.enter(0, bucket + 1, 5.0, 100.0 + EDGES_S[bucket + 1])
    assert np.allclose(at_once.worth(200.0), stepwise.worth(200.0))
    assert np.allclose(at_once._watched, stepwise._watched)


def test_worth_drops_after_the_usual_reuse_age() -> None:
    hazard = ReuseHazard(1)
    watched(hazard, 0, count=500, read_at_s=50.0)
    watched(hazard, 0, count=500, read_at_s=None)
    (worth,) = hazard.worth(4000.0)
    before, at, after = (worth[bucket_of(age_s)] for age_s in (5.0, 50.0, 150.0))
    assert at > before > 10 * after


@pytest.mark.parametrize("until_s", [0.05, 0.3, 5.0, 300.0])
@pytest.mark.parametrize("count", [10, 3000, 100_000])
def test_worth_falls_with_age_while_nothing_is_read(until_s: float, count: int) -> None:
    """Unobserved ages are worth no more than those that were observed in vain, and a class no more than a younger block of another."""
    hazard = ReuseHazard(2)
    watched(hazard, 0, count=count, read_at_s=None, until_s=until_s)
    for row in hazard.worth(until_s):
        assert np.all(np.diff(row) < 0)


def naive_worth(share: list[float]) -> list[float]:
    """For each bucket, the best ratio of hits to time over all buckets to stop after; for a young one at least the next one's worth."""
    found = []
    for first in range(BUCKETS):
        alive, hits, held_s, best = 1.0, 0.0, 0.0, 0.0
        for bucket in range(first, BUCKETS):
            hits += alive * share[bucket]
            held_s += alive * WIDTHS_S[bucket] * (1 - share[bucket] / 2)
            alive *= 1 - share[bucket]
            best = max(best, hits / held_s)
        found.append(best)
    for bucket in reversed(range(YOUNG_BUCKETS)):
        found[bucket] = max(found[bucket], found[bucket + 1] * YOUNGER)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_the_index_is_what_a_search_finds(seed: int) -> None:
    chance = random.Random(seed)
    hazard = ReuseHazard(4)
    for _ in range(300):
        read_at_s = math.exp(chance.uniform(-2, 8)) if chance.random() < 0.6 else None
        watched(hazard, chance.randrange(4), count=1, read_at_s=read_at_s)
    shares = hazard._read_share(4000.0)
    assert np.all((shares > 0) & (shares < 1))
    for row, shares_of_class in zip(hazard.worth(4000.0), shares.tolist(), strict=True):
        assert np.allclose(row, naive_worth(shares_of_class), rtol=1e-6)
