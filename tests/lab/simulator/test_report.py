"""Promises of report.py, by hand-made jobs in a cluster that did nothing itself."""

import math

from kvstore.lab.simulator.cluster import Callbacks, SimulatedCluster, make_cluster
from kvstore.lab.simulator.job import EventQueue, SimulatedJob
from kvstore.lab.simulator.plan import SimulationPlan
from kvstore.lab.simulator.report import STAGES, DurationSummary, SimulationReport, SimulationSample, make_report
from kvstore.scheduler.request import Reason, Rejection, Slo
from tests.lab.simulator.parts import job, machine

PLAN = SimulationPlan(prefill=2, decode=1, slo=Slo(2.0, 0.5))


def idle() -> SimulatedCluster:
    return make_cluster(PLAN, machine(), EventQueue(), Callbacks(lambda found: True, lambda found: None))


def done(number: int, *, first_s: float, finish_s: float, output: int = 5) -> SimulatedJob:
    found = job(number, keys=[1, 2], tokens=1000, output=output)
    found.schedule_s, found.queue_s, found.fetch_s, found.load_s = 0.25, 0.25, 0.125, 0.125
    found.stream_s = 0.125
    found.prefill_s = first_s - 0.75
    found.decode_s = finish_s - first_s - 0.125
    found.first_token_s, found.finish_s = first_s, finish_s
    return found


def make(cluster: SimulatedCluster, jobs: list[SimulatedJob], *, duration_s: float = 10.0) -> SimulationReport:
    return make_report(PLAN, machine(), cluster, jobs, [SimulationSample(0.0, 1.0, 3.0)], duration_s)


def test_only_what_is_finished_in_time_is_goodput() -> None:
    late = done(1, first_s=2.5, finish_s=3.0)
    slow = done(2, first_s=1.0, finish_s=4.0)
    single = done(3, first_s=2.0, finish_s=2.0, output=1)
    report = make(idle(), [done(0, first_s=1.0, finish_s=3.0), late, slow, single])
    assert (report.requests, report.finished, report.in_time, report.goodput_per_s) == (4, 4, 2, 0.2)
    assert report.output_tokens_per_s == 1.6
    assert report.ttft == DurationSummary(6.5 / 4, 1.0, 2.5, 2.5)
    assert report.token == DurationSummary((0.125 + 0.5 + 0.75) / 3, 0.5, 0.75, 0.75)


def test_stages_add_up_to_the_latency() -> None:
    report = make(idle(), [done(0, first_s=1.0, finish_s=3.0), done(1, first_s=2.0, finish_s=6.0)])
    assert tuple(report.stages_s) == STAGES
    assert report.stages_s["transfer"] == 0.25
    assert sum(report.stages_s.values()) == 4.5


def test_report_counts_rejections_and_wasted_prefills() -> None:
    early, wasted = job(1), done(2, first_s=1.0, finish_s=0.0)
    early.rejection = Rejection(Reason.TTFT)
    wasted.rejection = Rejection(Reason.DECODE_LOAD)
    wasted.prefix_blocks, wasted.prefix_tokens = 1, 512
    report = make(idle(), [done(0, first_s=1.0, finish_s=3.0), early, wasted])
    assert (report.requests, report.finished, report.wasted_prefills) == (3, 1, 1)
    assert report.rejected == {"ttft": 1, "decode_load": 1}
    # Two prompts were computed, of two blocks and 1000 tokens each.
    assert (report.hit_ratio_blocks, report.hit_ratio_tokens, report.loaded_bytes) == (0.25, 0.256, 512 * 1024)


def test_use_is_a_share_of_what_the_pools_could_do() -> None:
    cluster = idle()
    cluster.prompters[0].busy_s, cluster.prompters[0].flops = 4.0, 2e7
    cluster.loops[0].busy_s, cluster.loops[0].flops = 5.0, 1e6
    report = make(cluster, [])
    assert (report.prefill_mfu, report.decode_mfu) == (0.5, 0.02)
    assert (report.prefill_utilisation, report.decode_utilisation) == (0.2, 0.5)


def test_of_nothing_every_figure_is_0() -> None:
    report = make(idle(), [], duration_s=0.0)
    assert (report.goodput_per_s, report.prefill_mfu, report.prefill_utilisation, report.hit_ratio_blocks) == (0.0, 0.0, 0.0, 0.0)
    assert set(report.stages_s.values()) == {0.0}
    assert report.ttft == DurationSummary(0.0, 0.0, 0.0, 0.0)


def test_as_json_it_has_every_figure_and_no_curve() -> None:
    report = make(idle(), [done(0, first_s=1.0, finish_s=3.0)])
    found = report.as_dict()
    assert found["ttft"] == {"mean_s": 1.0, "p50_s": 1.0, "p90_s": 1.0, "p99_s": 1.0}
    assert not {"samples", "ttft_points", "tbt_points"} & set(found)
    assert all(math.isfinite(value) for value in found.values() if isinstance(value, float))
    assert report.ttft_points == [(1.0, 1.0)]
    assert report.samples == (SimulationSample(0.0, 1.0, 3.0),)
