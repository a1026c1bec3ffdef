"""Promises of lab.py, through the command line: tables, JSON, plots, and one clear line for each error."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvstore.cli import lab as cli_lab
from kvstore.cli.main import kvstore
from kvstore.kvcache.traces.event_file import READ, STORED, BlockEvent, EventWriter
from kvstore.tiers.policies.by_name import POLICY_NAMES

PROMPTS = [[0, 1, 2], [0, 1, 3], [4], [0, 1, 2, 5]]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(line(1000 * number, ids) for number, ids in enumerate(PROMPTS)))
    return path


def line(timestamp_ms: int, ids: Sequence[int]) -> str:
    return json.dumps({"timestamp": timestamp_ms, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": list(ids)}) + "\n"


def lab(trace: object, *arguments: str) -> Result:
    return CliRunner().invoke(kvstore, ["lab", str(trace), "--processes", "1", *arguments], catch_exceptions=False)


def rows(trace: object, *arguments: str) -> Any:
    result = lab(trace, *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    (line,) = result.stdout.splitlines()
    return json.loads(line)


def test_json_is_a_row_for_each_policy_and_capacity(trace: Path) -> None:
    found = rows(trace, "--policies", "lru,lfu", "--capacities", "9,3")
    assert found[0] == {"policy": "lru", "capacity_blocks": 3, "prefix_hit_ratio": 2 / 11, "hits": 2, "blocks": 11}
    assert [(row["policy"], row["capacity_blocks"]) for row in found] == [("lru", 3), ("lru", 9), ("lfu", 3), ("lfu", 9)]
    assert all(list(row) == list(found[0]) for row in found)


def test_all_policies_and_five_capacities_are_the_default(trace: Path) -> None:
    found = rows(trace)
    assert {row["policy"] for row in found} == set(POLICY_NAMES)
    assert "default" in POLICY_NAMES
    assert sorted({row["capacity_blocks"] for row in found}) == [1000, 3000, 10_000, 30_000, 50_000]
    assert {row["hits"] for row in found} == {5}
    assert rows(trace, "--policies", "all") == found


def test_generated_conversations_need_no_file() -> None:
    first, second = (rows(f"generated:{seed}:50", "--policies", "lru", "--capacities", "100") for seed in (0, 1))
    assert first == rows("generated:0:50", "--policies", "lru", "--capacities", "100")
    assert first != second
    assert rows("generated:0:50", "--policies", "lru", "--capacities", "100", "--limit", "3")[0]["blocks"] < first[0]["blocks"]


def test_a_recording_of_a_cluster_is_a_trace_too(tmp_path: Path) -> None:
    path = tmp_path / "events"
    with EventWriter(path) as writer:
        writer.write([BlockEvent(STORED, 1000, "n", "t", [b"a", b"b"], [b"", b"a"], [1, 1])])
        writer.write([BlockEvent(READ, 90_000, "n", "t", [b"a", b"b"], [b"", b"a"], [1, 1])])
    (row,) = rows(path, "--policies", "lru", "--capacities", "9")
    assert (row["hits"], row["blocks"]) == (2, 4)


def test_tiers_and_pools_have_sections_of_their_own(trace: Path) -> None:
    found = rows(trace, "--policies", "lru", "--capacities", "3", "--tiers", "2:9", "--pools", "2:3")
    assert list(found) == ["policies", "tiers", "pools"]
    assert found["policies"] == rows(trace, "--policies", "lru", "--capacities", "3")
    (tiers,) = found["tiers"]
    assert (tiers["dram_blocks"], tiers["nvme_blocks"], tiers["dram_hits"] + tiers["nvme_hits"]) == (2, 9, 5)
    assert [row["routing"] for row in found["pools"]] == ["round_robin", "random", "cache_aware"]
    assert list(rows(trace, "--policies", "lru", "--pools", "2:3")) == ["policies", "pools"]


def test_writers_make_one_pool_of_the_nodes(trace: Path) -> None:
    options = ("--policies", "lru,default", "--capacities", "3", "--pools", "3:3", "--writers", "2,1")
    found = rows(trace, *options)
    assert list(found) == ["policies", "pools", "home_pools"]
    kinds = [(row["policy"], row["is_routed"], row["is_shared"]) for row in found["home_pools"]]
    others = [("default", is_routed, is_shared) for is_routed in (False, True) for is_shared in (False, True)]
    assert kinds == [("lru", False, False), ("lru", True, False), *others]
    assert found["home_pools"][0]["shares"] == [2, 1, 0]
    assert "3 nodes of 3 blocks as one pool, prompts at 2/1/0" in lab(trace, *options).stdout


def test_pools_may_have_two_tiers(trace: Path) -> None:
    options = ("--policies", "lru", "--capacities", "3", "--pools", "3:2+9", "--writers", "1,1,1")
    found = rows(trace, *options)
    assert list(found) == ["policies", "home_pools"]
    assert {(row["blocks_per_node"], row["nvme_blocks_per_node"]) for row in found["home_pools"]} == {(2, 9)}
    assert found["home_pools"][0]["one_node_prefix_hit_ratio"] > found["policies"][0]["prefix_hit_ratio"]
    assert "3 nodes of 2 blocks and 9 of NVMe as one pool, prompts at 1/1/1" in lab(trace, *options).stdout


def test_hints_have_a_row_for_each_capacity(trace: Path) -> None:
    found = rows(trace, "--policies", "default,prefix,lru", "--capacities", "3,4", "--hints", "1")
    assert list(found) == ["policies", "hints"]
    assert [(row["policy"], row["capacity_blocks"]) for row in found["hints"]] == [("prefix", 3), ("prefix", 4)]
    shown = lab(trace, "--policies", "default", "--capacities", "3", "--hints", "0.5").stdout
    assert "hints from 50% of the sessions" in shown


def test_people_get_tables_and_bounds(trace: Path) -> None:
    shown = lab(trace, "--policies", "lru,default", "--capacities", "3", "--tiers", "2:9", "--pools", "2:3").stdout
    assert shown.startswith("4 prompts of 11 blocks, 6 of them different; 50.0% of these are used once")
    for text in ("0.1818", "Belady, with bypass", "infinite cache", "0.4545", "2 blocks of DRAM", "2 local caches of 3 blocks"):
        assert text in shown


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_plots_are_written_to_a_folder_that_is_made(trace: Path, tmp_path: Path, suffix: str) -> None:
    folder = tmp_path / "deep" / "plots"
    options = ("--policies", "lru", "--capacities", "2,4", "--tiers", "2:9", "--pools", "2:3", "--plots", str(folder))
    result = lab(trace, *options, "--plot-format", suffix)
    assert result.stdout.splitlines()[-1] == f"plots are in {folder}"
    names = ["hit_ratio", "pools_lru", "reuse_distance", "reuse_gap", "tiers", "working_set"]
    assert sorted(path.name for path in folder.iterdir()) == [f"{name}.{suffix}" for name in names]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policies", "lru,fifo"), "no eviction policy is called 'fifo': choose "),
        (("--policies", ","), "--policies is empty"),
        (("--capacities", "10,many"), "--capacities: 'many' is not a number of blocks"),
        (("--capacities", "0"), "the capacity is 0 blocks: it must be from 1 to "),
        (("--capacities", ""), "--capacities names 0 capacities: name 1 to 64"),
        (("--capacities", ",".join(map(str, range(1, 66)))), "--capacities names 65 capacities"),
        (("--tiers", "100"), "'100' is not of the form DRAM:NVME, two whole numbers"),
        (("--pools", "4:"), "'4:' is not of the form N:BLOCKS"),
        (("--writers", "1"), "--writers needs --pools N:BLOCKS"),
        (("--pools", "2:5+9"), "--pools N:DRAM+NVME needs --writers"),
        (("--pools", "2:5+", "--writers", "1"), "--pools: '' is not a number of blocks"),
        (("--pools", "2:5", "--writers", "most"), "--writers: 'most' is not a list of numbers"),
        (("--pools", "2:5", "--writers", "1,1,1"), "--writers names 3 shares for 2 nodes"),
        (("--pools", "2:5", "--writers", "0"), "shares of the prompts are [0.0, 0.0]"),
        (("--hints", "1.5"), "the share of hints is 1.5: it must be from 0 to 1"),
        (("--hints", "0.5", "--policies", "lru"), "--hints: none of the policies heeds hints: add prefix"),
        (("--pools", "0:5"), "instances is 0: it must be from 1 to "),
    ],
)
def test_misuse_is_one_line(trace: Path, arguments: tuple[str, ...], message: str) -> None:
    result = lab(trace, *arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"kvstore: error: {message}")
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "has no blocks: there is nothing to replay"), (line(0, []), "has no blocks"), (line(0, [1])[:30], "line 1: not JSON")],
)
def test_a_trace_without_blocks_or_malformed_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    result = lab(path)
    assert result.exit_code == 2
    assert str(path) in result.stderr
    assert message in result.stderr


def test_a_folder_that_cannot_be_made_is_named_before_the_work(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_lab, "run_jobs", None)
    result = lab(trace, "--plots", f"{trace}/plots")
    assert result.exit_code == 2
    assert result.stderr == f"kvstore: error: cannot create the folder {trace}/plots for plots: Not a directory\n"


def test_plots_without_matplotlib_name_the_extra(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = lab(trace, "--plots", str(tmp_path / "plots"))
    assert result.exit_code == 2
    assert result.stderr == "kvstore: error: plots need matplotlib: pip install '.[plots]' in the checkout of kvstore\n"
    assert lab(trace, "--policies", "lru").exit_code == 0
