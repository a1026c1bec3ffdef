"""Capacity plan of a model, its GPUs and its users: what fits, when reuse pays, what strategies do, what a trace hits. It measures nothing.

Sizes are of any model that kvcache/models/spec.py knows; times only of those that the dense layer model of
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
from kvstore.lab.pressure.model import LoadOutcome, relieve
from kvstore.lab.pressure.strategies import STRATEGIES, LowerTier, QuantisedTimes, ServingModel
from kvstore.lab.runs import run_jobs
from kvstore.protocol.errors import InvalidArgument
from kvstore.scheduler.estimators.analytic import DEFAULT_HBM_EFFICIENCY, DEFAULT_MFU, AnalyticModel, GpuFacts
from kvstore.scheduler.reuse import break_even
from kvstore.tiers.policies.by_name import DEFAULT_POLICY

PREFIX_TOKENS: Final = (512, 2048, 8192, 32768, 131072)
"""For which reuse is compared with recomputing, beside the context of the plan."""
LOAD_LEVELS: Final = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
"""Of the users of the plan, for curves."""

TRACE_BLOCK_TOKENS: Final = 512
"""Of a block of the public traces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """What is planned. Raises InvalidArgument for a bandwidth that is none."""

    model: ModelFacts
    gpu: GpuFacts
    spec: CacheSpec
    """Of the model's cache as it is stored."""
    load: UserLoad
    lower_tiers: Sequence[LowerTier]
    """Below HBM, fastest first."""
    nic_bytes_per_s: float
    """Of all GPUs together: from another node."""
    tp: int = 1
    pp: int = 1
    weight_bytes: int = 0
    """Of the whole model; 0: of all its matrices."""
    reserve_bytes: int = DEFAULT_RESERVE_BYTES
    mfu: float = DEFAULT_MFU
    hbm_efficiency: float = DEFAULT_HBM_EFFICIENCY
    seed: int = 0
    """Of what users ask."""

    def __post_init__(self) -> None:
        if not self.nic_bytes_per_s > 0:
            raise InvalidArgument(f"nic_bytes_per_s is {self.nic_bytes_per_s:g}: it must be above 0")

    @property
    def gpus(self) -> int:
        return self.tp * self.pp

    @property
    def bandwidths(self) -> dict[str, float]:
        """From where a prefix may be fetched, and at how many bytes a second."""
        return {**{tier.name: tier.bytes_per_s for tier in self.lower_tiers}, "NIC": self.nic_bytes_per_s}

    @property
    def tier_sizes(self) -> dict[str, int]:
        """Bytes of the tiers below HBM."""
        return {tier.name: tier.capacity_bytes for tier in self.lower_tiers}


