"""Algorithm 1 decides as its literal transcription does, and each of its lines for the reason it has."""

from collections.abc import Hashable
from dataclasses import dataclass
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.errors import InvalidArgument
from kvstore.scheduler.dispatcher import Estimators
from kvstore.scheduler.estimators.interface import BandwidthTransfer
from kvstore.scheduler.kvcache_centric import KVCacheCentric
from kvstore.scheduler.prefix_index import PrefixIndex
from kvstore.scheduler.request import Decision, DecodeInstance, PrefillInstance, Reason, Rejection, ScheduleRequest, Slo
from tests.scheduler.naive_algorithm import algorithm_1, prefix_match

BLOCK_TOKENS = 10


@dataclass
class Linear:
    """A token is computed in 0.1 s, a block of 100 bytes is sent by what says 100 bytes/s in 1 s; TBT is the batch in seconds."""

    asked: int = 0

    def prefill_s(self, input_tokens: int, prefix_tokens: int) -> float:
        self.asked += 1
        return (input_tokens - prefix_tokens) / 10

    def tbt_s(self, batch: int, context_tokens: int) -> float:
        return float(batch)


def estimators() -> Estimators:
    return Estimators(prefill=Linear(), decode=Linear(), transfer=BandwidthTransfer(), block_bytes=100)


NO_SLO = Slo()


def request(blocks: int = 4, slo: Slo = NO_SLO) -> ScheduleRequest:
    return ScheduleRequest(range(blocks), blocks * BLOCK_TOKENS + 1, BLOCK_TOKENS, slo=slo)


def prefill(*queues_s: float, send_bytes_per_s: float = 1000.0) -> list[PrefillInstance]:
    return [PrefillInstance(f"p{i}", queue_s=queue_s, send_bytes_per_s=send_bytes_per_s) for i, queue_s in enumerate(queues_s)]


DECODE = [DecodeInstance("d0")]


def decided(dispatcher: KVCacheCentric, asked: ScheduleRequest, matches: list[int], pool: list[PrefillInstance]) -> Decision:
    found = dispatcher.dispatch(asked, matches, pool, DECODE)
    assert isinstance(found, Decision)
    return found


def test_the_holder_of_the_prefix_gets_the_request() -> None:
    found = decided(KVCacheCentric(estimators()), request(), [0, 4], prefill(0, 0))
    assert (found.prefill, found.prefix_blocks, found.transfer_from, found.transfer_blocks) == (1, 4, None, 0)
    assert found.ttft_s == found.prefill_s == pytest.approx(0.1)


def test_when_the_holder_is_busy_the_prefix_goes_to_another() -> None:
    """Lines 6 to 8 and 21: all of best_len counts as there, and what was missing is sent."""
    found = decided(KVCacheCentric(estimators()), request(), [1, 4], prefill(0, 5))
    assert (found.prefill, found.prefix_blocks, found.transfer_from, found.transfer_blocks) == (0, 4, 1, 3)
    assert (found.transfer_s, found.queue_s, found.prefill_s) == pytest.approx((0.3, 0, 0.1))


def test_what_a_gpu_alone_has_is_used_there_and_not_sent() -> None:
    """Instance 1 has 4 blocks, of which its node has 2."""
    dispatcher = KVCacheCentric(estimators())
    there = dispatcher.dispatch(request(), [0, 4], prefill(0, 0), DECODE, sendable=[0, 2])
    assert isinstance(there, Decision)
    assert (there.prefill, there.prefix_blocks, there.transfer_from) == (1, 4, None)
    elsewhere = dispatcher.dispatch(request(), [0, 4], prefill(0, 9), DECODE, sendable=[0, 2])
    assert isinstance(elsewhere, Decision)
    assert (elsewhere.prefill, elsewhere.prefix_blocks, elsewhere.transfer_from, elsewhere.transfer_blocks) == (0, 2, 1, 2)


def test_who_decodes_its_own_prompts_and_is_full_is_passed_over() -> None:
    pool = prefill(0, 9)
    pool[0].decodes_at, pool[1].decodes_at = 0, 1
    decode = [DecodeInstance("p0", capacity_tokens=42, is_own=True), DecodeInstance("p1", is_own=True)]
    dispatcher = KVCacheCentric(estimators())
    found = dispatcher.dispatch(request(), [4, 0], pool, decode)
    assert isinstance(found, Decision)
    assert (found.prefill, found.decode) == (0, 0)
    decode[0].context_tokens = 1
    found = dispatcher.dispatch(request(), [4, 0], pool, decode)
    assert isinstance(found, Decision)
    assert (found.prefill, found.decode) == (1, 1)
    decode[1].capacity_tokens = 40
    assert dispatcher.dispatch(request(), [4, 0], pool, decode) == Rejection(Reason.CAPACITY, 42, 41), "the most there is"


