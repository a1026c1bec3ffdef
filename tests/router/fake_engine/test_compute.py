"""Promises of compute.py: times are the model's, and queues and batches are kept."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvstore.cli.tools.cluster import LocalCluster
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import Corrupt
from kvstore.router.fake_engine.blocks import BlockStore, PinnedNodeClient
from kvstore.router.fake_engine.compute import Clock, DecodeEngine, DecodingSequence, PrefillEngine
from tests.router.scripted import following

NOBODY = "127.0.0.1:1"


class Times:
    """A tenth of a second a token that is not cached."""

    def prefill_s(self, input_tokens: int, prefix_tokens: int) -> float:
        return (input_tokens - prefix_tokens) / 10


@asynccontextmanager
async def engine(
    master: str, model: str, speedup: float = 1e6, clock: Clock = time.monotonic
) -> AsyncIterator[tuple[PrefillEngine, BlockStore, Namespace]]:
    namespace = Namespace(model=model, dtype="bfloat16", block_tokens=4)
    async with PinnedNodeClient(master, "node-0", tenant="", token="") as client:
        blocks = BlockStore(client, namespace, 64)
        yield PrefillEngine(Times(), blocks, namespace, speedup=speedup, clock=clock), blocks, namespace


def nothing() -> None:
    pass


async def begun(prefill: PrefillEngine) -> None:
    """Wait until a prefill runs and none waits."""
    while prefill.queue_s == 0 or prefill.waiting_s:
        await asyncio.sleep(0.001)


async def test_prefill_computes_only_uncached_tokens(two_nodes: LocalCluster) -> None:
    async with engine(two_nodes.address, "once") as (prefill, blocks, namespace):
        tokens = list(range(18))
        first = await prefill.run(tokens, prefix_blocks=0, on_queued=nothing)
        assert (first.prefix_tokens, first.blocks, first.duration_s) == (0, 4, 1.8)
        assert await blocks.load(namespace.block_keys(tokens)) == 4
        again = await prefill.run(tokens, prefix_blocks=4, on_queued=nothing)
        assert (again.prefix_tokens, again.blocks, again.duration_s) == (16, 4, 0.2)
        whole = await prefill.run(tokens[:16], prefix_blocks=4, on_queued=nothing)
        assert whole.prefix_tokens == 15, "the last token gives the first logits"
        obeyed = await prefill.run(tokens, prefix_blocks=1, on_queued=nothing)
        assert obeyed.prefix_tokens == 4


async def test_prefill_queue_has_running_and_waiting_prompts(two_nodes: LocalCluster) -> None:
    async with engine(two_nodes.address, "queue", clock=lambda: 0.0) as (prefill, _, _):
        queued: list[float] = []
        assert prefill.queue_s == 0
        async with asyncio.TaskGroup() as group:
            for number in range(3):
                tokens = [number] * 500
                group.create_task(prefill.run(tokens, prefix_blocks=0, on_queued=lambda: queued.append(prefill.queue_s)))
            while len(queued) < 3:
                await asyncio.sleep(0)
            assert queued == [50, 100, 150]
        assert prefill.queue_s == 0


async def test_a_cancelled_prefill_gives_its_turn_to_the_next(two_nodes: LocalCluster) -> None:
    async with engine(two_nodes.address, "turn", speedup=1.0) as (prefill, _, _):
        running = asyncio.create_task(prefill.run([1] * 30_000, prefix_blocks=0, on_queued=nothing))
        await begun(prefill)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert prefill.queue_s == 0
        assert (await prefill.run([], prefix_blocks=0, on_queued=nothing)).duration_s == 0


async def test_an_engine_goes_on_without_its_store() -> None:
    async with engine(NOBODY, "alone") as (prefill, _, _):
        done = await prefill.run(list(range(8)), prefix_blocks=1, on_queued=nothing)
        assert (done.prefix_tokens, done.blocks, done.duration_s) == (0, 0, 0.8)


async def test_wrong_bytes_are_no_prefix(two_nodes: LocalCluster) -> None:
    async with engine(two_nodes.address, "wrong") as (prefill, _, namespace):
        async with PinnedNodeClient(two_nodes.address, "node-0", tenant="", token="") as client:
            await client.put(namespace.block_keys([1, 2, 3, 4])[0], b"wrong", namespace=namespace, ack="cluster")
        with pytest.raises(Corrupt):
            await prefill.run([1, 2, 3, 4], prefix_blocks=1, on_queued=nothing)


class StepTimes:
    """A step takes as many seconds as it has sequences."""

    def tbt_s(self, batch: int, context_tokens: int) -> float:
        return float(batch)


def decode_engine(capacity_tokens: int = 0) -> tuple[DecodeEngine, list[tuple[int, int, float]]]:
    """And the steps it makes: batch, context and seconds."""
    steps: list[tuple[int, int, float]] = []
    return DecodeEngine(StepTimes(), speedup=1e6, capacity_tokens=capacity_tokens, on_step=lambda *step: steps.append(step)), steps


async def made(of: DecodeEngine, sequence: DecodingSequence, count: int) -> list[int]:
    try:
        return [await sequence.made.get() for _ in range(count)]
    finally:
        of.leave(sequence)


async def test_what_does_not_fit_waits_in_line() -> None:
    decode, steps = decode_engine(capacity_tokens=30)
    sequences = [decode.join([1] * 20, 2), decode.join([2] * 25, 2), decode.join([3], 2)]
    assert decode.batch == 3
    await asyncio.gather(*(made(decode, sequence, 2) for sequence in sequences))
    assert [batch for batch, _, _ in steps] == [1, 1, 2, 2], "the short one has not overtaken the long one"


async def test_one_that_leaves_makes_room() -> None:
    decode, _ = decode_engine(capacity_tokens=30)
    running, waiting, last = decode.join([1] * 20, 9), decode.join([2] * 20, 9), decode.join([3] * 20, 3)
    await running.made.get()
    decode.leave(waiting)
    decode.leave(running)
    decode.leave(running)
    assert await made(decode, last, 3) == following([3] * 20, 3)
    assert decode.batch == 0
