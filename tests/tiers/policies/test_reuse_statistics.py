"""Tests of reuse_statistics.py: the form between nodes, its limits, and what a policy makes of others' statistics."""

import numpy as np
import pytest

from kvstore.protocol.errors import InvalidArgument
from kvstore.tiers.policies.prefix.policy import PrefixPolicy
from kvstore.tiers.policies.prefix.reuse_hazard import BUCKETS, WIDTHS_S, bucket_of
from kvstore.tiers.policies.prefix.visits import ALONE, CLASSES
from kvstore.tiers.policies.reuse_statistics import MAX_OBSERVATIONS, ReuseStatistics


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def drawn(scale: float = 1.0, seed: int = 0) -> ReuseStatistics:
    random = np.random.default_rng(seed)
    shape = CLASSES, BUCKETS
    return ReuseStatistics(scale * random.random(shape), scale * random.random(shape) * WIDTHS_S, scale * random.random(2))


def close(one: ReuseStatistics, other: ReuseStatistics) -> bool:
    pairs = ((one.readings, other.readings), (one.risk_s, other.risk_s), (one.tips, other.tips))
    return all(np.allclose(mine, others, rtol=1e-6) for mine, others in pairs)


def test_statistics_survive_the_wire() -> None:
    packed = drawn().pack()
    assert close(ReuseStatistics.unpack(packed, CLASSES), drawn())
    assert len(packed) < 8192


@pytest.mark.parametrize("number", [-1.0, float("nan"), float("inf")])
def test_unpack_refuses_impossible_numbers(number: float) -> None:
    numbers = np.frombuffer(drawn().pack(), "<f4").copy()
    numbers[7] = number
    with pytest.raises(InvalidArgument, match="negative or not finite"):
        ReuseStatistics.unpack(numbers.tobytes(), CLASSES)


@pytest.mark.parametrize("change", [lambda data: data[:-4], lambda data: data + bytes(4), lambda data: b""])
def test_unpack_refuses_another_size(change: "type[bytes]") -> None:
    with pytest.raises(InvalidArgument, match="are right for"):
        ReuseStatistics.unpack(change(drawn().pack()), CLASSES)


def test_limited_keeps_rates_and_bounds_observations() -> None:
    many = drawn(1e30)
    limited = many.limited()
    assert limited.observations <= MAX_OBSERVATIONS * (1 + 1e-9)
    assert limited.tips.max() <= MAX_OBSERVATIONS * (1 + 1e-9)
    assert np.allclose(limited.readings / limited.risk_s, many.readings / many.risk_s)
    assert close(drawn().limited(), drawn())


def test_sum_without_a_summand_is_the_rest() -> None:
    assert close((drawn(seed=1) + drawn(seed=2)).without(drawn(seed=2)), drawn(seed=1))


def test_fresh_policy_knows_what_another_learned() -> None:
    """The blocks of a prompt of two are read at 100 s, single blocks are not. A policy that learned nothing evicts the
    older ones first, whichever they are."""
    clock = Clock()
    experienced: PrefixPolicy[str] = PrefixPolicy(clock=clock)
    for number in range(400):
        clock.now_s += 300
        first, second = f"first {number}", f"second {number}"
        experienced.insert(first)
        experienced.insert(second, first)
        experienced.insert_all([f"{number} alone {index}" for index in range(10)])
        clock.now_s += 100
        experienced.touch(first)
        experienced.touch(second)
    learned = experienced.model.estimate.reuse_statistics()
    assert learned.readings[:, bucket_of(100.0)].sum() > 0
    assert learned.risk_s[ALONE].sum() > 0

    def victim(policy: PrefixPolicy[str]) -> str | None:
        policy.insert("first")
        policy.insert("second", "first")
        clock.now_s += 50
        policy.insert_all(["a", "b", "c", "d"])
        clock.now_s += 50
        policy.insert_all(["e", "f", "g", "h"])
        return policy.victim()

    assert victim(PrefixPolicy(clock=clock)) == "second"
    taught: PrefixPolicy[str] = PrefixPolicy(clock=clock)
    taught.model.estimate.use_statistics_of_others(learned)
    assert victim(taught) in {"a", "b", "c", "d"}
    assert taught.model.estimate.reuse_statistics().observations < 100, "what it was taught is not its own"


def test_others_statistics_replace_the_former_ones() -> None:
    policy: PrefixPolicy[str] = PrefixPolicy(clock=Clock())
    before = policy.model.estimate.log.hazard.worth(1000.0)
    policy.model.estimate.use_statistics_of_others(drawn())
    assert not np.array_equal(policy.model.estimate.log.hazard.worth(1000.0), before)
    policy.model.estimate.use_statistics_of_others(ReuseStatistics.none(CLASSES))
    assert np.array_equal(policy.model.estimate.log.hazard.worth(1000.0), before)