def test_combined_instance_wins_if_decode_is_full_or_slow() -> None:
    pool = prefill(0, 9)
    pool[1].decodes_at = 1
    decode = [DecodeInstance("d0", batch=1, capacity_tokens=42), DecodeInstance("p1", is_own=True)]
    dispatcher = KVCacheCentric(estimators())

    def goes_to(asked: ScheduleRequest) -> tuple[int, int]:
        found = dispatcher.dispatch(asked, [0, 0], pool, decode)
        assert isinstance(found, Decision)
        return found.prefill, found.decode

    assert goes_to(request(slo=Slo(tbt_s=2))) == (0, 0)
    assert goes_to(request(slo=Slo(tbt_s=1))) == (1, 1), "too slow"
    decode[0].context_tokens = 1
    assert goes_to(request()) == (1, 1), "full"
    decode[1].capacity_tokens = 40
    assert isinstance(dispatcher.dispatch(request(), [0, 0], pool, decode), Rejection)


def test_without_instances_there_is_nowhere_to_go() -> None:
    dispatcher = KVCacheCentric(estimators())
    assert dispatcher.dispatch(request(), [], [], DECODE) == Rejection(Reason.NO_INSTANCE)
    assert dispatcher.dispatch(request(), [0], prefill(0), []) == Rejection(Reason.NO_INSTANCE)


def test_infinite_queues_are_rejected_without_slo() -> None:
    assert KVCacheCentric(estimators()).dispatch(request(), [0], prefill(inf), DECODE) == Rejection(Reason.TTFT, inf, inf)


@pytest.mark.parametrize("threshold", [0.99, -1, float("nan")])
def test_a_threshold_below_one_is_misuse(threshold: float) -> None:
    with pytest.raises(InvalidArgument, match="at least 1"):
        KVCacheCentric(estimators(), kvcache_balancing_threshold=threshold)


@pytest.mark.parametrize(("threshold", "asked"), [(1.0, 3), (inf, 2)])
def test_what_equal_prefixes_take_is_estimated_once(threshold: float, asked: int) -> None:
    linear = Linear()
    dispatcher = KVCacheCentric(Estimators(linear, linear, BandwidthTransfer(), 100), kvcache_balancing_threshold=threshold)
    dispatcher.dispatch(request(), [0] * 100 + [2] * 100, prefill(*range(200)), DECODE)
    assert linear.asked == asked


SECONDS = st.integers(0, 40).map(lambda value: value / 8)


def test_what_is_computed_sooner_than_fetched_is_computed() -> None:
    """4 blocks take 4 s here; as published it would be fetched for 8 s, or rejected."""
    pool = prefill(0, 5, send_bytes_per_s=50.0)
    for _ in "said", "measured":
        found = decided(KVCacheCentric(estimators()), request(slo=Slo(ttft_s=4.2)), [0, 4], pool)
        assert (found.prefill, found.prefix_blocks, found.transfer_from, found.transfer_blocks) == (0, 0, None, 0)
        assert (found.transfer_s, found.prefill_s) == pytest.approx((0, 4.1))
        pool[0].received_bytes_per_s = {None: 50.0}
        pool[1].send_bytes_per_s = 1000.0


def test_transfer_during_queueing_is_free() -> None:
    pool = prefill(10, 99, send_bytes_per_s=50.0)
    found = decided(KVCacheCentric(estimators()), request(), [0, 4], pool)
    assert (found.prefill, found.prefix_blocks, found.transfer_from) == (0, 4, 1), "8 s of transfer, and 3.9 s to compute the same"
    assert (found.transfer_s, found.queue_s, found.ttft_s) == pytest.approx((8, 10, 10.1))
    pool[0].queue_s = 4.0
    found = decided(KVCacheCentric(estimators()), request(), [0, 4], pool)
    assert found.transfer_from is None, "as soon as with it"
    assert found.ttft_s == pytest.approx(8.1)
    pool[0].queue_s = 4.5
    found = decided(KVCacheCentric(estimators()), request(), [0, 4], pool)
    assert found.transfer_from == 1
    assert found.ttft_s == pytest.approx(8.1), "and 8.6 s without"


