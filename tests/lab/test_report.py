"""Promises of report.py: tables that say what the rows say, and rows as JSON."""

import json

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console, RenderableType

from kvstore.lab.accesses import flatten
from kvstore.lab.jobs import HintRow, HomePoolRow, PolicyRow, PoolRow, TierRow
from kvstore.lab.report import (
    BELADY,
    INFINITE,
    as_json,
    bounds,
    hint_table,
    hit_ratio,
    home_pool_table,
    policy_table,
    pool_table,
    summarise,
    tier_table,
    trace_figures,
)
from tests.lab.prompts import conversations, requests

ROWS = [PolicyRow("lru", 1000, 0.0445, 12838, 288500), PolicyRow("lru", 10000, 0.2112, 60931, 288500)]
OTHERS = [PolicyRow("lfu", 1000, 0.0481, 13876, 288500), PolicyRow("lfu", 10000, 0.1315, 37937, 288500)]

OURS = [PolicyRow("prefix", size, size / 100, 1, 100) for size in (30, 10)]
LRU = [PolicyRow("lru", size, size / 200, 1, 100) for size in (10, 30)]


def shown(found: RenderableType, *, styled: bool = False) -> list[str]:
    console = Console(width=120, force_terminal=styled, color_system="standard" if styled else None)
    with console.capture() as capture:
        console.print(found)
    return capture.get().splitlines()


def cells(found: RenderableType) -> list[list[str]]:
    return [line.split() for line in shown(found)]


def test_a_line_a_policy_and_the_bounds_below() -> None:
    lines = cells(policy_table([*ROWS, *OTHERS], {"most": {1000: 0.1907, 10000: 0.3664}}))
    assert lines[1:] == [
        ["policy", "1,000", "10,000"],
        ["lru", "0.0445", "0.2112"],
        ["lfu", "0.0481", "0.1315"],
        ["most", "0.1907", "0.3664"],
    ]


def test_the_best_of_each_capacity_is_marked() -> None:
    lines = shown(policy_table([*ROWS, *OTHERS], {}), styled=True)
    lru, lfu = (next(line for line in lines if name in line) for name in ("lru", "lfu"))
    assert "\x1b[1;32m0.2112\x1b[0m" in lru
    assert "\x1b[1;32m0.0481\x1b[0m" in lfu
    assert lru.count("\x1b[1;32m") == lfu.count("\x1b[1;32m") == 1


def test_tiers_show_where_hits_came_from() -> None:
    table = tier_table([TierRow("lru", 3000, 30000, 0.5, 20, 30, 100, 4000, 5, 6)])
    assert "3,000 blocks of DRAM, 30,000 of NVMe" in shown(table)[0]
    assert cells(table)[-1] == ["lru", "0.5000", "0.2000", "0.3000", "4,000", "5", "6"]


def test_pools_show_the_gain_where_there_is_one() -> None:
    gains = [PoolRow("lru", "random", 4, 5859, 0.3, 0.15, 2.0, 100), PoolRow("lru", "random", 4, 5859, 0.3, 0.0, None, 100)]
    lines = cells(pool_table(gains))
    assert lines[-2:] == [["lru", "random", "0.3000", "0.1500", "2.00"], ["lru", "random", "0.3000", "0.0000", "-"]]


def test_home_pools_show_where_prompts_went() -> None:
    table = home_pool_table([HomePoolRow("lru", (80, 20), 2500, 0, False, True, 0.25, 0.2, 0.5, 1.25, 100)])
    assert shown(table)[0] == "2 nodes of 2,500 blocks as one pool, prompts at 80/20"
    assert cells(table)[-1] == ["lru", "by", "share", "shared", "0.2500", "0.2000", "50.0%", "1.25"]


def test_rows_are_json_with_exactly_these_members() -> None:
    row = {"policy": "lru", "capacity_blocks": 1000, "prefix_hit_ratio": 0.0445, "hits": 12838, "blocks": 288500}
    assert json.loads(json.dumps(as_json(ROWS)))[0] == row


def test_bounds_are_ratios_by_capacity() -> None:
    accesses = flatten(requests([[1, 2], [1, 2], [3], [1]]))
    assert bounds(accesses, [1, 2]) == {BELADY: {1: 2 / 6, 2: 3 / 6}, INFINITE: {1: 3 / 6, 2: 3 / 6}}


def test_a_summary_says_what_the_trace_asks_for() -> None:
    found = requests([[1, 2], [1, 3], [1, 4]], every_s=30)
    text = str(summarise(3, flatten(found)))
    assert text == (
        "3 prompts of 6 blocks, 4 of them different; 75.0% of these are used once, the others again after 30 s (p50), 30 s (p90)"
    )
    assert summarise(1, flatten(found[:1])).gap_p90_s == 0


def axes_of(figure: Figure) -> Axes:
    (axes,) = figure.axes
    return axes


def lines(figure: Figure) -> dict[str, list[float]]:
    """The heights of each named line, in the order of drawing."""
    axes = axes_of(figure)
    drawn = [line for line in axes.lines if line.get_transform() == axes.transData]
    names = [text.get_text() for text in axes.texts]
    return {name: list(np.asarray(line.get_ydata(), float)) for name, line in zip(names, drawn, strict=True)}


def labels(figure: Figure) -> tuple[str, str]:
    return axes_of(figure).get_xlabel(), axes_of(figure).get_ylabel()


def test_a_line_a_policy_in_the_order_of_capacities() -> None:
    figure = hit_ratio([*OURS, *LRU], {"most": {10: 0.9, 30: 1.0}})
    assert lines(figure) == {"prefix": [0.1, 0.3], "lru": [0.05, 0.15], "most": [0.9, 1.0]}
    ours, lru, most = axes_of(figure).lines[:3]
    assert ours.get_linewidth() > lru.get_linewidth()
    assert most.get_linestyle() == "--"
    assert labels(figure) == ("capacity (blocks)", "prefix hit ratio (share of blocks)")


def test_a_trace_has_a_working_set_and_distances_and_gaps() -> None:
    figures = trace_figures(flatten(conversations()))
    assert sorted(figures) == ["reuse_distance", "reuse_gap", "working_set"]
    for figure in figures.values():
        assert all("(" in label or "share" in label for label in labels(figure))
    unique = len({block for request in conversations() for block in request.hash_ids})
    total = sum(len(request.hash_ids) for request in conversations())
    assert lines(figures["working_set"])["since the start"][-1] == unique
    assert lines(figures["reuse_distance"])["all uses"][-1] == pytest.approx(1 - unique / total)
    assert lines(figures["reuse_gap"])["uses again"][-1] == 1


def test_hint_table_shows_the_part_of_the_way() -> None:
    rows = [HintRow("prefix", 10_000, 0.5, 0.2364, 0.3138, 0.2615, 0.2362, 0.3664, 0.5954), HintRow("prefix", 9, 0.5, 0, 0, 0, 0, 0, None)]
    lines = cells(hint_table(rows))
    assert " ".join(lines[0]) == "Prefix hit ratio with hints from 50% of the sessions"
    assert lines[2:] == [
        ["prefix", "10,000", "0.2364", "0.3138", "0.2615", "0.2362", "0.3664", "60%"],
        ["prefix", "9", "0.0000", "0.0000", "0.0000", "0.0000", "0.0000", "-"],
    ]
