"""Each baseline uses what it says and nothing else; they share the rest."""

import pytest

from kvstore.protocol.errors import ConfigError, InvalidArgument
from kvstore.scheduler.baselines import DISPATCHERS, make_dispatcher
from kvstore.scheduler.dispatcher import Dispatcher, Estimators
from kvstore.scheduler.estimators.interface import BandwidthTransfer
from kvstore.scheduler.request import Decision, DecodeInstance, PrefillInstance, Reason, Rejection, ScheduleRequest, Slo

BASELINES = [name for name in DISPATCHERS if name != "kvcache_centric"]
DECODE = [DecodeInstance("d0")]


class Linear:
    def prefill_s(self, input_tokens: int, prefix_tokens: int) -> float:
        return (input_tokens - prefix_tokens) / 10

    def tbt_s(self, batch: int, context_tokens: int) -> float:
        return float(batch)


def dispatcher(name: str, seed: int = 0) -> Dispatcher:
    return make_dispatcher(name, Estimators(Linear(), Linear(), BandwidthTransfer(), 100), seed=seed)


NO_SLO = Slo()


def request(slo: Slo = NO_SLO) -> ScheduleRequest:
    return ScheduleRequest(range(4), 41, 10, slo=slo)


def prefill(*queues_s: float) -> list[PrefillInstance]:
    return [PrefillInstance(f"p{i}", queue_s=queue_s) for i, queue_s in enumerate(queues_s)]


def chosen(by: Dispatcher, matches: list[int], pool: list[PrefillInstance]) -> int:
    found = by.dispatch(request(), matches, pool, DECODE)
    assert isinstance(found, Decision)
    return found.prefill


def test_random_takes_every_instance_about_as_often() -> None:
    by = dispatcher("random", seed=3)
    counts = [0] * 4
    for _ in range(400):
        counts[chosen(by, [0, 4, 0, 0], prefill(0, 0, 9, 0))] += 1
    assert min(counts) > 70


def test_round_robin_follows_a_shrinking_pool() -> None:
    by = dispatcher("round_robin")
    assert [chosen(by, [4, 0, 0], prefill(0, 9, 0)) for _ in range(5)] == [0, 1, 2, 0, 1]
    assert [chosen(by, [0, 0], prefill(0, 0)) for _ in range(2)] == [0, 1]


def test_load_balancing_ignores_caches() -> None:
    assert chosen(dispatcher("load_balancing"), [4, 0, 0], prefill(1.1, 1, 1)) == 1


def test_local_cache_aware_waits_for_a_cache_that_is_worth_it() -> None:
    by = dispatcher("local_cache_aware")
    assert chosen(by, [4, 0], prefill(3.9, 0)) == 0
    assert chosen(by, [4, 0], prefill(4.1, 0)) == 1
    assert chosen(by, [2, 2, 2], prefill(1, 1, 1)) == 0


def test_power_of_two_takes_the_better_of_two() -> None:
    by = dispatcher("power_of_two")
    taken = [chosen(by, [0, 0, 4, 0], prefill(5, 6, 0, 7)) for _ in range(300)]
    assert taken.count(3) == 0
    assert 120 < taken.count(2) < 180
    assert chosen(by, [0], prefill(1)) == 0


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_uses_what_is_there_and_fetches_nothing(name: str) -> None:
    found = dispatcher(name).dispatch(request(), [3, 3], prefill(2, 2), DECODE)
    assert isinstance(found, Decision)
    assert (found.prefix_blocks, found.transfer_from, found.transfer_blocks, found.transfer_s) == (3, None, 0, 0)
    assert (found.queue_s, found.prefill_s, found.decode, found.tbt_s) == pytest.approx((2, 1.1, 0, 1))


@pytest.mark.parametrize("name", BASELINES)
def test_baseline_uses_a_combined_instance_if_decode_is_full(name: str) -> None:
    pool = prefill(0, 0, 9)
    pool[1].decodes_at, pool[2].decodes_at = 1, 2
    decode = [DecodeInstance("d0", capacity_tokens=40)]
    decode += [DecodeInstance("p1", capacity_tokens=40, is_own=True), DecodeInstance("p2", is_own=True)]
    by = dispatcher(name)
    for _ in range(5):
        found = by.dispatch(request(), [4, 4, 0], pool, decode)
        assert isinstance(found, Decision)
        assert (found.prefill, found.decode, found.prefix_blocks) == (2, 2, 0)


@pytest.mark.parametrize("name", DISPATCHERS)
@pytest.mark.parametrize("own", [DecodeInstance("both", capacity_tokens=40, is_own=True), DecodeInstance("both", batch=9, is_own=True)])
def test_baseline_skips_a_full_or_slow_combined_instance(name: str, own: DecodeInstance) -> None:
    pool = prefill(0, 0, 9)
    pool[0].decodes_at, pool[1].decodes_at = 0, 1
    decode = [own, own, DecodeInstance("d")]
    by = dispatcher(name)
    for _ in range(5):
        found = by.dispatch(request(Slo(tbt_s=2)), [4, 4, 0], pool, decode)
        assert isinstance(found, Decision)
        assert (found.prefill, found.decode) == (2, 2)


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_keeps_the_slos(name: str) -> None:
    by = dispatcher(name)
    late = by.dispatch(request(Slo(ttft_s=5)), [0], prefill(1), DECODE)
    assert isinstance(late, Rejection)
    assert late == Rejection(Reason.TTFT, late.value, 5)
    assert late.value == pytest.approx(5.1)
    assert by.dispatch(request(Slo(tbt_s=0.5)), [0], prefill(1), DECODE) == Rejection(Reason.TBT, 1.0, 0.5)
    assert by.dispatch(request(), [0], prefill(1), [DecodeInstance("d", capacity_tokens=9)]) == Rejection(Reason.CAPACITY, 42, 9)
    assert by.dispatch(request(), [], [], DECODE) == Rejection(Reason.NO_INSTANCE)
    assert by.dispatch(request(), [0], prefill(1), []) == Rejection(Reason.NO_INSTANCE)


def test_the_threshold_is_that_of_algorithm_1() -> None:
    estimators = Estimators(Linear(), Linear(), BandwidthTransfer(), 100)
    by = make_dispatcher("kvcache_centric", estimators, threshold=2)
    found = by.dispatch(request(), [2, 4], prefill(0, 9), DECODE)
    assert isinstance(found, Decision)
    assert found.transfer_from is None
    with pytest.raises(InvalidArgument):
        make_dispatcher("kvcache_centric", estimators, threshold=0.5)


def test_an_unknown_name_is_answered_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'best'.*kvcache_centric, local_cache_aware, power_of_two, load_balancing, round_robin, random"):
        dispatcher("best")
