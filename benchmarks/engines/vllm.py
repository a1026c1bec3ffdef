"""vLLM with kvstore's connector, against itself without a hit: rows of `make bench-engines`.

One request at a time, on a model of 174 million random weights in float32: a prompt of 3,900 tokens is 30 blocks, 120 MiB. Ratios are of
one run, and of its medians.
"""

import contextlib
import hashlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.engines.share_tp import load
from kvstore.cli.tools.bench import BenchRow, at_most
from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from kvstore.client import Client
from kvstore.client.jobs.jobs import Jobs
from kvstore.engines.vllm.identity import Shard, Variant
from kvstore.engines.vllm.lookup import StoreLookup
from kvstore.engines.vllm.plan import BlockTransfer, LayerGroup, SchedulerPlan, StepPlan
from kvstore.engines.vllm.pools import LayerPools
from kvstore.engines.vllm.settings import VllmSettings
from kvstore.engines.vllm.worker import RankGroup, Worker
from kvstore.kvcache.namespace import Namespace
from tests.engines.live.environments import ROOT
from tests.engines.live.vllm.engines import Answer, Engine, random_tokens

PROMPTS: Final = 3
PROMPT_TOKENS: Final = 3900
STEP_BLOCKS: Final = 1000
STEP_ROUNDS: Final = 101
BLOCK_TOKENS: Final = 16
COPY_BLOCKS: Final = 30
COPY_ROUNDS: Final = 31
LAYERS: Final = 16
LAYER_BYTES: Final = 256 << 10
MAX_HIT_OF_COLD: Final = 0.08
MAX_HIT_OF_LOCAL: Final = 2
MAX_STEP_MS: Final = 1


def rows() -> Iterator[BenchRow]:
    yield from step_rows()
    yield from vllm_rows()


def cluster() -> LocalCluster:
    return LocalCluster(ClusterPlan(dram="2GiB", is_private=True), on_log=lambda name, line: print(name, line, file=sys.stderr))


# --- the connector's own time ---


@dataclass
class Request:
    """As the plan of vLLM's connector sees one."""

    request_id: str
    block_hashes: Sequence[bytes]
    num_tokens: int
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None


def step_rows() -> Iterator[BenchRow]:
    """Time that vLLM's scheduler waits in a step with a lookup and plan of STEP_BLOCKS blocks, and in one that saves as many."""
    hashes = [hashlib.sha256(index.to_bytes(4)).digest() for index in range(STEP_BLOCKS)]
    shard = Shard(Namespace(model="step", dtype="float32", block_tokens=BLOCK_TOKENS))
    table_of_request = list(range(STEP_BLOCKS + 1))
    load_s, save_s = [], []
    with cluster() as running, Client(running.address) as client, Jobs(client) as jobs:
        running.wait_warm()
        client.put_batch(shard.keys(hashes), [bytes(4096)] * STEP_BLOCKS, ack="cluster")
        groups = [LayerGroup(BLOCK_TOKENS)]
        for _ in range(STEP_ROUNDS):
            request = Request("request", hashes, STEP_BLOCKS * BLOCK_TOKENS + 1)
            plan = SchedulerPlan(groups, hash_block_tokens=BLOCK_TOKENS, is_whole=lambda block: True, variant=lambda request: Variant(""))
            lookup = StoreLookup(jobs, groups, [[shard]], plan, VllmSettings(lookup_deadline_s=60))
            begin_s = time.perf_counter()
            tokens = lookup.find(request, 0, time.monotonic()).found_tokens
            plan.found(request, 0)
            plan.allocated(request, [table_of_request], tokens)
            plan.step(lambda _: [table_of_request], {}, {}, is_idle=True)
            load_s.append(time.perf_counter() - begin_s)
            assert tokens == STEP_BLOCKS * BLOCK_TOKENS
            plan = SchedulerPlan(groups, hash_block_tokens=BLOCK_TOKENS, is_whole=lambda block: True, variant=lambda request: Variant(""))
            plan.allocated(request, [table_of_request], 0)
            begin_s = time.perf_counter()
            plan.step(lambda _: [table_of_request], {request.request_id: tokens}, {}, is_idle=False)
            request.num_computed_tokens = tokens
            saves = plan.step(lambda _: [table_of_request], {request.request_id: 0}, {}, is_idle=False).saves
            save_s.append(time.perf_counter() - begin_s)
            assert len(saves[0].blocks) == STEP_BLOCKS
    for verb, times_s in (("looked up and loaded", load_s), ("saved", save_s)):
        name = f"vLLM: the scheduler's time for a step with {STEP_BLOCKS} blocks {verb}"
        yield at_most(name, statistics.median(times_s) * 1e3, "ms", MAX_STEP_MS)


