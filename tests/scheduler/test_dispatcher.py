"""The decode instance is the one that makes tokens soonest of those with room; placements keep both SLOs."""

from dataclasses import replace

import pytest

from kvstore.scheduler.dispatcher import Decoding, check_slo, decode_choices, select_decoding_instance
from kvstore.scheduler.request import DecodeInstance, PrefillInstance, Reason, Rejection, ScheduleRequest, Slo

REQUEST = ScheduleRequest((), input_tokens=100, block_tokens=16, output_tokens=20)


class Counting:
    """TBT is 1 s a sequence and 1 ms a token of cache."""

    def __init__(self, per_token_s: float = 0.001) -> None:
        self.per_token_s = per_token_s
        self.asked: list[tuple[int, int]] = []

    def tbt_s(self, batch: int, context_tokens: int) -> float:
        self.asked.append((batch, context_tokens))
        return batch + context_tokens * self.per_token_s


def test_the_least_tbt_after_admission_wins() -> None:
    estimator = Counting()
    decode = [DecodeInstance("a", 3, 0), DecodeInstance("b", 1, 5000), DecodeInstance("c", 2, 500)]
    assert select_decoding_instance(REQUEST, decode, estimator) == Decoding(2, 3.6)
    assert estimator.asked == [(4, 100), (2, 5100), (3, 600)]


def test_equal_loads_are_estimated_once() -> None:
    estimator = Counting()
    select_decoding_instance(REQUEST, [DecodeInstance(str(i)) for i in range(9)], estimator)
    assert len(estimator.asked) == 1


def test_without_room_anywhere_the_answer_says_how_much_there_is() -> None:
    decode = [DecodeInstance("a", 0, 950, 1000), DecodeInstance("b", 0, 900, 1000)]
    assert select_decoding_instance(REQUEST, decode, Counting()) == Rejection(Reason.CAPACITY, 120, 100)


@pytest.mark.parametrize("whose", [0, 1])
def test_decode_choices_skip_full_and_slow_instances(whose: int) -> None:
    pool = [PrefillInstance("p"), PrefillInstance("both", decodes_at=1)]
    decode = [DecodeInstance("d", capacity_tokens=1000), DecodeInstance("both", capacity_tokens=1000, is_own=True)]
    here, other = decode[whose], Decoding(1 - whose, 1.1)
    quick = replace(REQUEST, slo=Slo(tbt_s=2))
    assert dict(decode_choices(quick, pool, decode, Counting())) == {0: Decoding(0, 1.1), 1: Decoding(1, 1.1)}
    here.batch = 1
    assert dict(decode_choices(REQUEST, pool, decode, Counting())) == {1 - whose: other, whose: Decoding(whose, 2.1)}
    assert dict(decode_choices(quick, pool, decode, Counting())) == {1 - whose: other}
    here.batch, here.context_tokens = 0, 881
    assert dict(decode_choices(REQUEST, pool, decode, Counting())) == {1 - whose: other}
    assert dict(decode_choices(replace(REQUEST, slo=Slo(tbt_s=1)), pool, decode, Counting())) == {1 - whose: other}, (
        "too slow, but there is room"
    )


def test_decode_choices_keep_slow_instances_if_all_are() -> None:
    pool = [PrefillInstance("p"), PrefillInstance("both", decodes_at=1), PrefillInstance("full", decodes_at=2)]
    decode = [DecodeInstance("d"), DecodeInstance("both", 1, is_own=True), DecodeInstance("full", capacity_tokens=0, is_own=True)]
    found = decode_choices(replace(REQUEST, slo=Slo(tbt_s=0.5)), pool, decode, Counting(0))
    assert dict(found) == {0: Decoding(0, 1.0), 1: Decoding(1, 2.0)}


@pytest.mark.parametrize("own", [[100, 90], [90, 100]])
def test_decode_choices_report_the_largest_free_space(own: list[int]) -> None:
    pool = [PrefillInstance("p"), *(PrefillInstance(f"both{n}", decodes_at=n + 1) for n in range(2))]
    decode = [DecodeInstance("d", capacity_tokens=80), *(DecodeInstance(f"both{n}", 0, 0, own[n], is_own=True) for n in range(2))]
    full = Rejection(Reason.CAPACITY, 120, 100)
    assert dict(decode_choices(REQUEST, pool, decode, Counting())) == {0: full, 1: full, 2: full}
    decode[0] = DecodeInstance("unused", is_own=True)
    assert dict(decode_choices(REQUEST, pool, decode, Counting())) == {0: full, 1: full, 2: full}, "the first has nowhere to be decoded"
    decode[0] = DecodeInstance("d", capacity_tokens=110)
    assert decode_choices(REQUEST, pool, decode, Counting())[2] == Rejection(Reason.CAPACITY, 120, 110)


def test_a_placement_that_breaks_an_slo_says_which() -> None:
    assert check_slo(Slo(2, 1), ttft_s=2.5, tbt_s=1.5) == Rejection(Reason.TTFT, 2.5, 2)
    assert check_slo(Slo(2, 1), ttft_s=2, tbt_s=1.5) == Rejection(Reason.TBT, 1.5, 1)


def test_what_decodes_its_own_prompts_takes_no_others() -> None:
    decode = [DecodeInstance("both", is_own=True), DecodeInstance("b", 7)]
    assert select_decoding_instance(REQUEST, decode, Counting(0)) == Decoding(1, 8.0)
    assert select_decoding_instance(REQUEST, decode[:1], Counting()) == Rejection(Reason.NO_INSTANCE)


def test_what_is_prefilled_where_it_is_decoded_stays_there() -> None:
    decode = [DecodeInstance("b"), DecodeInstance("both", 3, capacity_tokens=120, is_own=True)]
    found = decode_choices(REQUEST, [PrefillInstance("both", decodes_at=1), PrefillInstance("p")], decode, Counting(0))
    assert dict(found) == {0: Decoding(1, 4.0), 1: Decoding(0, 1.0)}
