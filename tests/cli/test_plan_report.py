"""Tests of plan_report.py."""

from pathlib import Path

from rich.console import Console

from kvstore.cli.plan_report import draw, plan_table
from kvstore.cli.tools.capacity_plan import CapacityPlan, TraceHits, make_plan, outcomes_of
from kvstore.lab.pressure.load import UserLoad
from tests.cli.planned import GB, setup

LOAD = UserLoad(users=4, context_tokens=20_000, output_tokens=20, duration_s=30)
HITS = [TraceHits(name=name, total_blocks=10, total_ratio=0.2, added_ratio=0.1) for name in ("HBM", "DRAM")]
OVER_USERS = {"ttft": "mean TTFT (s)", "latency": "mean latency (s)", "goodput": "goodput (tokens/s)", "failed": "share of requests"}


def shown(plan: CapacityPlan, *hits: TraceHits) -> list[str]:
    console = Console(width=180)
    with console.capture() as capture:
        console.print(plan_table(plan, hits))
    return [" ".join(line.split()) for line in capture.get().splitlines()]


def test_people_see_what_fits_what_pays_and_what_strategies_do() -> None:
    lines = shown(make_plan(setup(weight_bytes=140 * GB)))
    assert lines[0] == "model llama3-70b: 80 layers x 8 KV heads x 128 (gqa), bfloat16 stored as none"
    assert "a token 320 KiB: 16.00 bits an element with 0.0 % of metadata" in lines
    assert "weights 65.2 GiB of each GPU" in lines
    assert "KV cache 7.5 GiB of each GPU, where a token takes 160 KiB: 48,828 tokens" in lines
    assert "users 9 of 12 contexts of 5,000 tokens fit in HBM at once" in lines
    assert "HBM 14.9 GiB 48,828 9 9 1.0" in lines
    assert "DRAM 149.0 GiB 488,281 97 106 11.0" in lines
    assert any(line.startswith("8,192 2.5 GiB 1.22 s 2.2 GB/s 4.65 GB/s 53.7 ms, pays 2.68 s, no") for line in lines)
    assert "12 users, 5,000 + 100 tokens (+-25%), 10.00 s of thought, for 60.00 s" in lines
    for name in ("reject", "queue", "evict", "recompute", "offload", "queue+recompute"):
        assert sum(line.split()[:1] == [name] for line in lines) == 2
    assert not any("trace" in line or "no times" in line for line in lines)


def test_hits_of_a_trace_are_by_tier() -> None:
    hits = TraceHits(name="DRAM", total_blocks=1234, total_ratio=0.5, added_ratio=0.25)
    lines = shown(make_plan(setup()), hits)
    assert lines[lines.index("Prefix hits of the trace") + 2] == "DRAM 1,234 0.5000 0.2500"


def test_report_without_times_omits_columns_and_has_reason() -> None:
    lines = shown(make_plan(setup("gemma-3-27b")))
    assert "window 52 of the layers keep no more than 1,024 tokens of a sequence" in lines
    assert "prefix bytes DRAM 50 GB/s NVMe 1 GB/s NIC 100 GB/s" in lines
    assert lines[-1].startswith("no times: gemma-3-27b has a sliding window")
    assert not any("goodput" in line or "pays" in line for line in lines)


def test_every_chart_has_its_labels_and_names(tmp_path: Path) -> None:
    """Of 4 users, and of one who never asks: of none, none fails."""
    plan = make_plan(setup(load=LOAD))
    nobody = setup(load=UserLoad(users=1, context_tokens=100, output_tokens=1, think_s=1e4, duration_s=1e-3))
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


def test_a_tier_that_never_holds_a_sequence_has_no_line(tmp_path: Path) -> None:
    """A thousandth of a GB for KV cache is room for a few tokens."""
    draw(make_plan(setup("gemma-3-27b", weight_bytes=156 * 10**9 - 2_000_000, load=LOAD)), {}, [], tmp_path, "svg")
    found = (tmp_path / "sequences.svg").read_text()
    assert ">HBM + DRAM<" in found
    assert ">HBM<" not in found
