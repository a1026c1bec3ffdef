"""Capacity plan of a model, its GPUs and its users: capacity by tier, break-even of reuse, strategies for a full cache, trace hits.

Everything is computed, nothing measured. Sizes cover all models of kvcache/models/spec.py; times only the dense models that
scheduler/estimators/analytic.py describes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from kvstore.kvcache.codecs.schemes import NONE
from kvstore.kvcache.models.facts import ModelFacts
from kvstore.kvcache.models.spec import CacheSpec
from kvstore.kvcache.traces.mooncake import TraceRequest
from kvstore.lab.jobs import PolicyJob, PolicyRow
from kvstore.lab.pressure.capacity import DEFAULT_RESERVE_BYTES, HbmCapacity, TierCapacity, hbm_capacity, tier_capacities
from kvstore.lab.pressure.load import UserLoad
from kvstore.lab.pressure.model import LoadOutcome, simulate_load
from kvstore.lab.pressure.strategies import STRATEGIES, LowerTier, QuantisedTimes, ServingModel
from kvstore.lab.runs import run_jobs
from kvstore.protocol.errors import InvalidArgument
from kvstore.scheduler.estimators.analytic import DEFAULT_HBM_EFFICIENCY, DEFAULT_MFU, AnalyticModel, GpuFacts
from kvstore.scheduler.reuse import break_even
from kvstore.tiers.policies.by_name import DEFAULT_POLICY

PREFIX_TOKENS: Final = (512, 2048, 8192, 32768, 131072)
"""Prefix lengths for which fetching is compared with computing, in addition to the plan's context."""
LOAD_LEVELS: Final = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
"""Multiples of the plan's users, for curves."""

TRACE_BLOCK_TOKENS: Final = 512
"""Tokens of a block of the public traces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """Inputs of a capacity plan. Raises InvalidArgument unless the NIC's bandwidth is positive."""

    model: ModelFacts
    gpu: GpuFacts
    spec: CacheSpec
    """The model's cache as stored."""
    load: UserLoad
    lower_tiers: Sequence[LowerTier]
    """Below HBM, fastest first."""
    nic_bytes_per_s: float
    """From other nodes, all GPUs together."""
    tp: int = 1
    pp: int = 1
    weight_bytes: int = 0
    """Of the whole model; 0: sum of its matrices."""
    reserve_bytes: int = DEFAULT_RESERVE_BYTES
    mfu: float = DEFAULT_MFU
    hbm_efficiency: float = DEFAULT_HBM_EFFICIENCY
    seed: int = 0
    """Seed of the simulated users."""

    def __post_init__(self) -> None:
        if not self.nic_bytes_per_s > 0:
            raise InvalidArgument(f"nic_bytes_per_s is {self.nic_bytes_per_s:g}: it must be above 0")

    @property
    def gpus(self) -> int:
        return self.tp * self.pp

    @property
    def bandwidths(self) -> dict[str, float]:
        """Source of a prefix (lower tiers, NIC) -> bytes per second."""
        return {**{tier.name: tier.bytes_per_s for tier in self.lower_tiers}, "NIC": self.nic_bytes_per_s}

    @property
    def tier_sizes(self) -> dict[str, int]:
        """Bytes of the tiers below HBM."""
        return {tier.name: tier.capacity_bytes for tier in self.lower_tiers}


@dataclass(frozen=True, slots=True, kw_only=True)
class Computing:
    """Cost of computing a prefix instead of fetching it."""

    seconds: float
    """By the layer model."""
    needed_bytes_per_s: float
    """Break-even bandwidth: fetching takes as long."""
    inequality_bytes_per_s: float
    """Break-even bandwidth by Mooncake's inequality, which uses four figures of the model and peak FLOPS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """A prefix of one length: fetched against computed."""

    prefix_tokens: int
    size_bytes: float
    fetch_s: Mapping[str, float]
    """Source -> seconds."""
    compute: Computing | None
    """None for a model that the layer model does not describe."""

    def pays(self, source: str) -> bool | None:
        """Return whether fetching from `source` is faster than computing; None if the compute time is unknown."""
        return None if self.compute is None else self.fetch_s[source] < self.compute.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """Result of `make_plan`."""

    setup: PlanInputs
    hbm: HbmCapacity
    tiers: Sequence[TierCapacity]
    reuse: Sequence[Reuse]
    outcomes: Sequence[LoadOutcome]
    """One per strategy; empty without times."""
    no_times: str
    """Reason why there are no times, or ""."""


def make_plan(setup: PlanInputs) -> CapacityPlan:
    """Compute the plan. Raises ConfigError for a model that does not fit, InvalidArgument for figures out of range."""
    hbm = capacity_of(setup)
    return CapacityPlan(
        setup=setup,
        hbm=hbm,
        tiers=tier_capacities(hbm, setup.tier_sizes, setup.load.context_tokens),
        reuse=[reuse_of(setup, tokens) for tokens in sorted({*PREFIX_TOKENS, setup.load.context_tokens})],
        outcomes=outcomes_of(setup, setup.load.users),
        no_times=why_no_times(setup.model),
    )


def capacity_of(setup: PlanInputs) -> HbmCapacity:
    """Return the HBM capacity. Raises ConfigError for a model that does not fit, InvalidArgument if `tp` or `pp` does not divide it."""
    return hbm_capacity(
        setup.spec,
        weight_bytes=setup.weight_bytes or setup.model.weight_bytes,
        hbm_bytes=setup.gpu.hbm_bytes,
        tp=setup.tp,
        pp=setup.pp,
        reserve_bytes=setup.reserve_bytes,
    )


def why_no_times(model: ModelFacts) -> str:
    """Return why the layer model does not describe the model, or ""."""
    if not model.specials:
        return ""
    return f"no times: {model.name} has {' and '.join(model.specials)}, which the layer model does not describe"


def reuse_of(setup: PlanInputs, prefix_tokens: int) -> Reuse:
    """Compare fetching with computing for a prefix of this length."""
    size_bytes = setup.spec.sequence_bytes(prefix_tokens)
    times = _times(setup)
    return Reuse(
        prefix_tokens=prefix_tokens,
        size_bytes=size_bytes,
        fetch_s={name: size_bytes / bytes_per_s for name, bytes_per_s in setup.bandwidths.items()},
        compute=None if times is None else _computing(setup, times, prefix_tokens, size_bytes),
    )


def outcomes_of(setup: PlanInputs, users: int) -> list[LoadOutcome]:
    """Simulate this number of users under each strategy. Empty without times."""
    times = _times(setup)
    if times is None:
        return []
    server = ServingModel(
        times=QuantisedTimes(times, _share(setup)),
        cache_tokens=capacity_of(setup).tokens,
        kv_bytes_per_token=setup.spec.bytes_per_token,
        lower_tiers=setup.lower_tiers,
    )
    load = replace(setup.load, users=users)
    return [simulate_load(server, strategy, load, Random(setup.seed)) for strategy in STRATEGIES]


def levels(users: int) -> list[int]:
    """Return numbers of users for curves, ascending, around the plan's."""
    return sorted({max(1, round(users * level)) for level in LOAD_LEVELS})


