"""What share of a recorded trace's prompts the tiers of a plan would have had in cache. The replay is lab's; this only says how large."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvstore.client.tools.planning import Plan
from kvstore.kvcache.traces.mooncake import TraceRequest
from kvstore.lab.jobs import Job, PolicyJob, PolicyRow
from kvstore.lab.runs import run_jobs
from kvstore.tiers.policies.by_name import DEFAULT_POLICY

TRACE_BLOCK_TOKENS: Final = 512
"""Of a block of the public traces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHits:
    """A tier's part in the prefix hits: blocks before each prompt's first miss."""

    name: str
    total_blocks: int
    """That it and all tiers above hold."""
    total_ratio: float
    """Of the trace's blocks, hit in one cache of so many."""
    added_ratio: float
    """More than the tiers above hit."""


def blocks_of(plan: Plan) -> dict[str, int]:
    """By tier the trace's blocks that it and all above it hold."""
    block_bytes = replace(plan.setup.spec, block_tokens=TRACE_BLOCK_TOKENS).block_bytes
    return {tier.name: tier.total_bytes // block_bytes for tier in plan.tiers}


def trace_hits(
    plan: Plan, requests: Sequence[TraceRequest], *, processes: int = 0, on_done: Callable[[Job], None] = lambda job: None
) -> list[TraceHits]:
    """The trace through a cold cache as large as HBM, as HBM and the next tier, and so on, under the policy that a node has by default.

    Tiers in turn are taken for one cache that keeps what is used most in its fastest part. All of HBM's room for KV cache counts, as if
    no request were being served. `processes` and `on_done` as in lab's run_jobs. Raises what run_jobs raises.
    """
    blocks = blocks_of(plan)
    # A cache with room for all is as good as one with more, and one without room for a block has no hit.
    unique = len({block for request in requests for block in request.hash_ids})
    sizes = {min(count, unique) for count in blocks.values()} - {0}
    rows = run_jobs([PolicyJob(DEFAULT_POLICY, size) for size in sorted(sizes)], requests, processes=processes, on_done=on_done)
    ratios = {row.capacity_blocks: row.prefix_hit_ratio for row in rows if isinstance(row, PolicyRow)}
    found: list[TraceHits] = []
    above = 0.0
    for name, count in blocks.items():
        ratio = ratios.get(min(count, unique), 0.0)
        found.append(TraceHits(name=name, total_blocks=count, total_ratio=ratio, added_ratio=ratio - above))
        above = ratio
    return found
