"""The densities are those that the definition gives, summed key by key."""

import random

import pytest

from kvstore.tiers.policies.lhd import AGES, CLASSES, EXACT_AGES, DensityModel


def test_before_anything_was_seen_younger_and_sooner_reused_is_better() -> None:
    model = DensityModel()
    assert model.density(0, 0) > model.density(0, 1) > model.density(0, 40)
    assert model.density(0, 3) > model.density(1, 3) > model.density(CLASSES - 1, 3)


def test_a_density_is_hits_over_epochs_of_stay_of_those_that_get_to_that_age() -> None:
    chance = random.Random(5)
    lives = [(chance.randrange(EXACT_AGES), chance.random() < 0.4) for _ in range(500)]
    model = DensityModel()
    for age, is_hit in lives:
        (model.add_hit if is_hit else model.add_loss)(2, age)
    model.estimate()
    for start in range(EXACT_AGES):
        reached = [(age, is_hit) for age, is_hit in lives if age >= start]
        hits, stay = sum(is_hit for _, is_hit in reached), sum(age - start + 1 for age, _ in reached)
        assert model.density(2, start) == pytest.approx(hits / stay)
    assert model.density(2, EXACT_AGES) == 0
    assert model.density(3, 0) == 0


def test_what_was_seen_long_ago_counts_less_and_less() -> None:
    model = DensityModel()
    for _ in range(100):
        model.add_hit(1, 0)
    model.estimate()
    assert model.density(1, 0) == pytest.approx(1)
    seen = []
    for _ in range(100):
        for _ in range(10):
            model.add_loss(1, 0)
        model.estimate()
        seen.append(model.density(1, 0))
    assert seen == sorted(seen, reverse=True)
    assert seen[0] > 0.8
    assert seen[-1] < 0.01


def test_old_ages_are_told_apart_by_an_eighth_and_the_oldest_not_at_all() -> None:
    for age in (16, 17, 100, 1000, 12345):
        model = DensityModel()
        model.add_hit(0, age)
        model.estimate()
        assert model.density(0, age) > 0
        assert model.density(0, age + age // 8 + 2) == 0, "nobody was seen to live so long"
    model = DensityModel()
    model.add_hit(0, 1 << 60)
    model.estimate()
    assert model.density(0, 1 << 61) == model.density(0, 1 << 60) > 0
    assert len(model._densities) == CLASSES * AGES
