"""What a simulation found, as figures: latencies, goodput, hits, bytes, stages, use of the GPUs. How they are drawn is the client's."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from kvstore.lab.simulator.cluster import SimulatedCluster
from kvstore.lab.simulator.decode import Gaps
from kvstore.lab.simulator.job import SimulatedJob
from kvstore.lab.simulator.plan import InstanceModel, SimulationPlan

STAGES: Final = ("schedule", "queue", "transfer", "load cache", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class DurationSummary:
    """Mean and percentiles of a duration, in seconds; all 0 where nothing was measured."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float

    @classmethod
    def of(cls, gaps: Gaps) -> "DurationSummary":
        return cls(gaps.mean_s, *gaps.percentiles_s((0.5, 0.9, 0.99)))


@dataclass(frozen=True, slots=True)
class SimulationSample:
    """The load of both pools at one moment: means over their instances."""

    at_s: float
    prefill_queue_s: float
    """Until an instance could start on something new."""
    decode_tbt_s: float
    """Of the batches as they are; 0 for an empty one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """One simulation. Counts are of requests unless their name says otherwise; ratios are shares of 1."""

    requests: int
    finished: int
    rejected: Mapping[str, int]
    """By reason."""
    wasted_prefills: int
    """Of those that were rejected after their prefill."""
    duration_s: float
    """From the first request to the last token or rejection."""
    ttft: DurationSummary
    tbt: DurationSummary
    """Over all tokens but first ones: the time since the token before."""
    token: DurationSummary
    """Over requests: their mean time between tokens."""
    in_time: int
    """Finished with their TTFT and their mean time between tokens within the SLO."""
    goodput_per_s: float
    """These, a second."""
    output_tokens_per_s: float
    hit_ratio_blocks: float
    """Leading blocks that were there when a prefill began, fetched ones included, over all blocks."""
    hit_ratio_tokens: float
    fetched_bytes: int
    """Of prefixes, between instances that compute prompts."""
    streamed_bytes: int
    """Of KV caches, to where they are decoded."""
    loaded_bytes: int
    """Of prefixes, from DRAM to GPU memory."""
    stages_s: Mapping[str, float]
    """Mean over finished requests of what shows in their latency; they add up to it."""
    prefill_mfu: float
    """Operations done over those possible in the time spent on them; the decode pool likewise."""
    decode_mfu: float
    prefill_utilisation: float
    """Share of the time that the instances spend so."""
    decode_utilisation: float
    samples: Sequence[SimulationSample]
    ttft_points: Sequence[tuple[float, float]]
    """(seconds, share of requests not above), for a curve."""
    tbt_points: Sequence[tuple[float, float]]
    """(seconds, share of tokens not above)."""

    def as_dict(self) -> dict[str, Any]:
        """For --json: the figures without the curves."""
        found = asdict(self)
        for curve in ("samples", "ttft_points", "tbt_points"):
            del found[curve]
        return found


def make_report(
    plan: SimulationPlan,
    machine: InstanceModel,
    cluster: SimulatedCluster,
    jobs: Sequence[SimulatedJob],
    samples: Sequence[SimulationSample],
    duration_s: float,
) -> SimulationReport:
    """Of jobs that are all finished or rejected."""
    done = [job for job in jobs if job.rejection is None]
    computed = [job for job in jobs if job.first_token_s]
    ttft, token = Gaps(), Gaps()
    for job in done:
        ttft.add(job.ttft_s, 1)
        token.add(job.tokens_s, 1 if job.output_tokens > 1 else 0)
    in_time = sum(job.ttft_s <= plan.slo.ttft_s and job.tokens_s <= plan.slo.tbt_s for job in done)
    seconds = duration_s or math.inf
    return SimulationReport(
        requests=len(jobs),
        finished=len(done),
        rejected=dict(Counter(job.rejection.reason.value for job in jobs if job.rejection is not None)),
        wasted_prefills=len(computed) - len(done),
        duration_s=duration_s,
        ttft=DurationSummary.of(ttft),
        tbt=DurationSummary.of(cluster.gaps),
        token=DurationSummary.of(token),
        in_time=in_time,
        goodput_per_s=in_time / seconds,
        output_tokens_per_s=sum(job.output_tokens for job in done) / seconds,
        hit_ratio_blocks=_ratio(sum(job.prefix_blocks for job in computed), sum(len(job.request.keys) for job in computed)),
        hit_ratio_tokens=_ratio(sum(job.prefix_tokens for job in computed), sum(job.request.input_tokens for job in computed)),
        fetched_bytes=cluster.fetched_bytes,
        streamed_bytes=cluster.streamed_bytes,
        loaded_bytes=sum(job.prefix_tokens for job in computed) * machine.kv_bytes_per_token,
        stages_s=_stages(done),
        **_use(machine, cluster, seconds),
        samples=tuple(samples),
        ttft_points=ttft.points(),
        tbt_points=cluster.gaps.points(),
    )


def _stages(done: Sequence[SimulatedJob]) -> dict[str, float]:
    """Means, in the order of STAGES."""
    sums = dict.fromkeys(STAGES, 0.0)
    for job in done:
        parts = (job.schedule_s, job.queue_s, job.fetch_s + job.stream_s, job.load_s, job.prefill_s, job.decode_s)
        for name, part_s in zip(STAGES, parts, strict=True):
            sums[name] += part_s
    return {name: _ratio(total_s, len(done)) for name, total_s in sums.items()}


def _use(machine: InstanceModel, cluster: SimulatedCluster, seconds: float) -> dict[str, float]:
    prefill_s, decode_s = (sum(part.busy_s for part in pool) for pool in (cluster.prompters, cluster.loops))
    prefill_flops, decode_flops = (sum(part.flops for part in pool) for pool in (cluster.prompters, cluster.loops))
    return {
        "prefill_mfu": _ratio(prefill_flops, prefill_s * machine.peak_flops_per_s),
        "decode_mfu": _ratio(decode_flops, decode_s * machine.peak_flops_per_s),
        "prefill_utilisation": prefill_s / seconds / len(cluster.prompters),
        "decode_utilisation": decode_s / seconds / len(cluster.loops),
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
