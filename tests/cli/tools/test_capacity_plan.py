"""Promises of capacity_plan.py. The worked figures of capacity are capacity.py's tests, the laws of strategies lab/pressure/model.py's."""

from pathlib import Path

import pytest

from kvstore.cli.tools.capacity_plan import (
    blocks_of,
    make_plan,
    reuse_of,
    trace_hits,
)
from kvstore.kvcache.models.named import find_model
from kvstore.kvcache.traces.mooncake import TraceRequest, read_trace
from kvstore.kvcache.traces.named import generate
from kvstore.lab.pressure.load import UserLoad
from kvstore.lab.pressure.strategies import LowerTier
from kvstore.lab.replay import CacheReplay
from kvstore.scheduler.estimators.analytic import AnalyticModel, find_gpu
from tests.cli.planned import GB, setup

TRACE = Path(__file__).parents[3].parent / "shared/data/traces/conversation_trace.jsonl"
BLOCK_BYTES = 512 * 327_680
LOAD = UserLoad(users=1, context_tokens=100, output_tokens=1, duration_s=1)


def test_layer_model_gives_break_even_bandwidth() -> None:
    row = reuse_of(setup(), 8192)
    assert row.size_bytes == 8192 * 327_680
    assert row.compute is not None
    assert row.compute.seconds == AnalyticModel(find_model("llama3-70b"), find_gpu("H100"), gpus=2).prefill_s(8192, 0)
    assert row.compute.needed_bytes_per_s * row.compute.seconds == pytest.approx(row.size_bytes)
    assert row.fetch_s == {"DRAM": row.size_bytes / 50e9, "NVMe": row.size_bytes / 1e9, "NIC": row.size_bytes / 100e9}
    assert [row.pays(source) for source in row.fetch_s] == [True, False, True]


def test_a_quantised_cache_needs_as_much_less_bandwidth() -> None:
    plain, small = (reuse_of(setup(scheme=scheme), 8192) for scheme in ("none", "int4/64"))
    assert plain.size_bytes / small.size_bytes == pytest.approx(16 / 4.5)
    assert plain.compute is not None
    assert small.compute is not None
    assert plain.compute.seconds == small.compute.seconds
    assert plain.compute.needed_bytes_per_s / small.compute.needed_bytes_per_s == pytest.approx(16 / 4.5)
    assert plain.compute.inequality_bytes_per_s / small.compute.inequality_bytes_per_s == pytest.approx(16 / 4.5)
    assert small.pays("NVMe") is True


@pytest.mark.parametrize(
    ("model", "reason"),
    [("mixtral-8x7b", "mixture of experts"), ("deepseek-v3", "mixture of experts"), ("mistral-7b-v0.1", "sliding window")],
)
def test_unsupported_models_get_sizes_and_a_reason(model: str, reason: str) -> None:
    plan = make_plan(setup(model, gpu="H200", tp=8))
    assert reason in plan.no_times
    assert plan.hbm.tokens > 1000
    assert plan.outcomes == []
    assert all(row.compute is None and row.size_bytes > 0 for row in plan.reuse)
    assert plan.reuse[0].pays("DRAM") is None


def prompts(count: int) -> list[TraceRequest]:
    if TRACE.exists():
        return [request for request, _ in zip(read_trace(TRACE), range(count), strict=False)]
    return [request for request, _ in zip(generate(seed=1), range(count), strict=False)]


def tiers(*sizes: int) -> list[LowerTier]:
    return [LowerTier(name=f"tier {number}", capacity_bytes=size, bytes_per_s=1e9) for number, size in enumerate(sizes)]


def test_blocks_are_of_512_tokens_as_they_are_stored() -> None:
    plan = make_plan(setup(weight_bytes=140 * GB, load=LOAD))
    assert blocks_of(plan) == {"HBM": 16 * GB // BLOCK_BYTES, "DRAM": 176 * GB // BLOCK_BYTES, "NVMe": 1776 * GB // BLOCK_BYTES}
    small = make_plan(setup(weight_bytes=140 * GB, load=LOAD, scheme="int4/64"))
    assert blocks_of(small)["HBM"] == int(16 * GB / (BLOCK_BYTES * 4.5 / 16))


def test_each_tier_adds_what_one_cache_down_to_it_hits_more() -> None:
    requests = prompts(200)
    plan = make_plan(setup(weight_bytes=140 * GB, load=LOAD))
    hits = trace_hits(plan, requests)
    sizes = list(blocks_of(plan).values())
    unique = len({block for request in requests for block in request.hash_ids})
    assert sizes[0] < sizes[1] < unique
    expected = [CacheReplay("prefix", min(size, unique)).run(requests).prefix_hit_ratio for size in sizes]
    assert [each.total_ratio for each in hits] == pytest.approx(expected, abs=0.02)  # lab spreads the ids, which breaks ties otherwise
    assert sum(each.added_ratio for each in hits) == pytest.approx(hits[-1].total_ratio)
    assert 0 < hits[0].total_ratio < hits[1].total_ratio
    assert [(each.name, each.total_blocks) for each in hits] == list(blocks_of(plan).items())


def test_caches_with_room_for_all_are_replayed_once() -> None:
    requests = [TraceRequest(0.0, 1024, 1, (1, 2)), TraceRequest(1.0, 1024, 1, (1, 2))]
    done: list[bool] = []
    plan = make_plan(setup(weight_bytes=140 * GB, load=LOAD))
    hits = trace_hits(plan, requests, on_done=lambda: done.append(True))
    assert len(done) == 1
    assert [each.total_ratio for each in hits] == [0.5, 0.5, 0.5]
    assert [each.added_ratio for each in hits] == [0.5, 0.0, 0.0]