@dataclass(frozen=True, slots=True, kw_only=True)
class Computing:
    """What it takes to compute a prefix instead of fetching it."""

    seconds: float
    """By the layer model."""
    needed_bytes_per_s: float
    """At which fetching takes as long."""
    inequality_bytes_per_s: float
    """The same by Mooncake's inequality, which knows four figures of the model and takes GPUs at their peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """A prefix of one length: fetched against computed."""

    prefix_tokens: int
    size_bytes: float
    fetch_s: Mapping[str, float]
    """By where it is."""
    compute: Computing | None
    """None for a model that the layer model does not describe."""

    def pays(self, source: str) -> bool | None:
        """Whether fetching from there is sooner than computing; None where that is not known."""
        return None if self.compute is None else self.fetch_s[source] < self.compute.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """What came of a setup."""

    setup: PlanInputs
    hbm: HbmCapacity
    tiers: Sequence[TierCapacity]
    reuse: Sequence[Reuse]
    outcomes: Sequence[LoadOutcome]
    """A strategy each; none where there are no times."""
    no_times: str
    """Why there are no times; empty where there are."""


def make_plan(setup: PlanInputs) -> CapacityPlan:
    """Raises ConfigError for a model that does not fit, InvalidArgument for figures that are out of range."""
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
    """Raises ConfigError for a model that does not fit, InvalidArgument if it cannot be divided so."""
    return hbm_capacity(
        setup.spec,
        weight_bytes=setup.weight_bytes or setup.model.weight_bytes,
        hbm_bytes=setup.gpu.hbm_bytes,
        tp=setup.tp,
        pp=setup.pp,
        reserve_bytes=setup.reserve_bytes,
    )


def why_no_times(model: ModelFacts) -> str:
    """What of the model the layer model does not describe; empty where it does."""
    if not model.specials:
        return ""
    return f"no times: {model.name} has {' and '.join(model.specials)}, which the layer model does not describe"


def reuse_of(setup: PlanInputs, prefix_tokens: int) -> Reuse:
    """Of a prefix of so many tokens."""
    size_bytes = setup.spec.sequence_bytes(prefix_tokens)
    times = _times(setup)
    return Reuse(
        prefix_tokens=prefix_tokens,
        size_bytes=size_bytes,
        fetch_s={name: size_bytes / bytes_per_s for name, bytes_per_s in setup.bandwidths.items()},
        compute=None if times is None else _computing(setup, times, prefix_tokens, size_bytes),
    )


def outcomes_of(setup: PlanInputs, users: int) -> list[LoadOutcome]:
    """What each strategy makes of so many users; nothing where there are no times."""
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
    return [relieve(server, strategy, load, Random(setup.seed)) for strategy in STRATEGIES]


def levels(users: int) -> list[int]:
    """Numbers of users for curves around that of a plan, ascending."""
    return sorted({max(1, round(users * level)) for level in LOAD_LEVELS})


def users_in_hbm(plan: CapacityPlan) -> int:
    """Of the plan's users, those whose contexts fit in HBM at once."""
    return min(plan.setup.load.users, plan.hbm.sequences(plan.setup.load.context_tokens))


def sequence_curve(setup: PlanInputs, contexts: Iterable[int]) -> dict[str, list[int]]:
    """By tier, sequences that it and all above it hold, at each of these contexts."""
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
    """None for a model that it does not describe."""
    if why_no_times(setup.model):
        return None
    # Whether the model fits is capacity_of's to say, by a reserve of its own. Times do not depend on how large the memory is.
    roomy = replace(setup.gpu, hbm_bytes=2 * (setup.gpu.hbm_bytes + setup.model.weight_bytes))
    return AnalyticModel(setup.model, roomy, gpus=setup.gpus, mfu=setup.mfu, hbm_efficiency=setup.hbm_efficiency)


def _share(setup: PlanInputs) -> float:
    """Bytes of the cache as it is stored over those of the model's own dtype."""
    plain = CacheSpec.of_model(setup.model, block_tokens=setup.spec.block_tokens, scheme=NONE)
    return setup.spec.bytes_per_token / plain.bytes_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHits:
    """A tier's part in the prefix hits: blocks before each prompt's first miss."""

    name: str
    total_blocks: int
    """That it and all tiers above hold."""
    total_ratio: float
    """Of the trace's blocks, hit in one cache of so many."""
    added_ratio: float
    """More than the tiers above hit."""


def blocks_of(plan: CapacityPlan) -> dict[str, int]:
    """By tier the trace's blocks that it and all above it hold."""
    block_bytes = replace(plan.setup.spec, block_tokens=TRACE_BLOCK_TOKENS).block_bytes
    return {tier.name: tier.total_bytes // block_bytes for tier in plan.tiers}


def trace_hits(plan: CapacityPlan, requests: Sequence[TraceRequest], *, on_done: Callable[[], None] = lambda: None) -> list[TraceHits]:
    """The trace through a cold cache as large as HBM, as HBM and the next tier, and so on, under the policy that a node has by default.

    Tiers in turn are taken for one cache that keeps what is used most in its fastest part. All of HBM's room for KV cache counts, as if
    no request were being served. `on_done` as in lab's run_jobs. Raises what run_jobs raises.
    """
    blocks = blocks_of(plan)
    # A cache with room for all is as good as one with more, and one without room for a block has no hit.
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