def users_in_hbm(plan: CapacityPlan) -> int:
    """Return how many of the plan's users have contexts that fit in HBM at once."""
    return min(plan.setup.load.users, plan.hbm.sequences(plan.setup.load.context_tokens))


def sequence_curve(setup: PlanInputs, contexts: Iterable[int]) -> dict[str, list[int]]:
    """Return tier -> sequences that it and all tiers above hold, for each context length."""
    hbm = capacity_of(setup)
    found: dict[str, list[int]] = {}
    for context_tokens in contexts:
        for tier in tier_capacities(hbm, setup.tier_sizes, context_tokens):
            found.setdefault(tier.name, []).append(tier.total_sequences)
    return found


def _computing(setup: PlanInputs, times: AnalyticModel, prefix_tokens: int, size_bytes: float) -> Computing:
    prefill_s = times.prefill_s(prefix_tokens, 0)
    return Computing(
        seconds=prefill_s,
        needed_bytes_per_s=size_bytes / prefill_s,
        inequality_bytes_per_s=break_even(prefix_tokens, setup.model) * times.peak_flops_per_s * _share(setup),
    )


def _times(setup: PlanInputs) -> AnalyticModel | None:
    """The layer model, or None if it does not describe the model."""
    if why_no_times(setup.model):
        return None
    # capacity_of checks whether the model fits, with its own reserve. Times do not depend on the size of the memory.
    enlarged = replace(setup.gpu, hbm_bytes=2 * (setup.gpu.hbm_bytes + setup.model.weight_bytes))
    return AnalyticModel(setup.model, enlarged, gpus=setup.gpus, mfu=setup.mfu, hbm_efficiency=setup.hbm_efficiency)


def _share(setup: PlanInputs) -> float:
    """Bytes of the cache as stored, over its bytes in the model's own dtype."""
    plain = CacheSpec.of_model(setup.model, block_tokens=setup.spec.block_tokens, scheme=NONE)
    return setup.spec.bytes_per_token / plain.bytes_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHits:
    """A tier's part in the prefix hits: blocks before each prompt's first miss."""

    name: str
    total_blocks: int
    """Capacity of this tier and all above."""
    total_ratio: float
    """Prefix hit ratio of one cache with `total_blocks`."""
    added_ratio: float
    """`total_ratio` minus that of the tier above."""


def blocks_of(plan: CapacityPlan) -> dict[str, int]:
    """Return tier -> trace blocks that it and all tiers above hold."""
    block_bytes = replace(plan.setup.spec, block_tokens=TRACE_BLOCK_TOKENS).block_bytes
    return {tier.name: tier.total_bytes // block_bytes for tier in plan.tiers}


def trace_hits(plan: CapacityPlan, requests: Sequence[TraceRequest], *, on_done: Callable[[], None] = lambda: None) -> list[TraceHits]:
    """Replay the trace through a cold cache of the size of HBM, of HBM and the next tier, and so on, with a node's default policy.

    Tiers are treated as one cache whose fastest part has the hottest blocks. HBM's whole KV cache counts, as if no request were being
    served. `on_done` and errors are those of lab.runs.run_jobs.
    """
    blocks = blocks_of(plan)
    # More capacity than the trace's blocks adds nothing, and capacity 0 has no hits.
    unique = len({block for request in requests for block in request.hash_ids})
    sizes = {min(count, unique) for count in blocks.values()} - {0}
    rows = run_jobs([PolicyJob(DEFAULT_POLICY, size) for size in sorted(sizes)], requests, on_done=on_done)
    ratios = {row.capacity_blocks: row.prefix_hit_ratio for row in rows if isinstance(row, PolicyRow)}
    found: list[TraceHits] = []
    above = 0.0
    for name, count in blocks.items():
        ratio = ratios.get(min(count, unique), 0.0)
        found.append(TraceHits(name=name, total_blocks=count, total_ratio=ratio, added_ratio=ratio - above))
        above = ratio
    return found
