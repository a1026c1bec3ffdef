"""Promises of plan_trace.py."""

from pathlib import Path

import pytest

from kvstore.client.tools.plan_trace import blocks_of, trace_hits
from kvstore.client.tools.planning import make_plan
from kvstore.kvcache.traces.mooncake import TraceRequest, read_trace
from kvstore.kvcache.traces.named import generate
from kvstore.lab.jobs import Job
from kvstore.lab.replay import Replay
from kvstore.scheduler.pressure.load import Load
from kvstore.scheduler.pressure.strategies import LowerTier
from tests.client.cli.planned import GB, setup

TRACE = Path(__file__).parents[3].parent / "shared/data/traces/conversation_trace.jsonl"
BLOCK_BYTES = 512 * 327_680
LOAD = Load(users=1, context_tokens=100, output_tokens=1, duration_s=1)


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
    hits = trace_hits(plan, requests, processes=1)
    sizes = list(blocks_of(plan).values())
    unique = len({block for request in requests for block in request.hash_ids})
    assert sizes[0] < sizes[1] < unique
    expected = [Replay("prefix", min(size, unique)).run(requests).prefix_hit_ratio for size in sizes]
    assert [each.total_ratio for each in hits] == pytest.approx(expected, abs=0.02)  # lab spreads the ids, which breaks ties otherwise
    assert sum(each.added_ratio for each in hits) == pytest.approx(hits[-1].total_ratio)
    assert 0 < hits[0].total_ratio < hits[1].total_ratio
    assert [(each.name, each.total_blocks) for each in hits] == list(blocks_of(plan).items())


def test_caches_with_room_for_all_are_replayed_once() -> None:
    requests = [TraceRequest(0.0, 1024, 1, (1, 2)), TraceRequest(1.0, 1024, 1, (1, 2))]
    done: list[Job] = []
    plan = make_plan(setup(weight_bytes=140 * GB, load=LOAD))
    hits = trace_hits(plan, requests, processes=1, on_done=done.append)
    assert len(done) == 1
    assert [each.total_ratio for each in hits] == [0.5, 0.5, 0.5]
    assert [each.added_ratio for each in hits] == [0.5, 0.0, 0.0]


def test_where_no_block_has_room_nothing_is_hit() -> None:
    requests = [TraceRequest(0.0, 512, 1, (1,)), TraceRequest(1.0, 512, 1, (1,))]
    # 50 MB for KV cache a GPU, where a block takes 84 MB of each.
    plan = make_plan(setup(weight_bytes=156 * GB - 100_000_000, load=LOAD, lower_tiers=tiers(BLOCK_BYTES)))
    hits = trace_hits(plan, requests, processes=1)
    assert [each.total_blocks for each in hits] == [0, 1]
    assert [each.total_ratio for each in hits] == [0.0, 0.5]
