"""Promises of plan_tables.py."""

from rich.console import Console

from kvstore.client.cli.plan_tables import plan_table
from kvstore.client.tools.plan_trace import TraceHits
from kvstore.client.tools.planning import Plan, make_plan
from kvstore.scheduler.pressure.load import Load
from tests.client.cli.planned import GB, setup


def shown(plan: Plan, *hits: TraceHits) -> list[str]:
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


def test_one_gpu_is_not_each_of_several_and_metadata_has_its_share() -> None:
    lines = shown(make_plan(setup("llama3-8b", tp=1, scheme="int4/64")))
    assert "a token 36 KiB: 4.50 bits an element with 11.1 % of metadata" in lines
    assert "weights 15.0 GiB" in lines
    assert "users 12 of 12 contexts of 5,000 tokens fit in HBM at once" in lines


def test_hits_of_a_trace_are_by_tier() -> None:
    hits = TraceHits(name="DRAM", total_blocks=1234, total_ratio=0.5, added_ratio=0.25)
    lines = shown(make_plan(setup()), hits)
    assert lines[lines.index("What of the trace's prompts is in the cache") + 2] == "DRAM 1,234 0.5000 0.2500"


def test_without_times_the_columns_that_need_them_are_left_out_and_the_reason_is_said() -> None:
    lines = shown(make_plan(setup("gemma-3-27b")))
    assert "window 52 of the layers keep no more than 1,024 tokens of a sequence" in lines
    assert "prefix bytes DRAM 50 GB/s NVMe 1 GB/s NIC 100 GB/s" in lines
    assert lines[-1].startswith("no times: gemma-3-27b has a sliding window")
    assert not any("goodput" in line or "pays" in line for line in lines)


def test_where_nothing_is_completed_there_are_no_latencies() -> None:
    lines = shown(make_plan(setup(load=Load(users=2, context_tokens=300_000, output_tokens=1, duration_s=30))))
    first = next(line for line in lines if line.startswith("reject")).split()
    assert first[2:] == ["0", first[1], "0.0", "-", "-", "-", "-"]
