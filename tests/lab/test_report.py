"""Promises of report.py: tables that say what the rows say, and rows as JSON."""

import json

from rich.console import Console, RenderableType

from kvstore.lab.accesses import flatten
from kvstore.lab.jobs import PolicyRow, PoolRow, TierRow
from kvstore.lab.report import BELADY, INFINITE, as_json, bounds, policy_table, pool_table, summarise, tier_table
from tests.lab.prompts import requests

ROWS = [PolicyRow("lru", 1000, 0.0445, 12838, 288500), PolicyRow("lru", 10000, 0.2112, 60931, 288500)]
OTHERS = [PolicyRow("lfu", 1000, 0.0481, 13876, 288500), PolicyRow("lfu", 10000, 0.1315, 37937, 288500)]


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
