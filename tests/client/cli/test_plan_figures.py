"""Promises of plan_figures.py."""

from pathlib import Path

import pytest

from kvstore.client.cli.plan_figures import draw
from kvstore.client.tools.plan_trace import TraceHits
from kvstore.client.tools.planning import make_plan, outcomes_of
from kvstore.protocol.errors import ConfigError
from kvstore.scheduler.pressure.load import Load
from tests.client.cli.planned import setup

LOAD = Load(users=4, context_tokens=20_000, output_tokens=20, duration_s=30)
HITS = [TraceHits(name=name, total_blocks=10, total_ratio=0.2, added_ratio=0.1) for name in ("HBM", "DRAM")]
OVER_USERS = {"ttft": "mean TTFT (s)", "latency": "mean latency (s)", "goodput": "goodput (tokens/s)", "failed": "share of requests"}


def test_every_chart_has_its_labels_and_names(tmp_path: Path) -> None:
    """Of 4 users, and of one who never asks: of none, none fails."""
    plan = make_plan(setup(load=LOAD))
    nobody = setup(load=Load(users=1, context_tokens=100, output_tokens=1, think_s=1e4, duration_s=1e-3))
    paths = draw(plan, {4: plan.outcomes, 1: outcomes_of(nobody, 1)}, HITS, tmp_path / "new", "svg")
    assert [path.name for path in paths] == [f"{name}.svg" for name in ("memory", "sequences", "reuse", *OVER_USERS, "hits")]
    found = {path.stem: path.read_text() for path in paths}
    assert "KV cache" in found["memory"]
    assert "context (tokens)" in found["sequences"]
    assert "HBM + DRAM + NVMe" in found["sequences"]
    assert "bandwidth (GB/s)" in found["reuse"]
    assert "inequality" in found["reuse"]
    for name, label in OVER_USERS.items():
        assert label in found[name]
        assert ">queue+recompute<" in found[name]
    assert ">DRAM<" in found["hits"]


def test_without_times_or_a_trace_charts_of_them_are_left_out(tmp_path: Path) -> None:
    paths = draw(make_plan(setup("gemma-3-27b", load=LOAD)), {}, [], tmp_path, "png")
    assert [path.name for path in paths] == ["memory.png", "sequences.png"]


def test_a_tier_that_never_holds_a_sequence_has_no_line(tmp_path: Path) -> None:
    """A thousandth of a GB for KV cache is room for a few tokens."""
    draw(make_plan(setup("gemma-3-27b", weight_bytes=156 * 10**9 - 2_000_000, load=LOAD)), {}, [], tmp_path, "svg")
    found = (tmp_path / "sequences.svg").read_text()
    assert ">HBM + DRAM<" in found
    assert ">HBM<" not in found


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"cannot make the folder {tmp_path}/file/plots"):
        draw(make_plan(setup("gemma-3-27b", load=LOAD)), {}, [], tmp_path / "file" / "plots", "svg")
