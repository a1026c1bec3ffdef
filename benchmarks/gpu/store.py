"""Puts and gets of 2 MiB blocks that lie in a pool on the device, through a node of this host."""

import os
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Final

import torch

from benchmarks.gpu.device import BLOCK_BYTES, BLOCKS, DEVICE, HAS_CUDA, ROUNDS, against, gb_s, on_device, pinned
from benchmarks.gpu.paged import SPEC, TABLE, layers
from kvstore.cli.replay import show_warning
from kvstore.cli.tools.bench import BenchRow
from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from kvstore.client import Client
from kvstore.client.tensors.cache import TensorCache
from kvstore.client.tensors.parts import ValueShape
from kvstore.kvcache.namespace import Namespace

SINGLES: Final = 32 if HAS_CUDA else 4
DRAM: Final = "2GiB" if HAS_CUDA else "256MiB"
AIM: Final = 0.8


def rows() -> Iterator[BenchRow]:
    with LocalCluster(ClusterPlan(is_private=True, dram=DRAM), on_log=show_warning) as cluster:
        cluster.wait_warm()
        with Client(cluster.address) as client:
            yield from block_rows(client)
            yield from tensor_rows(client)


def block_rows(client: Client) -> Iterator[BenchRow]:
    size_bytes = BLOCKS * BLOCK_BYTES
    pool, back = on_device(size_bytes).view(BLOCKS, -1), on_device(size_bytes).view(BLOCKS, -1)
    pool.copy_(torch.randint(0, 255, pool.shape, dtype=torch.uint8, device=DEVICE))
    host = pinned(size_bytes).view(BLOCKS, -1)
    out_limit = gb_s(size_bytes, lambda: host.copy_(pool, non_blocking=True))
    in_limit = gb_s(size_bytes, lambda: back.copy_(host, non_blocking=True))
    batch, block = f"{BLOCKS} x 2 MiB", "2 MiB"
    yield BenchRow(f"{batch}: the limit, device to host", out_limit, "GB/s")
    yield BenchRow(f"{batch}: the limit, host to device", in_limit, "GB/s")
    put = fresh(lambda keys: client.put_batch(keys, host))
    yield BenchRow(f"put_batch {batch} of pinned host memory, no device", gb_s(size_bytes, put(BLOCKS)), "GB/s")
    client.remove_matching(pattern="*")  # the next one finds the memory of the node as this one did
    put = fresh(lambda keys: client.put_batch(keys, pool))
    yield from against(f"put_batch {batch} from the device", gb_s(size_bytes, put(BLOCKS)), out_limit, AIM)
    client.remove_matching(pattern="*")
    put = fresh(lambda keys: client.put(keys[0], pool[0]))
    yield from against(f"put {block} from the device", gb_s(BLOCK_BYTES, put(1), rounds=SINGLES), out_limit, AIM)
    keys = [os.urandom(16) for _ in range(BLOCKS)]
    client.put_batch(keys, pool)
    yield from against(
        f"get_batch_into {batch} to the device", gb_s(size_bytes, lambda: client.get_batch_into(keys, list(back))), in_limit, AIM
    )
    if not torch.equal(pool, back):
        yield BenchRow("blocks came back from the store with other bytes", 0, "failed", "equal", False)
    turn = count()
    one = gb_s(BLOCK_BYTES, lambda: client.get_into(keys[next(turn) % BLOCKS], back[0]), rounds=SINGLES)
    yield from against(f"get_into {block} to the device", one, in_limit, AIM)
    client.remove_matching(pattern="*")


def tensor_rows(client: Client) -> Iterator[BenchRow]:
    """TensorCache, of scattered blocks of 32 layers."""
    size_bytes = BLOCKS * SPEC.block_bytes
    host, there = pinned(size_bytes), on_device(size_bytes)
    out_limit = gb_s(size_bytes, lambda: host.copy_(there, non_blocking=True))
    in_limit = gb_s(size_bytes, lambda: there.copy_(host, non_blocking=True))
    source, tensors = layers()
    target, got = layers()
    cache = TensorCache(client, SPEC, Namespace(model="gpu", dtype=SPEC.dtype, block_tokens=SPEC.block_tokens), values=ValueShape(heads=8))
    turns = [[turn] * (BLOCKS * SPEC.block_tokens) for turn in range(ROUNDS + 1)]
    left = iter(turns)
    put = gb_s(size_bytes, lambda: cache.put_tensor(next(left), source, blocks=TABLE))
    yield from against(f"TensorCache.put_tensor, {BLOCKS} blocks of {SPEC.layers} layers", put, out_limit, AIM)
    get = gb_s(size_bytes, lambda: cache.get_tensor(turns[-1], target, blocks=TABLE))
    yield from against(f"TensorCache.get_tensor, {BLOCKS} blocks of {SPEC.layers} layers", get, in_limit, AIM)
    if not same_blocks(tensors, got):
        yield BenchRow("a tensor came back from the store with other elements", 0, "failed", "equal", False)
    client.remove_matching(pattern="*")


def same_blocks(source: list[Any], target: list[Any]) -> bool:
    """Whether the blocks of TABLE are equal in each layer's `[2, blocks, ...]`."""
    return all(
        torch.equal(
            one.view(2, -1, SPEC.block_bytes // SPEC.layers // 2)[:, TABLE],
            other.view(2, -1, SPEC.block_bytes // SPEC.layers // 2)[:, TABLE],
        )
        for one, other in zip(source, target, strict=True)
    )


def fresh(call: Callable[[list[bytes]], Any]) -> Callable[[int], Callable[[], Any]]:
    """Calls with new keys each time."""
    return lambda number: lambda: call([os.urandom(16) for _ in range(number)])
