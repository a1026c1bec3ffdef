"""The decode instance is the one that makes tokens soonest of those with room; placements keep both SLOs."""

from dataclasses import replace

from kvstore.scheduler.decision import Reason, Rejection
from kvstore.scheduler.decode_selection import Decoding, broken_slo, decoding_after, goes_to_own_only, has_room, select_decoding_instance
from kvstore.scheduler.instances import DecodeInstance, PrefillInstance
from kvstore.scheduler.request import Request, Slo

REQUEST = Request((), input_tokens=100, block_tokens=16, output_tokens=20)


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


def test_equal_tbt_goes_to_the_least_context_then_to_the_first() -> None:
    decode = [DecodeInstance("a", 1, 300), DecodeInstance("b", 1, 200), DecodeInstance("c", 1, 200)]
    assert select_decoding_instance(REQUEST, decode, Counting(0)) == Decoding(1, 2.0)


def test_equal_loads_are_estimated_once() -> None:
    estimator = Counting()
    select_decoding_instance(REQUEST, [DecodeInstance(str(i)) for i in range(9)], estimator)
    assert len(estimator.asked) == 1


def test_a_full_cache_is_passed_over() -> None:
    decode = [DecodeInstance("full", 0, 881, 1000), DecodeInstance("fits", 5, 880, 1000)]
    found = select_decoding_instance(REQUEST, decode, Counting())
    assert isinstance(found, Decoding)
    assert found.instance == 1


def test_without_room_anywhere_the_answer_says_how_much_there_is() -> None:
    decode = [DecodeInstance("a", 0, 950, 1000), DecodeInstance("b", 0, 900, 1000)]
    assert select_decoding_instance(REQUEST, decode, Counting()) == Rejection(Reason.CAPACITY, 120, 100)


def test_without_instances_there_is_none() -> None:
    assert select_decoding_instance(REQUEST, [], Counting()) == Rejection(Reason.NO_INSTANCE)


def test_only_who_decodes_its_own_can_serve_what_no_other_decode_instance_has_room_for_or_is_quick_enough_for() -> None:
    plain, own = PrefillInstance("p"), PrefillInstance("both", decodes_at=1)
    decode = [DecodeInstance("d", 1, 880, 1000), DecodeInstance("both", 0, 0, 120, is_own=True)]
    assert not goes_to_own_only(REQUEST, [plain, own], decode, Counting())
    assert goes_to_own_only(replace(REQUEST, slo=Slo(tbt_s=2)), [plain, own], decode, Counting())
    decode[0].context_tokens += 1
    assert goes_to_own_only(REQUEST, [plain, own], decode, Counting())
    decode[1].context_tokens += 1
    assert not goes_to_own_only(REQUEST, [plain, own], decode, Counting()), "why it goes nowhere is as without it"
    assert not goes_to_own_only(REQUEST, [plain], decode, Counting())


def test_a_placement_on_the_limit_keeps_it() -> None:
    assert broken_slo(Slo(2, 1), ttft_s=2, tbt_s=1) is None


def test_a_placement_that_breaks_an_slo_says_which() -> None:
    assert broken_slo(Slo(2, 1), ttft_s=2.5, tbt_s=1.5) == Rejection(Reason.TTFT, 2.5, 2)
    assert broken_slo(Slo(2, 1), ttft_s=2, tbt_s=1.5) == Rejection(Reason.TBT, 1.5, 1)


def test_what_decodes_its_own_prompts_takes_no_others() -> None:
    decode = [DecodeInstance("both", is_own=True), DecodeInstance("b", 7)]
    assert select_decoding_instance(REQUEST, decode, Counting(0)) == Decoding(1, 8.0)
    assert select_decoding_instance(REQUEST, decode[:1], Counting()) == Rejection(Reason.NO_INSTANCE)


def test_what_is_prefilled_where_it_is_decoded_stays_there() -> None:
    decode = [DecodeInstance("b"), DecodeInstance("both", 3, capacity_tokens=120, is_own=True)]
    assert decoding_after(PrefillInstance("both", decodes_at=1), REQUEST, decode, Counting(0)) == Decoding(1, 4.0)
    assert decoding_after(PrefillInstance("p"), REQUEST, decode, Counting(0)) == Decoding(0, 1.0)


def test_room_is_asked_of_the_decode_side_of_its_own() -> None:
    decode = [DecodeInstance("full", capacity_tokens=0), DecodeInstance("both", context_tokens=1, capacity_tokens=120, is_own=True)]
    both = PrefillInstance("both", decodes_at=1)
    assert has_room(PrefillInstance("p"), REQUEST, decode)
    assert not has_room(both, REQUEST, decode)
    assert decoding_after(both, REQUEST, decode, Counting()) == Rejection(Reason.CAPACITY, 120, 119)
    decode[1].context_tokens = 0
    assert has_room(both, REQUEST, decode)