def test_a_slow_way_keeps_a_prefix_from_travelling_by_it() -> None:
    """Algorithm 1 with what was measured between the two instead of what the sender says of itself."""
    pool = prefill(0, 3.5)
    pool[1].place = "b"
    assert decided(KVCacheCentric(estimators()), request(), [0, 4], pool).transfer_s == pytest.approx(0.4)
    pool[0].received_bytes_per_s = {"b": 125.0, "elsewhere": 1.0}
    found = decided(KVCacheCentric(estimators()), request(), [0, 4], pool)
    assert (found.prefill, found.transfer_from, round(found.transfer_s, 6)) == (0, 1, 3.2), "3.3 s, and 3.6 s where it is"
    pool[0].received_bytes_per_s = {"b": 50.0}
    found = decided(KVCacheCentric(estimators()), request(), [0, 4], pool)
    assert (found.prefill, found.transfer_from) == (1, None), "8.1 s, and 4.1 s to compute it"


class Blocks(BandwidthTransfer):
    """Estimator for blocks of 100 bytes that counts its calls."""

    asked = 0

    def transfer_s(self, size_bytes: int, *, backlog_bytes: int, bytes_per_s: float, measured_bytes_per_s: float | None = None) -> float:
        self.asked += 1
        measured = measured_bytes_per_s
        return super().transfer_s(size_bytes * 100, backlog_bytes=backlog_bytes, bytes_per_s=bytes_per_s, measured_bytes_per_s=measured)


def test_sender_needs_one_estimate_per_holder() -> None:
    holders, receivers, blocks = 30, 30, Blocks()
    pool = prefill(*[99] * holders, *[0] * receivers)
    for number, instance in enumerate(pool):
        instance.place = number
        instance.send_backlog_bytes = 1000 if number == 7 else 0
        instance.received_bytes_per_s = {place: 200.0 + (place in (5, 7)) * 100 for place in range(holders)}
    found = KVCacheCentric(Estimators(Linear(), Linear(), blocks, 1)).dispatch(request(), [4] * holders + [0] * receivers, pool, DECODE)
    assert isinstance(found, Decision)
    assert (found.prefill, found.transfer_from) == (holders, 5), "the fastest two, and one has something else to send before"
    assert blocks.asked <= 2 * holders + receivers + 10


@given(
    caches=st.lists(st.sets(st.integers(0, 7)), min_size=1, max_size=6),
    queues_s=st.lists(SECONDS, min_size=6, max_size=6),
    backlogs_bytes=st.lists(st.integers(0, 2000), min_size=6, max_size=6),
    rates=st.lists(st.sampled_from([50.0, 200.0, 1000.0]), min_size=6, max_size=6),
    decode=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 300), st.integers(50, 400)), max_size=4),
    blocks=st.integers(0, 8),
    threshold=st.sampled_from([1.0, 1.25, 1.5, 2.0, 4.0, inf]),
    ttft_s=st.sampled_from([0.5, 3.0, inf]),
    tbt_s=st.sampled_from([2.5, inf]),
    places=st.lists(st.sampled_from([None, 0, 1, 2]), min_size=6, max_size=6),
    measured=st.lists(st.dictionaries(st.integers(0, 3), st.sampled_from([20.0, 100.0, 5000.0])), min_size=6, max_size=6),
)
def test_decisions_match_the_naive_algorithm(
    caches: list[set[int]],
    queues_s: list[float],
    backlogs_bytes: list[int],
    rates: list[float],
    decode: list[tuple[int, int, int]],
    blocks: int,
    threshold: float,
    ttft_s: float,
    tbt_s: float,
    places: list[int | None],
    measured: list[dict[Hashable, float]],
) -> None:
    asked = request(blocks, Slo(ttft_s, tbt_s))
    pool_p = [PrefillInstance(f"p{i}", queues_s[i], backlogs_bytes[i], rates[i], places[i], measured[i]) for i in range(len(caches))]
    pool_d = [DecodeInstance(f"d{i}", *facts) for i, facts in enumerate(decode)]
    index: PrefixIndex[int] = PrefixIndex()
    for instance, cache in enumerate(caches):
        index.add(instance, cache)
    matches = index.match(range(blocks), len(caches))
    literal = [prefix_match(set(cache), range(blocks)) for cache in caches]
    assert matches == literal
    found = KVCacheCentric(estimators(), kvcache_balancing_threshold=threshold).dispatch(asked, matches, pool_p, pool_d)
    assert found == algorithm_1(pool_p, pool_d, literal, asked, estimators(), threshold)
