"""LHD evicts from the cohort whose expected hits, for the time they take, are the fewest, and learns what to expect."""

import random

from kvstore.testing.policy_conformance import PolicyConformance
from kvstore.tiers.policies.lhd import CLASSES, GHOSTS_PER_KEY, LHD


class TestLHD(PolicyConformance):
    policy = LHD


def read_through(policy: LHD[int], key: int, capacity: int) -> bool:
    if key in policy:
        policy.touch(key)
        return True
    if len(policy) == capacity:
        victim = policy.victim()
        assert victim is not None
        assert density(policy, victim) == min(density(policy, cohort_key) for cohort_key in policy._cohorts)
        policy.remove(victim)
    policy.insert(key)
    return False


def density(policy: LHD[int], key: int) -> float:
    cohort = policy._cohorts[key]
    return policy._model.density(cohort.class_, policy._epoch - cohort.epoch)


def test_lhd_victim_has_the_lowest_density_in_any_schedule() -> None:
    chance = random.Random(8)
    policy: LHD[int] = LHD()
    for step in range(4000):
        if not read_through(policy, int(chance.paretovariate(0.7)) % 500, 50):
            assert len(policy._ghosts) <= GHOSTS_PER_KEY * 50
        if step % 7 == 0:
            policy.remove(chance.randrange(100))
        if step % 50 == 0:
            policy.check_integrity()


def test_lhd_hits_in_a_loop_larger_than_the_cache() -> None:
    """LRU has no hit there: each key leaves just before it is read again."""
    policy: LHD[int] = LHD()
    hits = sum(read_through(policy, step % 150, 100) for step in range(15_000))
    assert hits > 0.2 * 15_000


def test_keys_read_again_outlive_a_scan() -> None:
    chance = random.Random(1)
    policy: LHD[int] = LHD()
    hits = reads = 0
    for step in range(20_000):
        if step % 2:
            read_through(policy, 1000 + step, 100)
        else:
            reads += 1
            hits += read_through(policy, chance.randrange(80), 100)
    assert hits > 0.8 * reads, "LRU has about half of the hits"


def test_a_key_that_comes_back_has_not_been_forgotten() -> None:
    policy: LHD[int] = LHD()
    policy.insert(1)
    assert policy._cohorts[1].class_ == CLASSES - 1
    policy.remove(1)
    policy.insert(1)
    assert policy._cohorts[1].class_ == 0
    policy.check_integrity()
