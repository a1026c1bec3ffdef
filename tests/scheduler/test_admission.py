"""Each admission rejects by the load it says, and prediction keeps both pools from swinging."""

import math
from functools import cache
from statistics import correlation, fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.errors import ConfigError, InvalidArgument
from kvstore.scheduler.admission import ADMISSIONS, AdmissionPolicy, PoolLoad, expected_decoding, make_admission, uniformly_decoding
from kvstore.scheduler.request import Reason, Rejection, Slo
from tests.lab.simulator.two_stages import Course, OneSecondEach, run

SLO = Slo(ttft_s=4, tbt_s=3)


def admission(name: str, load_limit: float = 1.0) -> AdmissionPolicy:
    return make_admission(name, OneSecondEach(), load_limit=load_limit)


def load(*, decoding: int = 0, prefilling: int = 0, instances: int = 1) -> PoolLoad:
    """At 100 s: sequences that have just begun, and prefills that will be over in 1 s. A sequence is decoded for 1000 s."""
    return PoolLoad(100.0, instances, [100.0] * decoding, [101.0] * prefilling, 1000.0, 50.0)


def arriving(name: str, at: PoolLoad, *, ttft_s: float = 2.0) -> Rejection | None:
    return admission(name).on_arrival(at, SLO, ttft_s=ttft_s)


DECODE_LOAD = Rejection(Reason.DECODE_LOAD, 4.0, 3.0)


def test_all_are_admitted_whatever_the_load() -> None:
    assert arriving("all", load(decoding=99), ttft_s=99) is None
    assert admission("all").on_decode(load(decoding=99), SLO) is None


def test_late_rejection_checks_decode_after_prefill() -> None:
    assert arriving("late", load(decoding=99)) is None
    assert admission("late").on_decode(load(decoding=3), SLO) == DECODE_LOAD
    assert admission("late").on_decode(load(decoding=2), SLO) is None


def test_early_rejection_sees_the_decode_load_of_now() -> None:
    assert arriving("early", load(decoding=2, prefilling=9)) is None
    assert arriving("early", load(decoding=3)) == DECODE_LOAD


@pytest.mark.parametrize("name", ["predicted", "predicted_uniform"])
def test_prediction_sees_those_that_will_have_come_from_prefill(name: str) -> None:
    found = arriving(name, load(decoding=2, prefilling=2))
    assert found is not None
    assert found.reason is Reason.DECODE_LOAD
    assert arriving(name, load(decoding=2, prefilling=2), ttft_s=0.5) is None  # they come later than this one
    assert arriving(name, load(decoding=1, prefilling=1)) is None


@pytest.mark.parametrize("name", ["predicted", "predicted_uniform"])
def test_prediction_sees_those_that_will_have_ended(name: str) -> None:
    soon = PoolLoad(100.0, 1, [95.0] * 4, [], 6.0, 50.0)
    assert admission(name).on_arrival(soon, SLO, ttft_s=0.01) is not None
    assert admission(name).on_arrival(soon, SLO, ttft_s=3) is None


@pytest.mark.parametrize("name", ["late", "early", "predicted", "predicted_uniform"])
def test_a_late_first_token_is_a_full_prefill_pool(name: str) -> None:
    assert arriving(name, load(), ttft_s=4.5) == Rejection(Reason.PREFILL_LOAD, 4.5, 4)
    assert arriving(name, load(), ttft_s=4) is None


@pytest.mark.parametrize("name", ["late", "early", "predicted", "predicted_uniform"])
def test_what_slipped_through_is_rejected_before_it_is_decoded(name: str) -> None:
    assert admission(name).on_decode(load(decoding=3), SLO) == DECODE_LOAD


def test_a_limit_below_one_leaves_room_under_both_slos() -> None:
    careful = admission("early", load_limit=0.5)
    assert careful.on_arrival(load(), SLO, ttft_s=2.5) == Rejection(Reason.PREFILL_LOAD, 2.5, 2)
    assert careful.on_arrival(load(decoding=1), SLO, ttft_s=2) == Rejection(Reason.DECODE_LOAD, 2, 1.5)


@pytest.mark.parametrize("load_limit", [0, -1, float("nan")])
def test_a_limit_of_nothing_is_misuse(load_limit: float) -> None:
    with pytest.raises(InvalidArgument, match="load_limit"):
        admission("all", load_limit)


def test_an_unknown_admission_is_answered_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'maybe': take one of all, late, early, predicted, predicted_uniform"):
        admission("maybe")
    assert [admission(name).name for name in ADMISSIONS] == list(ADMISSIONS)


TIMES_S = st.lists(st.integers(0, 40).map(lambda quarter: quarter / 4), max_size=12).map(sorted)


@given(begun_s=TIMES_S, ends_s=TIMES_S, ahead_s=st.integers(0, 40).map(lambda quarter: quarter / 4), decode_s=st.integers(0, 20))
def test_predictions_count_one_sequence_after_the_other(begun_s: list[float], ends_s: list[float], ahead_s: float, decode_s: int) -> None:
    now_s = 10.0
    at_s = now_s + ahead_s
    at = PoolLoad(now_s, 1, begun_s, [now_s + end_s for end_s in ends_s], decode_s, 1.0)
    starts_s = [*begun_s, *(now_s + end_s for end_s in ends_s if now_s + end_s <= at_s)]
    taken_s = decode_s or math.inf
    assert uniformly_decoding(at_s, at) == sum(start_s + taken_s > at_s for start_s in starts_s)
    chances = [math.exp((max(start_s, now_s) - at_s) / taken_s) for start_s in starts_s]
    assert expected_decoding(at_s, at) == pytest.approx(sum(chances))


@cache
def course(name: str, seed: int) -> Course:
    """20 requests a second, prefill for 15, decode for 10; a prefill takes half as long as decoding."""
    return run(admission(name), seed=seed)


@pytest.mark.parametrize("seed", [1, 2])
def test_prediction_avoids_load_oscillation(seed: int) -> None:
    early, predicted = course("early", seed), course("predicted", seed)
    assert correlation(early.prefilling, early.decoding) < -0.2  # out of phase
    assert pstdev(predicted.accepted_per_s) < pstdev(early.accepted_per_s) / 3
    assert pstdev(predicted.prefilling) < pstdev(early.prefilling) / 4
    assert pstdev(predicted.decoding) < pstdev(early.decoding) * 0.7


@pytest.mark.parametrize("seed", [1, 2])
def test_prediction_wastes_fewer_prefills(seed: int) -> None:
    late, early, predicted = (course(name, seed) for name in ("late", "early", "predicted"))
    assert predicted.rejected_after_prefill < early.rejected_after_prefill / 2 < late.rejected_after_prefill / 2
    assert predicted.finished >= 0.99 * max(late.finished, early.finished)
    assert fmean(predicted.decoding) > 95  # of 100


@pytest.mark.parametrize("seed", [1, 2])
def test_uniform_prediction_admits_in_bursts(seed: int) -> None:
    uniform, predicted = course("predicted_uniform", seed), course("predicted", seed)
    assert pstdev(uniform.accepted_per_s) > 2 * pstdev(predicted.accepted_per_s)
