"""`make bench-tensors`: an engine's layers to the store and back, against memcpy, with staging memory that is kept and without.

120 MiB in 30 blocks, a tensor a layer, to the node of this host. Rounds of all ways in turn, the best of each. Rows go to
benchmarks/out/tensors.json.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch

from benchmarks.harness import report
from benchmarks.kvcache import timed
from kvstore.cli.replay import show_warning
from kvstore.cli.tools.bench import BenchRow
from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from kvstore.client import Client
from kvstore.client.tensors.cache import TensorCache
from kvstore.client.tensors.config import TensorSettings
from kvstore.client.tensors.parts import ValueShape
from kvstore.client.tensors.pools import EnginePool
from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.kvcache.models.spec import CacheSpec
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.settings import Size

OUT: Final = Path(__file__).parent / "out" / "tensors.json"
SPEC: Final = CacheSpec(layers=8, kv_heads=8, head_dim=64, dtype="float32", block_tokens=128)
BLOCKS: Final = 30
POOL_BLOCKS: Final = 64
ROUNDS: Final = 12
WAYS: Final = {"fresh": TensorSettings(kept_bytes=Size(0)), "kept": TensorSettings()}


def main() -> int:
    with LocalCluster(ClusterPlan(is_private=True, dram="1GiB"), on_log=show_warning) as cluster:
        cluster.wait_warm()
        with Client(cluster.address) as client:
            return report((row for order in ("vllm-flash", "vllm-cpu") for row in order_rows(client, order)), OUT)


def order_rows(client: Client, order: str) -> Iterator[BenchRow]:
    source, target = engine_pool(order), engine_pool(order)
    table_of_blocks = torch.randperm(POOL_BLOCKS, generator=torch.Generator().manual_seed(0))[:BLOCKS].numpy()
    namespace = Namespace(model=order, dtype=SPEC.dtype, block_tokens=SPEC.block_tokens)
    caches = {way: TensorCache(client, SPEC, namespace, values=ValueShape(heads=8), settings=settings) for way, settings in WAYS.items()}
    plain, copy = (torch.ones(BLOCKS * SPEC.block_bytes, dtype=torch.uint8) for _ in range(2))
    taken_s: defaultdict[str, list[float]] = defaultdict(list)
    for turn in range(ROUNDS):
        taken_s["memcpy"].append(timed(lambda: copy.copy_(plain)))
        for number, cache in enumerate(caches.values()):
            tokens = [turn, number] * (BLOCKS * SPEC.block_tokens // 2)
            way = list(caches)[number]
            taken_s[f"put, {way}"].append(timed(lambda: cache.put_tensor(tokens, source, blocks=table_of_blocks)))  # noqa: B023 (called here)
            taken_s[f"get, {way}"].append(timed(lambda: cache.get_tensor(tokens, target, blocks=table_of_blocks)))  # noqa: B023
            client.remove_matching(pattern="*")  # the next one finds the memory of the node as this one did
    for what, of_turns in taken_s.items():
        best_s = min(of_turns)
        yield BenchRow(f"{order}: {what}", best_s * 1000, "ms")
        if what != "memcpy":
            yield BenchRow(f"{order}: {what} / memcpy", best_s / min(taken_s["memcpy"]), "ratio")


def engine_pool(order: str) -> EnginePool:
    layout = CacheLayout(spec=SPEC, pool_blocks=POOL_BLOCKS, order=order)
    sizes = [layout.region_bytes(0, number) for number in range(layout.region_count(0))]
    return EnginePool(layout, [torch.ones(size_bytes, dtype=torch.uint8) for size_bytes in sizes])


if __name__ == "__main__":
    sys.exit(main())
