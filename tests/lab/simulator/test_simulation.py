"""Promises of simulation.py: determinism, conservation, and that what the scheduler foresees is what then takes place."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.kvcache.traces.mooncake import TraceRequest
from kvstore.kvcache.traces.named import generate
from kvstore.lab.simulator.plan import InstanceModel, Mode, SimulationPlan
from kvstore.lab.simulator.report import SimulationReport
from kvstore.lab.simulator.simulation import MAX_SAMPLES, Scenario, Simulation
from kvstore.protocol.errors import ConfigError, InvalidArgument, TraceError
from kvstore.scheduler.admission import AdmissionPolicy, AdmitAll, RejectEarly, RejectLate
from kvstore.scheduler.baselines import DISPATCHERS, make_dispatcher
from kvstore.scheduler.dispatcher import Estimators
from kvstore.scheduler.estimators.interface import BandwidthTransfer
from kvstore.scheduler.request import Reason, Slo
from tests.lab.simulator.parts import RoundTimes, asked, machine

TRACE = [asked(100 * number, [0, number + 1], output=20) for number in range(20)]
CONVERSATIONS = list(islice(generate(seed=3), 300))
SMALL = machine(times=RoundTimes(context_s=1e-8), capacity_tokens=400_000, send_bytes_per_s=float(1 << 30), load_bytes_per_s=float(1 << 30))


def test_names_make_a_machine() -> None:
    machine = Scenario().machine()
    assert (machine.layers, machine.kv_bytes_per_token) == (80, 327_680)
    assert (machine.send_bytes_per_s, machine.load_bytes_per_s, machine.peak_flops_per_s) == (100e9, 200e9, 8 * 312e12)
    assert Scenario(send_bytes_per_s=5e9).machine().send_bytes_per_s == 5e9


def test_algorithm_1_rejects_by_slo_only_when_alone() -> None:
    impossible = SimulationPlan(slo=Slo(1e-6, 1e-6))
    assert Scenario(plan=impossible).run(TRACE).rejected == {Reason.TTFT.value: 20}
    free = Scenario(plan=impossible, admission="all").run(TRACE)
    assert (free.rejected, free.in_time) == ({}, 0)
    assert Scenario(plan=impossible, admission="late").run(TRACE).rejected == {Reason.PREFILL_LOAD.value: 20}


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"model": "none"}, ConfigError, "none"),
        ({"gpu": "none"}, ConfigError, "none"),
        ({"gpus": 1}, ConfigError, "does not fit on 1 x A800"),
        ({"dispatcher": "none"}, ConfigError, "none"),
        ({"admission": "none"}, ConfigError, "admission is 'none': it must be one of slo, all, late"),
        ({"plan": SimulationPlan(policy="none")}, ConfigError, "none"),
        ({"threshold": 0.5}, InvalidArgument, "at least 1"),
        ({"send_bytes_per_s": 0.0}, InvalidArgument, "send_bytes_per_s is 0"),
    ],
)
def test_what_is_not_known_is_said_before_anything_runs(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Scenario(**changed).simulation()


def test_what_knows_more_answers_sooner() -> None:
    """The order of the published comparison, on conversations with the statistics of its trace."""
    requests = list(islice(generate(seed=1), 1200))
    plan = SimulationPlan(prefill=8, decode=8, cache_blocks=2880, rate=1.2)
    names = ("kvcache_centric", "local_cache_aware", "load_balancing", "random")
    means_s = [Scenario(plan=plan, dispatcher=name).run(requests).ttft.mean_s for name in names]
    assert means_s == sorted(means_s)
    assert means_s[-1] > 4 * means_s[0]


def simulation(
    plan: SimulationPlan,
    facts: InstanceModel,
    *,
    dispatcher: str = "kvcache_centric",
    admission: type[AdmissionPolicy] = AdmitAll,
    seed: int = 0,
) -> Simulation:
    estimators = Estimators(facts, facts, BandwidthTransfer(), 512 * facts.kv_bytes_per_token)
    return Simulation(plan, facts, make_dispatcher(dispatcher, estimators, seed=seed), admission(facts))


def run(requests: Sequence[TraceRequest], **plan: Any) -> tuple[Simulation, SimulationReport]:
    found = simulation(SimulationPlan(**({"prefill": 1, "decode": 1, "decision_s": 0.0} | plan)), machine())
    return found, found.run(requests)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_equal_inputs_give_equal_reports(dispatcher: str) -> None:
    plan = SimulationPlan(prefill=3, decode=2, cache_blocks=500, rate=0.2)
    first, second = (simulation(plan, SMALL, dispatcher=dispatcher, seed=7).run(CONVERSATIONS) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("admission", [AdmitAll, RejectEarly, RejectLate])
def test_every_request_ends_once_and_leaves_nothing_behind(mode: Mode, admission: type[AdmissionPolicy]) -> None:
    slo = Slo(40.0, 0.2)
    plan = SimulationPlan(mode=mode, prefill=2, decode=2, cache_blocks=300, rate=0.2, slo=slo, enforced=Slo(ttft_s=60.0), chunk_tokens=2048)
    found = simulation(plan, SMALL, admission=admission)
    report = found.run(CONVERSATIONS)
    assert report.requests == len(CONVERSATIONS) == report.finished + sum(report.rejected.values())
    assert report.finished > 50
    for job in found.jobs:
        assert (job.finish_s > 0) == (job.rejection is None)
        if job.finish_s:
            assert job.arrival_s + job.schedule_s + job.queue_s + job.fetch_s + job.load_s + job.prefill_s == pytest.approx(
                job.first_token_s
            )
            assert job.first_token_s + job.stream_s + job.decode_s == pytest.approx(job.finish_s)
            assert min(job.queue_s, job.fetch_s, job.load_s, job.prefill_s, job.stream_s, job.decode_s) > -1e-9
    check_nothing_is_left(found)


def check_nothing_is_left(found: Simulation) -> None:
    """No sequence and no token; and the index names exactly the blocks that the caches hold."""
    cluster = found.cluster
    assert [(view.batch, view.context_tokens) for view in cluster.decode_views()] == [(0, 0)] * len(cluster.decoders)
    assert [server.used_tokens for server in cluster.decoders] == [0] * len(cluster.decoders)
    assert [(view.queue_s, view.send_backlog_bytes) for view in cluster.prefill_views()] == [(0.0, 0)] * len(cluster.prompters)
    blocks = {block for job in found.jobs for block in job.request.keys}
    for block in blocks:
        assert cluster.match([block]) == [server.cache.match([block]) for server in cluster.prompters]
    assert len(cluster.index) == len({block for block in blocks if any(server.cache.match([block]) for server in cluster.prompters)})


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 3000), st.lists(st.integers(0, 5), max_size=4, unique=True), st.integers(0, 40)), max_size=25),
    st.sampled_from(Mode),
    st.sampled_from(DISPATCHERS),
    st.integers(0, 6),
)
def test_nothing_is_lost_whatever_comes(found: list[tuple[int, list[int], int]], mode: Mode, dispatcher: str, blocks: int) -> None:
    requests = [asked(at_ms, keys, output=output) for at_ms, keys, output in sorted(found)]
    plan = SimulationPlan(mode=mode, prefill=2, decode=1, cache_blocks=blocks, sample_s=1.0)
    played = simulation(plan, machine(capacity_tokens=2080), dispatcher=dispatcher)
    report = played.run(requests)
    assert report.requests == len(requests) == report.finished + sum(report.rejected.values())
    check_nothing_is_left(played)


def test_a_queue_by_hand() -> None:
    played, report = run([asked(0, [1, 2], output=5), asked(500, [3, 4]), asked(500, [5], output=2)])
    # 1 s, then 1 s, then half a second, one after the other; the last has waited 1.5 s.
    assert [job.first_token_s for job in played.jobs] == [1.0, 2.0, 2.5]
    assert [job.ttft_s for job in played.jobs] == [1.0, 1.5, 2.0]
    # A fourth of a second of the first one's cache, and four steps of 5/64 s.
    assert played.jobs[0].finish_s == 1.25 + 20 / 64
    assert report.duration_s == played.jobs[2].finish_s == 2.5 + 0.125 + 5 / 64


def test_scheduler_estimates_hold_without_interference() -> None:
    """A first prompt; one with its prefix; two at once with it, of which one fetches it; two at once without, that queue."""
    prompts = [(0, [1, 2, 3]), (20, [1, 2, 3, 4]), (40, [1, 2, 3, 5]), (40, [1, 2, 3, 6]), (60, [7, 8]), (60, [9]), (60, [10, 11])]
    found = simulation(SimulationPlan(prefill=2, decode=1, decision_s=0.0), machine(send_bytes_per_s=float(1 << 24)))
    found.run([asked(at_s * 1000, keys, output=3) for at_s, keys in prompts])
    decisions = [job.decision for job in found.jobs if job.decision is not None]
    assert [decision.ttft_s for decision in decisions] == pytest.approx([job.ttft_s for job in found.jobs])
    assert [(decision.prefill, decision.transfer_blocks) for decision in decisions][:4] == [(0, 0), (0, 0), (0, 0), (1, 3)]
    assert [job.fetch_s > 0 for job in found.jobs] == [False, False, False, True, False, False, False]
    assert [job.queue_s > 0 for job in found.jobs] == [False, False, False, False, False, False, True]


def test_what_can_never_fit_is_rejected_at_once() -> None:
    found = simulation(SimulationPlan(prefill=1, decode=1), machine(capacity_tokens=1000))
    report = found.run([asked(0, [1, 2]), asked(0, [3], output=2)])
    assert report.rejected == {Reason.CAPACITY.value: 1}
    rejection = found.jobs[0].rejection
    assert rejection is not None
    assert (rejection.value, rejection.limit) == (1025, 1000)


def test_dispatcher_and_admission_reject_by_their_limits() -> None:
    _, report = run([asked(0, [1, 2])], enforced=Slo(ttft_s=0.5))
    assert report.rejected == {Reason.TTFT.value: 1}
    promised = SimulationPlan(prefill=1, decode=1, slo=Slo(ttft_s=0.5))
    report = simulation(promised, machine(), admission=RejectEarly).run([asked(0, [1, 2])])
    assert report.rejected == {Reason.PREFILL_LOAD.value: 1}


def test_a_late_rejection_is_a_wasted_prefill() -> None:
    plan = SimulationPlan(prefill=1, decode=1, slo=Slo(tbt_s=0.06))
    report = simulation(plan, machine(), admission=RejectLate).run([asked(0, [1, 2], output=5)])
    assert (report.rejected, report.wasted_prefills, report.finished) == ({Reason.DECODE_LOAD.value: 1}, 1, 0)


def test_the_load_is_looked_at_until_all_is_done() -> None:
    _, report = run([asked(0, [1, 2], output=5), asked(0, [3, 4], output=5)], sample_s=0.5)
    assert [sample.at_s for sample in report.samples] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert [sample.prefill_queue_s for sample in report.samples] == [0.0, 1.5, 1.0, 0.5, 0.0, 0.0]
    assert [sample.decode_tbt_s for sample in report.samples] == [0.0, 0.0, 0.0, 5 / 64, 0.0, 5 / 64]


def test_a_trace_may_begin_at_any_time_and_pause_for_years() -> None:
    year_ms = 365 * 86_400_000
    played, report = run([asked(50 * year_ms, [1, 2]), asked(53 * year_ms, [3])], sample_s=1.0)
    assert [job.arrival_s for job in played.jobs] == [0.0, 3 * year_ms / 1000]
    assert MAX_SAMPLES / 2 <= len(report.samples) <= MAX_SAMPLES
    assert report.samples[0].at_s == 0.0
    assert report.samples[-1].at_s > 2 * year_ms / 1000


def test_time_that_goes_back_is_a_broken_trace() -> None:
    with pytest.raises(TraceError, match="request 3 is earlier than the one before it"):
        run([asked(0, [1]), asked(2000, [2]), asked(1000, [3])])
