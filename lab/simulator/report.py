"""Results of a simulation: latencies, goodput, hits, bytes, stages and GPU utilisation."""

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
    """Mean and percentiles of a duration, in seconds; all 0 without samples."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float

    @classmethod
    def of(cls, gaps: Gaps) -> "DurationSummary":
        return cls(gaps.mean_s, *gaps.percentiles_s((0.5, 0.9, 0.99)))


@dataclass(frozen=True, slots=True)
class SimulationSample:
    """Load of both pools at a point in time, as means over their instances."""

    at_s: float
    prefill_queue_s: float
    """Time until a new prompt could start."""
    decode_tbt_s: float
    """Step time of the current batches; 0 for an empty one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """Results of one simulation. Unnamed counts are of requests; ratios are in [0, 1]."""

    requests: int
    finished: int
    rejected: Mapping[str, int]
    """By reason."""
    wasted_prefills: int
    """Requests that were rejected after their prefill."""
    duration_s: float
    """From the first request to the last token or rejection."""
    ttft: DurationSummary
    tbt: DurationSummary
    """Time between tokens, over all tokens."""
    token: DurationSummary
    """Mean time between tokens of a request, over all requests."""
    in_time: int
    """Requests with TTFT and mean time between tokens within the SLO."""
    goodput_per_s: float
    """`in_time` per second."""
    output_tokens_per_s: float
    hit_ratio_blocks: float
    """Cached leading blocks at the start of prefills, fetched ones included, over all blocks."""
    hit_ratio_tokens: float
    fetched_bytes: int
    """Prefixes fetched between prefill instances."""
    streamed_bytes: int
    """KV caches sent to decode instances."""
    loaded_bytes: int
    """Prefixes loaded from DRAM to GPU memory."""
    stages_s: Mapping[str, float]
    """Stage -> mean over finished requests; they sum to the mean latency."""
    prefill_mfu: float
    """Operations done over peak in the busy time; the decode pool likewise."""
    decode_mfu: float
    prefill_utilisation: float
    """Share of time that the instances are busy."""
    decode_utilisation: float
    samples: Sequence[SimulationSample]
    ttft_points: Sequence[tuple[float, float]]
    """Cumulative distribution: (seconds, share of requests)."""
    tbt_points: Sequence[tuple[float, float]]
    """Cumulative distribution: (seconds, share of tokens)."""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields without the curves, for --json."""
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
    """Compute the report of jobs that are all finished or rejected."""
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
    """Mean of each stage, in the order of STAGES."""
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
