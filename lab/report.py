"""Result rows of the lab as tables, charts and JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvstore.lab.accesses import Accesses, belady_hits, infinite_hits, reuse_distances, reuse_gaps_s, used_once_share, working_set
from kvstore.lab.jobs import HintRow, HomePoolRow, PolicyRow, PoolRow, Row, TierRow
from kvstore.lab.plots import Series, Weight, cdf, line_chart, stacked_bars
from kvstore.tiers.policies.by_name import DEFAULT, DEFAULT_POLICY
from kvstore.tiers.policies.prefix.policy import PrefixPolicy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INFINITE = "infinite cache"
BELADY = "Belady, with bypass"

Ratios = Mapping[int, float]
"""Capacity in blocks -> hit ratio."""

WINDOWS_S: Final = (60, 300, 600, 1800)
WORKING_SET_POINTS: Final = 240
MAIN_POLICIES: Final = (DEFAULT, PrefixPolicy.name)
"""Drawn with thicker lines."""


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """Statistics of a trace that do not depend on a policy."""

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
    """Return the upper bounds of accesses.py as hit ratios, by name. The trace must have blocks."""
    infinite = infinite_hits(accesses) / len(accesses)
    belady = {capacity: belady_hits(accesses, capacity) / len(accesses) for capacity in capacities}
    return {BELADY: belady, INFINITE: dict.fromkeys(capacities, infinite)}


def policy_table(rows: Sequence[PolicyRow], limits: Mapping[str, Ratios]) -> Group:
    """Return a table of policies by capacity, the best of each column in bold, with the bounds below."""
    capacities = sorted({row.capacity_blocks for row in rows})
    ratios = {(row.policy, row.capacity_blocks): row.prefix_hit_ratio for row in rows}
    best = {capacity: max(ratio for (_, blocks), ratio in ratios.items() if blocks == capacity) for capacity in capacities}
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
    table = _table("routing", "one pool", "local caches", "pool / local")
    for row in rows:
        gain = f"{row.gain:.2f}" if row.gain is not None else "-"
        table.add_row(row.policy, row.routing, f"{row.pooled_prefix_hit_ratio:.4f}", f"{row.local_prefix_hit_ratio:.4f}", gain)
    return Group(title, table)


def home_pool_table(rows: Sequence[HomePoolRow]) -> Group:
    first = rows[0]
    shares = "/".join(f"{share:g}" for share in first.shares)
    sizes = f"{first.blocks_per_node:,} blocks" + (f" and {first.nvme_blocks_per_node:,} of NVMe" if first.nvme_blocks_per_node else "")
    title = f"{len(first.shares)} nodes of {sizes} as one pool, prompts at {shares}"
    table = _table("prompts", "statistics", "one node", "pool", "local hits", "copies a hit")
    for row in rows:
        kind = "routed" if row.is_routed else "by share", "shared" if row.is_shared else "separate"
        ratios = f"{row.one_node_prefix_hit_ratio:.4f}", f"{row.prefix_hit_ratio:.4f}"
        table.add_row(row.policy, *kind, *ratios, f"{row.local_share:.1%}", f"{row.copies_per_hit:.2f}")
    return Group(title, table)


def hint_table(rows: Sequence[HintRow]) -> Group:
    title = f"Prefix hit ratio with hints from {rows[0].share:.0%} of the sessions"
    table = _table("blocks", "without", "true hints", "half random", "random", "Belady", "part of the way")
    for row in rows:
        ratios = (row.unhinted, row.true_hints, row.half_true, row.random_hints, row.belady)
        gain = f"{row.gain:.0%}" if row.gain is not None else "-"
        table.add_row(row.policy, f"{row.capacity_blocks:,}", *(f"{ratio:.4f}" for ratio in ratios), gain)
    return Group(title, table)


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows as JSON objects."""
    return [asdict(row) for row in rows]


