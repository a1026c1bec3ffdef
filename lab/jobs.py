"""Jobs of the lab and their result rows, as values that can be sent to worker processes (runs.py)."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.kvcache.traces.mooncake import TraceRequest
from kvstore.lab.accesses import belady_hits, flatten
from kvstore.lab.hints import HintedReplay
from kvstore.lab.home_pool import HomePool, HomePoolOptions
from kvstore.lab.pools import Routing, compare
from kvstore.lab.replay import CacheReplay
from kvstore.lab.tiers import TwoTiers


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """Result of one policy at one capacity. Hits are prefix hits: blocks before each prompt's first miss."""

    policy: str
    capacity_blocks: int
    prefix_hit_ratio: float
    hits: int
    blocks: int


@dataclass(frozen=True, slots=True)
class TierRow:
    """Result of one policy over DRAM and NVMe. Prefix hits count for the fastest tier that had the block."""

    policy: str
    dram_blocks: int
    nvme_blocks: int
    prefix_hit_ratio: float
    dram_hits: int
    nvme_hits: int
    blocks: int
    demotions: int
    promotions: int
    evictions: int


@dataclass(frozen=True, slots=True)
class PoolRow:
    """Comparison of one pool with local caches of the same total size, for one routing of prompts."""

    policy: str
    routing: str
    instances: int
    blocks_per_instance: int
    pooled_prefix_hit_ratio: float
    local_prefix_hit_ratio: float
    gain: float | None
    """Pooled over local; None if the local caches had no hit."""
    blocks: int


@dataclass(frozen=True, slots=True)
class HomePoolRow:
    """Comparison of several nodes whose memory is one pool by home copies with one node of the same total size."""

    policy: str
    shares: tuple[float, ...]
    """Of the prompts at each node."""
    blocks_per_node: int
    nvme_blocks_per_node: int
    is_routed: bool
    """Prompts go to the node that holds most of their beginning."""
    is_shared: bool
    """Policies exchange what they learn."""
    one_node_prefix_hit_ratio: float
    prefix_hit_ratio: float
    local_share: float
    """Share of the prefix hits that the prompt's own node had."""
    copies_per_hit: float
    blocks: int


@dataclass(frozen=True, slots=True)
class HintRow:
    """Prefix hit ratios of one policy at one capacity with hints from a share of the sessions."""

    policy: str
    capacity_blocks: int
    share: float
    """Sessions that gave hints."""
    unhinted: float
    """The ratio without hints."""
    true_hints: float
    half_true: float
    """With hints of which half are random."""
    random_hints: float
    belady: float
    gain: float | None
    """Part of the way from `unhinted` to `belady` that is gone with true hints; None if there is no way."""


Row = PolicyRow | TierRow | PoolRow | HomePoolRow | HintRow


@dataclass(frozen=True, slots=True)
class PolicyJob:
    policy: str
    capacity_blocks: int

    def run(self, requests: Sequence[TraceRequest]) -> PolicyRow:
        counts = CacheReplay(self.policy, self.capacity_blocks).run(requests)
        return PolicyRow(self.policy, self.capacity_blocks, counts.prefix_hit_ratio, counts.prefix_hits, counts.blocks)


@dataclass(frozen=True, slots=True)
class TierJob:
    policy: str
    dram_blocks: int
    nvme_blocks: int

    def run(self, requests: Sequence[TraceRequest]) -> TierRow:
        counts = TwoTiers(self.policy, dram_blocks=self.dram_blocks, nvme_blocks=self.nvme_blocks).run(requests)
        return TierRow(
            self.policy,
            self.dram_blocks,
            self.nvme_blocks,
            counts.prefix_hit_ratio,
            counts.dram_hits,
            counts.nvme_hits,
            counts.blocks,
            counts.demotions,
            counts.promotions,
            counts.evictions,
        )


@dataclass(frozen=True, slots=True)
class PoolJob:
    policy: str
    routing: Routing
    instances: int
    blocks_per_instance: int

    def run(self, requests: Sequence[TraceRequest]) -> PoolRow:
        found = compare(
            requests,
            policy=self.policy,
            instances=self.instances,
            blocks_per_instance=self.blocks_per_instance,
            routing=self.routing,
        )
        return PoolRow(
            self.policy,
            self.routing.value,
            self.instances,
            self.blocks_per_instance,
            found.pooled.prefix_hit_ratio,
            found.local.prefix_hit_ratio,
            found.gain,
            found.local.blocks,
        )


@dataclass(frozen=True, slots=True)
class HomePoolJob:
    policy: str
    blocks_per_node: int
    nvme_blocks_per_node: int
    """0 for nodes of one tier."""
    options: HomePoolOptions

    def run(self, requests: Sequence[TraceRequest]) -> HomePoolRow:
        options, blocks, nvme_blocks = self.options, self.blocks_per_node, self.nvme_blocks_per_node
        found = HomePool(self.policy, blocks, options, nvme_blocks=nvme_blocks).run(requests)
        one: TwoTiers | CacheReplay
        if nvme_blocks:
            one = TwoTiers(self.policy, dram_blocks=len(options.shares) * blocks, nvme_blocks=len(options.shares) * nvme_blocks)
        else:
            one = CacheReplay(self.policy, len(options.shares) * blocks)
        return HomePoolRow(
            self.policy,
            tuple(options.shares),
            blocks,
            nvme_blocks,
            options.is_routed,
            options.is_shared,
            one.run(requests).prefix_hit_ratio,
            found.prefix_hit_ratio,
            found.local_share,
            found.copies_per_hit,
            found.blocks,
        )


@dataclass(frozen=True, slots=True)
class HintJob:
    policy: str
    capacity_blocks: int
    share: float

    def run(self, requests: Sequence[TraceRequest]) -> HintRow:
        size = self.capacity_blocks
        unhinted = CacheReplay(self.policy, size).run(requests).prefix_hit_ratio
        true, half_true, wrong = (
            HintedReplay(self.policy, size, requests, share=self.share, accuracy=accuracy).run(requests).prefix_hit_ratio
            for accuracy in (1.0, 0.5, 0.0)
        )
        accesses = flatten(requests)
        belady = belady_hits(accesses, size) / len(accesses)
        gain = (true - unhinted) / (belady - unhinted) if belady > unhinted else None
        return HintRow(self.policy, size, self.share, unhinted, true, half_true, wrong, belady, gain)


Job = PolicyJob | TierJob | PoolJob | HomePoolJob | HintJob
