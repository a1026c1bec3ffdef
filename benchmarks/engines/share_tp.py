"""Cost of blocks in values by KV heads (`share_tp`), against one value a rank: rows of `make bench-engines`.

A rank of vLLM's connector without vLLM, on one host with its node. A prompt of 3,840 tokens is 30 blocks of 4 MiB in 16 layers with 8 KV
heads, a piece of 256 KiB a layer; a prompt of 4,096 tokens is looked up in blocks of 16 tokens. All ways in turn, ratios are of the best of
each: the way to heads-first memory (vLLM on a CPU) and to tokens-first memory (vLLM's default on GPUs), the latter copied by the CPU here.
"""

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Final

import torch

from benchmarks.engines.vllm import cluster
from kvstore.cli.tools.bench import BenchRow
from kvstore.client import Client
from kvstore.client.jobs.jobs import Jobs
from kvstore.engines.head_split import head_split
from kvstore.engines.vllm.identity import Shard, Variant
from kvstore.engines.vllm.plan import BlockTransfer, StepPlan
from kvstore.engines.vllm.pools import HeadPools, HeadShards, LayerPools, head_slices
from kvstore.engines.vllm.settings import VllmSettings
from kvstore.engines.vllm.worker import RankGroup, Worker
from kvstore.kvcache.namespace import Namespace

BLOCKS: Final = 30
LAYERS: Final = 16
HEADS: Final = 8
TOKENS: Final = 128
ELEMENTS: Final = 64
"""Of K and V of a head and token, in float32."""
NUMBERS: Final = (0, 2, 8)
"""Of values; 0: off."""
ROUNDS: Final = 15
LOOKUP_ROUNDS: Final = 51
LOOKUP_BLOCKS: Final = 4096 // 16


def rows() -> Iterator[BenchRow]:
    for order in ("heads first", "tokens first"):
        yield from move_rows(order)
    yield from lookup_rows()


def move_rows(order: str) -> Iterator[BenchRow]:
    """Put: until all is stored and known. Copy: what the engine's step waits for. Get: into the pool."""
    settings = VllmSettings(load_deadline_s=60)
    taken_s: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    with cluster() as running:
        running.wait_warm()
        workers = {number: Worker(Client(running.address), [group(order, number)], settings) for number in NUMBERS}
        with Client(running.address) as client:
            for turn in range(ROUNDS):
                for number, worker in workers.items():
                    transfer = BlockTransfer("request", list(range(BLOCKS)), [digest(turn, block) for block in range(BLOCKS)])
                    begin_s = time.perf_counter()
                    worker.save(StepPlan(saves=[transfer]))
                    taken_s["copy", number].append(time.perf_counter() - begin_s)
                    worker.flush()
                    taken_s["put", number].append(time.perf_counter() - begin_s)
                    taken_s["get", number].append(timed(lambda: load(worker, transfer)))  # noqa: B023 (called here)
                    assert worker.take_counters().loaded_blocks == BLOCKS
                    client.remove_matching(pattern="*")  # the next one finds the memory of the node as this one did
        for worker in workers.values():
            worker.close()
    for what in ("copy", "put", "get"):
        off_s = min(taken_s[what, 0])
        yield BenchRow(f"share_tp, {order}: {what} of a block, off", off_s / BLOCKS * 1e3, "ms")
        for number in NUMBERS[1:]:
            yield BenchRow(f"share_tp, {order}: {what} of a block, {number} values / off", min(taken_s[what, number]) / off_s, "ratio")


def load(worker: Worker, transfer: BlockTransfer) -> None:
    """Load, and wait for the end of it."""
    worker.load(StepPlan(loads=[transfer]))
    while not worker.take_finished()[1]:
        worker.wait_idle()


def lookup_rows() -> Iterator[BenchRow]:
    """The scheduler's question for a prompt whose blocks are all there, on the node's host: making the keys, and one message."""
    hashes = [digest(0, block) for block in range(LOOKUP_BLOCKS)]
    taken_s: defaultdict[int, list[float]] = defaultdict(list)
    with cluster() as running, Client(running.address) as client, Jobs(client) as jobs:
        running.wait_warm()
        shards = {number: by_heads(number) if number else template() for number in NUMBERS}
        for number, of_blocks in shards.items():
            keys = of_blocks.of(Variant("")).keys(hashes)
            client.put_batch(keys, [bytes(1024)] * len(keys), ack="cluster")
            yield BenchRow(f"share_tp: keys of a prompt of 4,096 tokens, {number or 'off'}", len(keys), "keys")
        for _ in range(LOOKUP_ROUNDS):
            for number, of_blocks in shards.items():
                found: list[bool] = []
                taken_s[number].append(timed(lambda: found.extend(jobs.exists(of_blocks.of(Variant("")).keys(hashes)))))  # noqa: B023
                assert all(found)
    off_s = min(taken_s[0])
    yield BenchRow("share_tp: lookup of a prompt of 4,096 tokens, off", off_s * 1e3, "ms")
    for number in NUMBERS[1:]:
        yield BenchRow(f"share_tp: lookup of a prompt of 4,096 tokens, {number} values / off", min(taken_s[number]) / off_s, "ratio")


def group(order: str, number: int) -> RankGroup:
    """Of a rank that has all heads, its layers in one piece of memory, as vLLM has them."""
    if order == "heads first":
        layers = list(torch.rand(LAYERS, BLOCKS, HEADS, TOKENS, ELEMENTS))
    else:
        layers = list(torch.rand(LAYERS, BLOCKS, TOKENS, HEADS, ELEMENTS).transpose(2, 3))
    if not number:
        return RankGroup(template(), LayerPools(layers, BLOCKS))
    slices = [head_slices(layer, HEADS, number) for layer in layers]
    return RankGroup(by_heads(number), HeadPools([LayerPools([of[value] for of in slices], BLOCKS) for value in range(number)]))


def template() -> Shard:
    return Shard(Namespace(model="share", dtype="float32", block_tokens=TOKENS))


def by_heads(number: int) -> HeadShards:
    namespace = Namespace(model=f"share {number}", dtype="float32", block_tokens=TOKENS)
    return HeadShards.of_rank(namespace, head_split(number, kv_heads=HEADS, tp=(0, 1)))


def digest(turn: int, block: int) -> bytes:
    return hashlib.sha256(b"%d %d" % (turn, block)).digest()


def timed(call: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    call()
    return time.perf_counter() - begin_s