def _table(*columns: str) -> Table:
    """Create a table with one row per policy."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("policy")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def trace_figures(accesses: Accesses) -> dict[str, "Figure"]:
    """Return charts of the trace, by file name without suffix. Charts of reuse are left out if no block is accessed twice."""
    figures = {"working_set": _working_set(accesses)}
    if accesses.unique < len(accesses):
        figures["reuse_distance"] = cdf(
            {"all uses": reuse_distances(accesses)},
            title="Reuse distance (hit ratio of LRU by capacity)",
            x_label="other blocks used since a block's last use (blocks)",
            y_label="share of uses, first uses included",
            log_x=True,
        )
        figures["reuse_gap"] = cdf(
            {"uses again": reuse_gaps_s(accesses)},
            title="Time between two uses of a block",
            x_label="time since the last use (s)",
            y_label="share of uses but first ones",
            log_x=True,
        )
    return figures


def hit_ratio(rows: Sequence[PolicyRow], limits: Mapping[str, Ratios]) -> "Figure":
    """Return a chart with a line per policy over capacity, and dashed bounds."""
    lines = []
    for policy in _shown([row.policy for row in rows]):
        points = sorted((row.capacity_blocks, row.prefix_hit_ratio) for row in rows if row.policy == policy)
        lines.append(_line(policy, points, Weight.MAIN if policy in MAIN_POLICIES else Weight.NORMAL))
    lines += [_line(name, sorted(limit.items()), Weight.BOUND) for name, limit in limits.items()]
    return line_chart(
        lines,
        title="Prefix hit ratio over capacity",
        x_label="capacity (blocks)",
        y_label="prefix hit ratio (share of blocks)",
        log_x=True,
    )


def tier_hits(rows: Sequence[TierRow]) -> "Figure":
    """Return a chart with a bar per policy: prefix hits in DRAM and NVMe."""
    shown = _shown([row.policy for row in rows])
    rows = [row for row in rows if row.policy in shown]
    return stacked_bars(
        [row.policy for row in rows],
        {"DRAM": [row.dram_hits / row.blocks for row in rows], "NVMe": [row.nvme_hits / row.blocks for row in rows]},
        title=f"Prefix hits by tier: {rows[0].dram_blocks:,} blocks DRAM, {rows[0].nvme_blocks:,} NVMe",
        x_label="policy",
        y_label="prefix hit ratio (share of blocks)",
    )


def pool_gain(rows: Sequence[PoolRow], policy: str) -> "Figure":
    """Return a chart for one policy with a bar per routing: hits of local caches, and the gain of one pool."""
    own = [row for row in rows if row.policy == policy]
    added = [max(0.0, row.pooled_prefix_hit_ratio - row.local_prefix_hit_ratio) for row in own]
    return stacked_bars(
        [row.routing.replace("_", " ") for row in own],
        {"local caches": [row.local_prefix_hit_ratio for row in own], "one pool adds": added},
        title=f"One pool against {own[0].instances} local caches of {own[0].blocks_per_instance:,} blocks ({policy})",
        x_label="routing of prompts",
        y_label="prefix hit ratio (share of blocks)",
    )


def _working_set(accesses: Accesses) -> "Figure":
    begin_s, end_s = float(accesses.times_s.min()), float(accesses.times_s.max())
    at_s = np.linspace(begin_s, end_s, WORKING_SET_POINTS)
    points = (at_s / 60).tolist()
    windows = [window_s for window_s in WINDOWS_S if window_s < end_s - begin_s]
    lines = [
        Series(f"last {window_s // 60} min", points, working_set(accesses, window_s=window_s, at_s=at_s).tolist()) for window_s in windows
    ]
    so_far = working_set(accesses, window_s=float("inf"), at_s=at_s).tolist()
    return line_chart(
        [*lines, Series("since the start", points, so_far, Weight.BOUND)],
        title="Working set over time",
        x_label="time in the trace (min)",
        y_label="different blocks used (blocks)",
    )


def _shown(policies: Sequence[str]) -> list[str]:
    """Unique policies; "default" is dropped if the default policy is present under its own name."""
    return [policy for policy in dict.fromkeys(policies) if policy != DEFAULT or DEFAULT_POLICY not in policies]


def _line(name: str, points: Sequence[tuple[int, float]], weight: Weight) -> Series:
    return Series(name, [x for x, _ in points], [y for _, y in points], weight)
