"""disaggregation/measures.py against figures that can be worked out by hand."""

import numpy as np
import pytest
from disaggregation.measures import Damage, distance


def test_equal_logits_have_no_damage() -> None:
    logits = np.random.default_rng(1).normal(size=(5, 7))
    damage = Damage.of(logits, logits, [0, 1, 2, 3, 4])
    assert (damage.max_logit_error, damage.mean_logit_error, damage.same_choice) == (0, 0, 1)
    assert damage.kl_nats == pytest.approx(0, abs=1e-15)


def test_who_knows_nothing_has_the_perplexity_of_the_vocabulary() -> None:
    assert Damage.of(np.zeros((3, 8)), np.zeros((3, 8)), [1, 2, 3]).perplexity == pytest.approx(8)


def test_two_choices_by_hand() -> None:
    reference = np.log([[0.4, 0.6], [0.9, 0.1]])
    found = np.log([[0.25, 0.75], [0.1, 0.9]])
    damage = Damage.of(found, reference, [0, 1])
    assert damage.perplexity == pytest.approx((0.25 * 0.9) ** -0.5)
    assert damage.kl_nats == pytest.approx((0.4 * np.log(1.6) + 0.6 * np.log(0.8) + 0.8 * np.log(9)) / 2)
    assert damage.same_choice == 0.5
    assert damage.max_logit_error == pytest.approx(np.log(9))


@pytest.mark.parametrize(("error", "verdict"), [(0.0, "bit-equal"), (2e-6, "rounding"), (1e-5, "DIFFERENT")])
def test_a_verdict_allows_four_times_what_one_process_is_off(error: float, verdict: str) -> None:
    exact = np.array([[1.0, 2.0]])
    single = exact + [[0.0, 1e-6]]
    found = single + [[error, 0.0]]
    assert distance(found, single, exact).verdict == verdict
