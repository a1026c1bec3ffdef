"""kvstore-router before two real vLLM servers on requests of the conversation trace's shape: where requests go, and what a store adds.

Four runs of the same requests: Algorithm 1 or random, with the store or without. A block of the trace is one of vLLM's here, 32 tokens for
512, of tokens that follow from its id; conversations are drawn from the whole trace; each engine's own cache is small enough to lose some.
Rows: the share of prompt tokens that were not computed, and the time to the first token through the router, both as ratios to random
routing in the same run.
"""

import random
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.cli.tools.bench import BenchRow, at_least, at_most
from kvstore.kvcache.traces.mooncake import TraceRequest, read_trace
from tests.engines.live.router.fleet import BLOCK_TOKENS, Fleet
from tests.engines.live.tiny_model import make

TRACE: Final = Path(__file__).parents[3] / "shared/data/traces/conversation_trace.jsonl"
REQUESTS: Final = 200
MAX_BLOCKS: Final = 96
"""Longer prompts of the trace are left out: the tiny model takes 4,096 tokens."""
OWN_BLOCKS: Final = 384
AT_ONCE: Final = 4
OUTPUT_TOKENS: Final = 4
WARM_UP: Final = 4


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run."""

    cached_share: float
    """Of the prompts' tokens, in the engines' own memory or the store."""
    ttft_p50_s: float
    ttft_mean_s: float


def rows() -> list[BenchRow]:
    """Runs it all; without the trace, nothing."""
    if not TRACE.exists():
        return []
    prompts = _prompts()
    found: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="kvstore-") as folder:
        make(Path(folder), "tiny")
        for name, has_store, dispatcher in (
            ("Algorithm 1, store", True, "kvcache_centric"),
            ("random, store", True, "random"),
            ("Algorithm 1, no store", False, "kvcache_centric"),
            ("random, no store", False, "random"),
        ):
            found[name] = _run(Path(folder), prompts, has_store=has_store, dispatcher=dispatcher)
    rows = []
    for name, outcome in found.items():
        rows.append(BenchRow(f"router, {name}: prompt tokens not computed", 100 * outcome.cached_share, "%"))
        rows.append(BenchRow(f"router, {name}: time to first token, p50", 1e3 * outcome.ttft_p50_s, "ms"))
        rows.append(BenchRow(f"router, {name}: time to first token, mean", 1e3 * outcome.ttft_mean_s, "ms"))
    ours, others = found["Algorithm 1, store"], found["random, store"]
    alone = found["random, no store"]
    rows.append(at_least("router, not computed: Algorithm 1 / random, store", ours.cached_share / others.cached_share, "x", 1.0))
    rows.append(at_most("router, TTFT mean: Algorithm 1 / random, store", ours.ttft_mean_s / others.ttft_mean_s, "x", 1.0))
    rows.append(at_most("router, TTFT mean: Algorithm 1, store / random, no store", ours.ttft_mean_s / alone.ttft_mean_s, "x", 1.0))
    return rows


def _prompts() -> list[list[int]]:
    """Those of whole conversations, drawn at random, in the order of the trace: as many as there are REQUESTS, or a few less."""
    conversations: dict[int, list[TraceRequest]] = {}
    for request in read_trace(TRACE):
        if len(request.hash_ids) <= MAX_BLOCKS:
            # All begin with one and the same block.
            name = request.hash_ids[1] if len(request.hash_ids) > 1 else -len(conversations)
            conversations.setdefault(name, []).append(request)
    drawn: list[TraceRequest] = []
    for name in random.Random(0).sample(list(conversations), len(conversations)):
        if len(drawn) + len(conversations[name]) <= REQUESTS:
            drawn += conversations[name]
    return [_tokens(request) for request in sorted(drawn, key=lambda request: request.timestamp_ms)]


def _tokens(request: TraceRequest) -> list[int]:
    """Those of each block follow from its id; the last block is as full as the trace's is."""
    tokens = [token for block in request.hash_ids for token in _block(block)]
    return tokens[: max(1, request.input_length * BLOCK_TOKENS // 512)]


def _block(number: int) -> list[int]:
    numbers = random.Random(number)
    return [numbers.randrange(3, 1000) for _ in range(BLOCK_TOKENS)]


def _run(folder: Path, prompts: Sequence[list[int]], *, has_store: bool, dispatcher: str) -> Outcome:
    with tempfile.TemporaryDirectory(dir=folder) as own:
        fleet = Fleet(Path(own), folder, blocks=OWN_BLOCKS, dram="2GiB", dispatcher=dispatcher, has_store=has_store)
        with fleet, ThreadPoolExecutor(AT_ONCE) as threads:
            # The first requests of an engine compile what the others run.
            list(threads.map(lambda seed: fleet.ask(_block(-1 - seed) * 20, OUTPUT_TOKENS), range(WARM_UP * len(fleet.servers))))
            before = _cached_and_asked(fleet)
            ttfts_s = [answer.first_token_s for answer in threads.map(lambda prompt: fleet.ask(prompt, OUTPUT_TOKENS), prompts)]
            cached, asked = (now - then for now, then in zip(_cached_and_asked(fleet), before, strict=True))
    return Outcome(cached / asked, statistics.median(ttfts_s), statistics.fmean(ttfts_s))


def _cached_and_asked(fleet: Fleet) -> tuple[float, float]:
    """Tokens of prompts found in the engines' own memory or the store, and all that were looked for."""
    own = sum(server.metric("vllm:prefix_cache_hits_total") for server in fleet.servers)
    return own + fleet.loaded_tokens(), sum(server.metric("vllm:prefix_cache_queries_total") for server in fleet.servers)
