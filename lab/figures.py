"""The lab's plots: which numbers go into which chart. How charts look is plots.py's business."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore.lab.accesses import Accesses
from kvstore.lab.distances import reuse_distances, reuse_gaps_s
from kvstore.lab.jobs import PolicyRow, PoolRow, TierRow
from kvstore.lab.plots import Series, Weight, cdf, line_chart, stacked_bars
from kvstore.lab.report import Ratios
from kvstore.lab.working_set import working_set
from kvstore.tiers.policies.by_name import DEFAULT, DEFAULT_POLICY
from kvstore.tiers.policies.prefix import PrefixPolicy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WINDOWS_S: Final = (60, 300, 600, 1800)
WORKING_SET_POINTS: Final = 240
MAIN_POLICIES: Final = (DEFAULT, PrefixPolicy.name)
"""Which one looks for first."""


def trace_figures(accesses: Accesses) -> dict[str, "Figure"]:
    """What the trace asks of any cache, by file name without suffix. Charts of reuse are left out where nothing is used again."""
    figures = {"working_set": _working_set(accesses)}
    if accesses.unique < len(accesses):
        figures["reuse_distance"] = cdf(
            {"all uses": reuse_distances(accesses)},
            title="Reuse distance: what LRU would hit at which capacity",
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
    """A line a policy over capacity, and the limits dashed."""
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
    """A bar a policy: hits in DRAM and below."""
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
    """Of one policy a bar for each way of dealing prompts out: what local caches hit, and what one pool adds to it."""
    own = [row for row in rows if row.policy == policy]
    added = [max(0.0, row.pooled_prefix_hit_ratio - row.local_prefix_hit_ratio) for row in own]
    return stacked_bars(
        [row.routing.replace("_", " ") for row in own],
        {"local caches": [row.local_prefix_hit_ratio for row in own], "one pool adds": added},
        title=f"One pool against {own[0].instances} local caches of {own[0].blocks_per_instance:,} blocks ({policy})",
        x_label="how prompts are dealt out to instances",
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
    """Each once, and the default not under that name where it is there under its own too."""
    return [policy for policy in dict.fromkeys(policies) if policy != DEFAULT or DEFAULT_POLICY not in policies]


def _line(name: str, points: Sequence[tuple[int, float]], weight: Weight) -> Series:
    return Series(name, [x for x, _ in points], [y for _, y in points], weight)
