"""Promises of model.py: conservation laws under any load, and what sets the strategies apart."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.lab.pressure.load import FinishReason, UserLoad, Users
from kvstore.lab.pressure.model import LoadOutcome, MeanAndTail, simulate_load
from kvstore.lab.pressure.server import PressedServer
from kvstore.lab.pressure.strategies import STRATEGIES, LowerTier, ServingModel, Strategy
from tests.lab.pressure.pressed import BYTES_PER_TOKEN, dram, server, strategy


class QuickTimes:
    """1,000 prompt tokens a second; a step of 10 ms and more by its context."""

    def prefill_s(self, input_tokens: int, prefix_tokens: int) -> float:
        return (input_tokens - prefix_tokens) / 1000

    def tbt_s(self, batch: int, context_tokens: int) -> float:
        return 0.01 + context_tokens * 1e-7


LOADS = st.builds(
    UserLoad,
    users=st.integers(1, 12),
    context_tokens=st.integers(1, 60),
    output_tokens=st.integers(1, 20),
    spread=st.floats(0, 0.9),
    think_s=st.floats(0.01, 50),
    duration_s=st.floats(1, 200),
)
TIERS = st.lists(st.builds(dram, st.integers(0, 200), bytes_per_s=st.floats(10, 1e4)), max_size=2)


@settings(max_examples=60)
@given(LOADS, st.integers(1, 200), TIERS, st.sampled_from(STRATEGIES), st.integers(0, 1000))
def test_nothing_is_lost_and_nothing_done_for_nobody(
    load: UserLoad, cache_tokens: int, tiers: list[LowerTier], chosen: Strategy, seed: int
) -> None:
    pressed = PressedServer(server(cache_tokens, *tiers), chosen, Users(load, Random(seed)))
    while pressed.step():
        pressed.check_integrity()
    ended, work = pressed.ended, pressed.work
    by_ending = {ending: [request for request in ended if request.ending is ending] for ending in FinishReason}
    started = [request for request in ended if request.is_started]

    # Every request came to an end, and to one that its strategy has.
    assert sorted(request.number for request in ended) == list(range(len(ended)))
    too_large = {request.number for request in ended if request.most_cached_tokens > cache_tokens}
    assert {request.number for request in by_ending[FinishReason.REJECTED]} >= too_large
    if chosen.name != "reject":
        assert {request.number for request in by_ending[FinishReason.REJECTED]} == too_large
    assert not by_ending[FinishReason.EVICTED] or chosen.name == "evict"

    # Tokens: prompts are computed once, and again what was lost.
    restarts = work.displacements - len(by_ending[FinishReason.EVICTED])
    if chosen.displaced.value != "offloaded":
        assert work.prefilled_tokens == sum(request.prompt_tokens for request in started) + work.recomputed_tokens + restarts
    if not restarts:
        assert work.recomputed_tokens == work.recompute_s == 0

    # Bytes: what went out came back.
    assert work.fetched_bytes == work.offloaded_bytes
    assert chosen.name == "offload" or work.offloaded_bytes == 0

    # Seconds: the server is busy or idle, and the answers came in their order.
    assert work.prefill_s + work.copying_s <= pressed.now_s + 1e-6
    assert 0 <= work.recompute_s <= work.prefill_s
    for request in started:
        assert 0 <= request.wait_s <= request.ttft_s <= request.ended_s - request.arrival_s + 1e-9


def big(name: str, *, users: int, cache_tokens: int = 10_000) -> LoadOutcome:
    """Of requests of 1,000 tokens and 100 more."""
    lower = LowerTier(name="DRAM", capacity_bytes=10**9, bytes_per_s=1e6)
    serving = ServingModel(times=QuickTimes(), cache_tokens=cache_tokens, kv_bytes_per_token=BYTES_PER_TOKEN, lower_tiers=(lower,))
    load = UserLoad(users=users, context_tokens=1000, output_tokens=100, think_s=4.0, duration_s=300.0)
    return simulate_load(serving, strategy(name), load, Random(5))


def test_where_all_fit_strategies_make_no_difference() -> None:
    found = [replace(big(each.name, users=5), strategy="") for each in STRATEGIES]
    assert all(each == found[0] for each in found)
    assert found[0].completed == found[0].requests > 100
    assert found[0].displacements == found[0].rejected == found[0].evicted == 0


def test_under_pressure_each_has_its_price() -> None:
    found = {each.name: big(each.name, users=20, cache_tokens=4000) for each in STRATEGIES}
    reject, queue, evict = found["reject"], found["queue"], found["evict"]
    recompute, offload, combined = found["recompute"], found["offload"], found["queue+recompute"]
    assert reject.rejected > 100
    assert evict.evicted > 100
    for waiting in (queue, recompute, offload, combined):
        assert waiting.completed == waiting.requests
    assert queue.ttft.mean_s > 3 * offload.ttft.mean_s
    assert queue.ttft.mean_s > 3 * recompute.ttft.mean_s
    assert recompute.recompute_share > 0.2 > combined.recompute_share
    assert offload.recomputed_tokens == 0
    assert offload.offloaded_bytes == offload.fetched_bytes > 0
    assert offload.copying_s == pytest.approx((offload.offloaded_bytes + offload.fetched_bytes) / 1e6)
    assert offload.goodput_tokens_per_s > recompute.goodput_tokens_per_s > evict.goodput_tokens_per_s
    assert queue.goodput_tokens_per_s >= recompute.goodput_tokens_per_s


def test_simulate_load_is_deterministic_by_seed() -> None:
    load = UserLoad(users=4, context_tokens=20, output_tokens=5, duration_s=100)
    first, again, other = (simulate_load(server(50), strategy("recompute"), load, Random(seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_figures_are_of_the_requests() -> None:
    """One user, one request: 8 s for the prompt, a step for each of the 4 further tokens."""
    load = UserLoad(users=1, context_tokens=8, output_tokens=5, spread=0, think_s=1.0, duration_s=5.0)
    asked = Users(load, Random(3)).take()
    found = simulate_load(server(12), strategy("queue"), load, Random(3))
    assert (found.requests, found.completed, found.users) == (1, 1, 1)
    assert found.wait == MeanAndTail(0.0, 0.0)
    assert found.ttft == MeanAndTail(8.0, 8.0)
    assert found.latency == MeanAndTail(8.5, 8.5)
    assert found.duration_s == asked.arrival_s + 8.5
    assert found.goodput_tokens_per_s == pytest.approx(5 / found.duration_s)
    assert found.as_dict()["ttft"] == {"mean_s": 8.0, "p99_s": 8.0}


def test_nobody_who_asks_in_time_is_no_outcome_to_divide_by() -> None:
    found = simulate_load(
        server(12), strategy("queue"), UserLoad(users=1, context_tokens=8, output_tokens=5, think_s=1e4, duration_s=1e-6), Random(3)
    )
    assert (found.requests, found.duration_s, found.goodput_tokens_per_s, found.recompute_share) == (0, 0.0, 0.0, 0.0)
    assert found.latency == MeanAndTail(0.0, 0.0)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300))
def test_p99_is_the_least_value_99_percent_do_not_exceed(durations_s: list[float]) -> None:
    found = MeanAndTail.of(durations_s)
    assert found.p99_s == min(x for x in durations_s if sum(y <= x for y in durations_s) >= 0.99 * len(durations_s))
    assert found.mean_s == pytest.approx(sum(durations_s) / len(durations_s))
