"""Promises of plan.py, through the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvstore.cli.command_group import CommandGroup
from kvstore.cli.plan import plan

QUICK = ("--model", "llama3-70b", "--gpu", "H100", "--tp", "2", "--users", "12", "--duration-s", "30")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(line(200 * number, [0, number // 2 + 1]) for number in range(20)))
    return path


def line(at_ms: int, ids: list[int]) -> str:
    return json.dumps({"timestamp": at_ms, "input_length": 512 * len(ids), "output_length": 20, "hash_ids": ids}) + "\n"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(CommandGroup(commands=[plan]), ["plan", *map(str, arguments)], catch_exceptions=False)


def planned(*arguments: object) -> Any:
    result = run(*QUICK, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_people_get_tables() -> None:
    result = run(*QUICK)
    assert result.exit_code == 0
    assert "9 of 12 contexts" in result.stdout
    assert result.stderr == ""


def test_scripts_get_every_figure_and_equal_runs_the_same() -> None:
    first = planned("--weights", "140GB")
    assert first == planned("--weights", "140GB")
    assert first["kv_bytes_per_token"] == first["payload_bytes_per_token"] == 327_680
    assert (first["effective_bits"], first["scheme"], first["metadata_bytes_per_token"]) == (16, "none", 0)
    assert first["per_gpu"]["kv_bytes"] == 8 * 10**9
    assert (first["users"], first["users_in_hbm"]) == (12, 9)
    assert [tier["name"] for tier in first["tiers"]] == ["HBM", "DRAM", "NVMe"]
    assert [outcome["strategy"] for outcome in first["strategies"]][:2] == ["reject", "queue"]
    assert first["reuse"][0]["pays"] == {"DRAM": True, "NVMe": True, "NIC": True}
    assert first["reuse"][0]["compute"]["needed_bytes_per_s"] > 10**9
    assert (first["trace"], first["no_times"]) == ([], "")


def test_options_reach_the_plan() -> None:
    quantised = planned("--scheme", "int4/64")
    assert quantised["effective_bits"] == 4.5
    assert quantised["metadata_bytes_per_token"] == 80 * 8 * 2 * 128 / 64 * 4
    assert planned("--scheme", "int8", "--block-tokens", 32)["effective_bits"] == 8.125
    assert planned("--dtype", "float32")["kv_bytes_per_token"] == 655_360
    halved = planned("--weight-bits", 8)
    assert halved["per_gpu"]["weight_bytes"] < 0.55 * planned()["per_gpu"]["weight_bytes"]
    assert halved["strategies"][1]["latency"]["mean_s"] < planned()["strategies"][1]["latency"]["mean_s"]
    assert planned("--reserve", "4GB")["per_gpu"]["reserve_bytes"] == 4 * 10**9
    assert [tier["name"] for tier in planned("--dram", "0", "--nvme", "1TB")["tiers"]] == ["HBM", "NVMe"]
    slow = planned("--dram-bandwidth", "2GB", "--nvme-bandwidth", "1GB", "--nic", "3GB")["reuse"][0]
    assert slow["fetch_s"] == {name: slow["size_bytes"] / (gb * 1e9) for name, gb in (("DRAM", 2), ("NVMe", 1), ("NIC", 3))}
    assert planned("--context", 2000)["users_in_hbm"] == 12
    assert planned("--output-tokens", 10)["strategies"][1]["goodput_tokens_per_s"] < planned()["strategies"][1]["goodput_tokens_per_s"]
    assert planned("--think-s", 1)["strategies"][1]["requests"] > planned("--think-s", 30)["strategies"][1]["requests"]
    assert planned("--mfu", 0.25)["reuse"][0]["compute"]["seconds"] > 1.9 * planned()["reuse"][0]["compute"]["seconds"]
    assert planned("--hbm-efficiency", 0.4)["strategies"][0]["latency"] != planned()["strategies"][0]["latency"]
    assert planned("--seed", 1)["strategies"] != planned()["strategies"]
    assert planned("--spread", 0)["strategies"] != planned()["strategies"]
    assert planned("--pp", 2)["per_gpu"]["kv_bytes_per_token"] == 327_680 / 4


def test_a_trace_is_replayed(trace: Path) -> None:
    found = planned("--trace", trace)["trace"]
    assert [each["name"] for each in found] == ["HBM", "DRAM", "NVMe"]
    assert found[-1]["total_ratio"] == pytest.approx(29 / 40)  # block 0 is new once, of the others each second one
    assert planned("--trace", trace, "--limit", 2)["trace"][-1]["total_ratio"] == 0.5
    assert "Prefix hits of the trace" in run(*QUICK, "--trace", trace).stdout


def test_charts_are_named_where_they_are(trace: Path, tmp_path: Path) -> None:
    """Of a model without times: fewer."""
    result = run(*QUICK, "--model", "gemma-3-27b", "--plots", tmp_path / "plots", "--trace", trace, "--plot-format", "png")
    assert result.stderr == "".join(f"wrote {tmp_path}/plots/{name}.png\n" for name in ("memory", "sequences", "hits"))
    assert (tmp_path / "plots" / "hits.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "none"), "no model is named 'none'"),
        (("--scheme", "int3"), "no scheme 'int3'"),
        (("--scheme", "int4/64", "--block-tokens", "16"), "needs block_tokens to be a multiple of 64"),
        (("--tp", "1"), "use at least 2 such GPUs"),
        (("--nic", "0"), "nic_bytes_per_s is 0"),
        (("--nvme-bandwidth", "0"), "the tier NVMe must have a capacity of 0 or more and a bandwidth above 0"),
        (("--trace", "/nowhere"), "cannot read the trace /nowhere"),
    ],
)
def test_misuse_is_one_line_that_says_what_to_change(arguments: tuple[str, ...], message: str) -> None:
    result = run(*QUICK, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_trace_without_blocks_is_nothing_to_replay(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text(line(0, []))
    result = run(*QUICK, "--trace", tmp_path / "empty.jsonl")
    assert "has no blocks" in result.stderr
