"""The lab's rows as tables for people and as JSON for scripts. It measures nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvstore.lab.accesses import Accesses
from kvstore.lab.bounds import belady_hits, infinite_hits
from kvstore.lab.distances import reuse_gaps_s, used_once_share
from kvstore.lab.jobs import PolicyRow, PoolRow, Row, TierRow

INFINITE = "infinite cache"
BELADY = "Belady, with bypass"

Ratios = Mapping[int, float]
"""Hit ratio by capacity in blocks."""


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """What a trace asks of a cache, whatever the policy."""

    requests: int
    blocks: int
    unique_blocks: int
    used_once_share: float
    gap_p50_s: float
    gap_p90_s: float

    def __str__(self) -> str:
        return (
            f"{self.requests:,} prompts of {self.blocks:,} blocks, {self.unique_blocks:,} of them different; {self.used_once_share:.1%} of "
            f"these are used once, the others again after {self.gap_p50_s:,.0f} s (p50), {self.gap_p90_s:,.0f} s (p90)"
        )


def summarise(requests: int, accesses: Accesses) -> TraceSummary:
    gaps_s = reuse_gaps_s(accesses)
    p50_s, p90_s = np.percentile(gaps_s, [50, 90]) if gaps_s.size else (0.0, 0.0)
    return TraceSummary(requests, len(accesses), accesses.unique, used_once_share(accesses), float(p50_s), float(p90_s))


def bounds(accesses: Accesses, capacities: Sequence[int]) -> dict[str, Ratios]:
    """The bounds of bounds.py as ratios, by name. The trace must have blocks."""
    infinite = infinite_hits(accesses) / len(accesses)
    belady = {capacity: belady_hits(accesses, capacity) / len(accesses) for capacity in capacities}
    return {BELADY: belady, INFINITE: dict.fromkeys(capacities, infinite)}


def policy_table(rows: Sequence[PolicyRow], limits: Mapping[str, Ratios]) -> Group:
    """A line a policy, a column a capacity, the best of each column in bold; the limits below."""
    capacities = sorted({row.capacity_blocks for row in rows})
    ratios = {(row.policy, row.capacity_blocks): row.prefix_hit_ratio for row in rows}
    best = {capacity: max(ratio for (_, place), ratio in ratios.items() if place == capacity) for capacity in capacities}
    table = _table(*(f"{capacity:,}" for capacity in capacities))
    for policy in dict.fromkeys(row.policy for row in rows):
        found = [(ratios[policy, capacity], capacity) for capacity in capacities]
        table.add_row(policy, *(Text(f"{ratio:.4f}", "bold green" if ratio == best[capacity] else "") for ratio, capacity in found))
    table.add_section()
    for name, limit in limits.items():
        table.add_row(name, *(f"{limit[capacity]:.4f}" for capacity in capacities), style="dim")
    return Group("Prefix hit ratio by capacity in blocks", table)


def tier_table(rows: Sequence[TierRow]) -> Group:
    first = rows[0]
    title = f"Two tiers: {first.dram_blocks:,} blocks of DRAM, {first.nvme_blocks:,} of NVMe"
    table = _table("prefix hit ratio", "from DRAM", "from NVMe", "demotions", "promotions", "evictions")
    for row in rows:
        shares = (row.prefix_hit_ratio, row.dram_hits / row.blocks, row.nvme_hits / row.blocks)
        counts = (row.demotions, row.promotions, row.evictions)
        table.add_row(row.policy, *(f"{share:.4f}" for share in shares), *(f"{count:,}" for count in counts))
    return Group(title, table)


def pool_table(rows: Sequence[PoolRow]) -> Group:
    first = rows[0]
    title = f"Prefix hit ratio of one pool and of {first.instances} local caches of {first.blocks_per_instance:,} blocks"
    table = _table("prompts dealt out", "one pool", "local caches", "pool / local")
    for row in rows:
        gain = f"{row.gain:.2f}" if row.gain is not None else "-"
        table.add_row(row.policy, row.routing, f"{row.pooled_prefix_hit_ratio:.4f}", f"{row.local_prefix_hit_ratio:.4f}", gain)
    return Group(title, table)


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Each row with its fields' names as members."""
    return [asdict(row) for row in rows]


def _table(*columns: str) -> Table:
    """Of a line a policy."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("policy")
    for column in columns:
        table.add_column(column, justify="right")
    return table
