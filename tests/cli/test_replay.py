"""Promises of replay.py, through the command line, with clusters of real processes."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvstore.cli.main import kvstore
from kvstore.cli.replay import table_share
from kvstore.client import Client
from kvstore.client.block_bytes import block_key

PROMPTS = [[0, 1, 2], [0, 1, 3], [4], [0, 1, 2, 5]]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(line(ids) for ids in PROMPTS))
    return path


def line(ids: list[int]) -> str:
    return json.dumps({"timestamp": 0, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}) + "\n"


def replay(trace: Path | str, *arguments: str) -> Result:
    return CliRunner().invoke(kvstore, ["replay", str(trace), *arguments], catch_exceptions=False)


@pytest.mark.promise("space-accounted")
def test_a_tier_given_room_for_so_many_blocks_holds_so_many(trace: Path) -> None:
    result = replay(trace, "--dram", str(3 * 4096), "--policy", "lru", "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    # LRU of 3 blocks: [0 1 2], hits 0 1 and 3 for 2, [1 3 4] after block 4, then nothing leads.
    assert (report["requests"], report["blocks"], report["wrong_bytes"]) == (4, 11, 0)
    assert report["prefix_hit_ratio"] == pytest.approx(2 / 11)
    assert report["occupancy"]["dram"] == {"used_bytes": 12288, "capacity_bytes": 12288, "blocks": 3, "share": 1.0}
    assert report["evictions"] == report["stored"] - 3
    assert report["get_bytes_per_s"] > 0 < report["put_bytes_per_s"]


def test_replay_nvme_without_folder_is_temporary(trace: Path) -> None:
    report = json.loads(replay(trace, "--dram", "12KiB", "--nvme", "1MiB", "--json").stdout)
    assert report["prefix_hit_ratio"] == pytest.approx(5 / 11)
    assert (report["hits"], report["stored"], report["evictions"]) == (5, 6, 0)
    assert sum(report["hits_by_tier"].values()) == 5


def test_requests_are_generated_without_a_trace() -> None:
    report = json.loads(replay("generated:1:5", "--json").stdout)
    assert (report["requests"], report["wrong_bytes"]) == (5, 0)


@pytest.mark.parametrize(
    ("block_bytes", "tiers", "share"),
    [
        (1 << 20, ("", "100GiB", ""), ""),
        (4096, ("", "", ""), ""),
        (1024, ("", "", ""), "0.79"),
        (4096, ("4096", "1TiB", ""), "16.0"),
        (4096, ("1GiB", "1GiB", "cuda:0:1GiB"), "0.59"),
        (4096, ("40960000", "819200000", ""), "4.11"),
        (4096, ("40960000", "/folder:819200000", ""), "4.11"),
        (4096, ("much", "", ""), ""),
        (4096, ("0", "", ""), ""),
    ],
)
def test_table_share_covers_tiers_up_to_its_maximum(block_bytes: int, tiers: tuple[str, ...], share: str) -> None:
    assert table_share(block_bytes, *tiers) == share


def test_replay_on_running_cluster_counts_the_difference(trace: Path, master: str) -> None:
    cold = json.loads(replay(trace, "--master", master, "--limit", "2", "--block-bytes", "1KiB", "--json").stdout)
    warm = json.loads(replay(trace, "--master", master, "--limit", "2", "--block-bytes", "1KiB", "--json").stdout)
    assert (cold["blocks"], cold["prefix_hit_ratio"], cold["stored"]) == (6, pytest.approx(2 / 6), 4)
    assert (warm["blocks"], warm["prefix_hit_ratio"], warm["stored"], warm["evictions"]) == (6, 1.0, 0, 0)


def test_people_get_a_table(trace: Path, master: str) -> None:
    assert "0 wrong bytes" in replay(trace, "--master", master, "--block-bytes", "2KiB").stdout


@pytest.mark.promise("get-exact-bytes")
def test_wrong_bytes_are_reported_and_end_it_with_status_1(trace: Path, master: str) -> None:
    with Client(master) as client:
        client.put(block_key(4, 512), bytes(512), ack="cluster")
    result = replay(trace, "--master", master, "--block-bytes", "512", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["wrong_bytes"] > 500
    assert result.stderr.startswith("kvstore: error: block 4 (number 0 of request 3): ")


def test_a_malformed_line_is_named(trace: Path, master: str) -> None:
    with trace.open("a") as file:
        file.write(line([1])[:30])
    result = replay(trace, "--master", master)
    assert result.exit_code == 2
    assert f"kvstore: error: {trace}, line 5: not JSON, or cut off" in result.stderr


def test_a_running_cluster_and_ones_own_exclude_each_other(trace: Path) -> None:
    result = replay(trace, "--master", "127.0.0.1:1", "--dram", "1MiB")
    assert result.exit_code == 2
    assert "--dram is only for a cluster that the replay starts" in result.stderr