# --- copies ---


def copy_rows() -> Iterator[BenchRow]:
    """Shortest of several times in which a single rank copies the blocks of a prompt of PROMPT_TOKENS tokens.

    One row is the copy out of its pool, the other from a store on this host into the pool."""
    shard = Shard(Namespace(model="copies", dtype="float32", block_tokens=128))
    blocks = list(range(COPY_BLOCKS))
    transfer = BlockTransfer("request", blocks, [hashlib.sha256(block.to_bytes(4)).digest() for block in blocks])
    pools = LayerPools([torch.rand(COPY_BLOCKS, LAYER_BYTES // 4) for _ in range(LAYERS)], COPY_BLOCKS)
    values = torch.zeros(COPY_BLOCKS, pools.value_bytes, dtype=torch.uint8)
    yield BenchRow("vLLM: 120 MiB copied out of the pool", shortest_ms(lambda: pools.gather(blocks, values)), "ms")
    with cluster() as running:
        running.wait_warm()
        worker = Worker(Client(running.address), [RankGroup(shard, pools)], VllmSettings(load_deadline_s=60))
        worker.save(StepPlan(saves=[transfer]))
        worker.flush()
        yield BenchRow("vLLM: 120 MiB loaded", shortest_ms(lambda: load(worker, transfer)), "ms")
        assert not worker.take_failed()
        worker.close()


def shortest_ms(call: Callable[[], None]) -> float:
    """Of COPY_ROUNDS."""
    times_s = []
    for _ in range(COPY_ROUNDS):
        begin_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - begin_s)
    return min(times_s) * 1e3


# --- time to first token ---


def vllm_rows() -> Iterator[BenchRow]:
    prompts = [random_tokens(seed, PROMPT_TOKENS) for seed in range(PROMPTS)]
    with tempfile.TemporaryDirectory() as folder, cluster() as running:
        running.wait_warm()
        model = Path(folder, "model")
        subprocess.run([sys.executable, "-m", "tests.engines.live.tiny_model", model, "small"], cwd=ROOT, check=True)
        with vllm(model, running.address) as first:
            cold_s = ttft_s([first.generate(prompt)[0] for prompt in prompts], cached=False)
            first.flush()
            local_s = ttft_s([first.generate(prompt)[0] for prompt in prompts], cached=True)
        with vllm(model, running.address) as second:
            hit_s = ttft_s([second.generate(prompt)[0] for prompt in prompts], cached=True)
    yield BenchRow(f"vLLM: TTFT of {PROMPT_TOKENS} tokens, cold", cold_s, "s")
    yield BenchRow("vLLM: TTFT, its own prefix cache", local_s, "s")
    yield BenchRow("vLLM: TTFT, computed by another process", hit_s, "s")
    yield at_most("vLLM: TTFT, computed by another process / cold", hit_s / cold_s, "ratio", MAX_HIT_OF_COLD)
    yield at_most("vLLM: TTFT, computed by another process / its own prefix cache", hit_s / local_s, "ratio", MAX_HIT_OF_LOCAL)


@contextlib.contextmanager
def vllm(model: Path, master: str) -> Iterator[Engine]:
    """With memory for all prompts. Its first request, which compiles, is not measured."""
    with Engine(model, store={"master": master}, max_model_len=4096, block_size=128, num_gpu_blocks_override=128) as engine:
        engine.generate(random_tokens(PROMPTS, 40))
        yield engine


def ttft_s(answers: list[Answer], *, cached: bool) -> float:
    """The median."""
    assert all(bool(answer.cached) is cached for answer in answers), [answer.cached for answer in answers]
    return statistics.median(answer.first_token_s for answer in answers)
