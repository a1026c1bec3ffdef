"""Promises of aio.py: what it puts the blocking cache reads, and the other way round; a cancelled call leaves the tensors alone."""

import asyncio
from typing import Any

import pytest
import torch

from kvstore.client import AsyncClient, Client
from kvstore.client.async_driver import INLINE_WORK_BYTES
from kvstore.client.tensors.aio import AsyncTensorCache
from kvstore.client.tensors.cache import TensorCache
from kvstore.client.tensors.prompts import BlockHashes, Prompt
from kvstore.kvcache.models.spec import CacheSpec
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import DeadlineExceeded, InvalidArgument

SPEC = CacheSpec(layers=4, kv_heads=4, head_dim=16, dtype="float32", block_tokens=16)
BLOCKS = 1 + INLINE_WORK_BYTES // SPEC.block_bytes
TOKENS = list(range(16 * BLOCKS))


def namespace_of(model: str) -> Namespace:
    return Namespace(model=model, dtype="float32", block_tokens=16)


def cache_of(seed: int) -> Any:
    return torch.randn(BLOCKS, 4, 2, 4, 16, 16, generator=torch.Generator().manual_seed(seed))


def test_blocks_go_both_ways_between_the_two_kinds_of_client(address: str) -> None:
    cache, namespace, out = cache_of(0), namespace_of("both"), torch.zeros(BLOCKS, 4, 2, 4, 16, 16)

    async def put() -> None:
        async with AsyncClient(address) as client:
            rank = AsyncTensorCache(client, SPEC, namespace, layers_per_value=2)
            assert await rank.put_tensor(TOKENS, cache, layers=range(2), extras={0: b"lora"}) == BLOCKS * 4
            assert await rank.put_tensor(TOKENS, cache, extras={0: b"lora"}) == BLOCKS * 4
            assert await rank.match_prefix(TOKENS, extras={0: b"lora"}) == BLOCKS
            assert await rank.put_batch([Prompt(BlockHashes([b"a"]), [3])], cache) == [8]
            assert await rank.match_batch([Prompt(BlockHashes([b"a"])), Prompt(TOKENS)]) == [1, 0]
            await client.flush()

    async def get() -> None:
        async with AsyncClient(address) as client:
            rank = AsyncTensorCache(client, SPEC, namespace, layers_per_value=2)
            assert await rank.get_tensor(TOKENS, out, extras={0: b"lora"}, first_block=1, blocks=range(BLOCKS - 1)) == BLOCKS - 1
            assert out[:-1].equal(cache[1:])
            assert await rank.get_batch([Prompt(BlockHashes([b"a"]), [0])], out) == [1]
            assert out[0].equal(cache[3])
            with pytest.raises(InvalidArgument, match="this rank's blocks are"):
                await rank.get_tensor(TOKENS, out[0])
            with pytest.raises(DeadlineExceeded):
                await rank.get_tensor(TOKENS, out, deadline_s=1e-9)

    asyncio.run(put())
    with Client(address) as client:
        rank = TensorCache(client, SPEC, namespace, layers_per_value=2)
        assert rank.get_tensor(TOKENS, out, extras={0: b"lora"}) == BLOCKS
        assert out.equal(cache)
    asyncio.run(get())


def test_tasks_share_a_cache(address: str) -> None:
    async def both_ways(rank: AsyncTensorCache, number: int) -> None:
        own, tokens = cache_of(number), [number] * len(TOKENS)
        out = torch.zeros_like(own)
        assert await rank.put_tensor(tokens, own) == BLOCKS * 4
        assert await rank.get_tensor(tokens, out) == BLOCKS
        assert out.equal(own)

    async def all_of_them() -> None:
        async with AsyncClient(address) as client:
            rank = AsyncTensorCache(client, SPEC, namespace_of("tasks"))
            await asyncio.gather(*(both_ways(rank, number) for number in range(8)))

    asyncio.run(all_of_them())


def test_nothing_touches_the_tensor_of_a_call_that_was_cancelled(address: str) -> None:
    async def cancelled() -> None:
        async with AsyncClient(address) as client:
            rank = AsyncTensorCache(client, SPEC, namespace_of("cancelled"))
            cache = cache_of(1)
            assert await rank.put_tensor(TOKENS, cache) == BLOCKS * 4
            for steps in range(40):
                out = torch.zeros_like(cache)
                task = asyncio.ensure_future(rank.get_tensor(TOKENS, out))
                for _ in range(steps):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                before = out.clone()
                assert await rank.get_tensor(TOKENS, torch.zeros_like(cache)) == BLOCKS, "its memory is the next call's"
                assert out.equal(before)

    asyncio.run(cancelled())
