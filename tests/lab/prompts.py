"""Prompts for the lab's tests: few blocks with much reuse, and the public trace if it is available."""

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import strategies

from kvstore.kvcache.traces.mooncake import TraceRequest, read_trace
from kvstore.kvcache.traces.named import generate

TRACE = Path(__file__).parents[3] / "shared/data/traces/conversation_trace.jsonl"


def requests(prompts: Iterable[Sequence[int]], *, every_s: float = 1.0) -> list[TraceRequest]:
    """Prompts at equal intervals, the first at 0."""
    return [TraceRequest(1000 * every_s * index, 512 * len(ids), 1, tuple(ids)) for index, ids in enumerate(prompts)]


prompts = strategies.lists(strategies.lists(strategies.integers(0, 12), max_size=8, unique=True), max_size=25)
"""Prompts of often repeated blocks in any order: traces need not consist of prefixes."""


@cache
def conversations(count: int = 400) -> list[TraceRequest]:
    return list(islice(generate(seed=1), count))


@cache
def public_trace() -> list[TraceRequest]:
    if not TRACE.exists():
        pytest.skip("the public conversation trace is not available")
    return list(read_trace(TRACE))
