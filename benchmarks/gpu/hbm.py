"""The HBM tier: writes and reads, hits on their way into an engine's pool, its arena mapped by another process (CUDA IPC), and
what it adds to a node's start.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.gpu.device import BLOCK_BYTES, BLOCKS, DEVICE, HAS_CUDA, against, gb_s, needs_cuda, on_device, pinned, synchronize
from benchmarks.gpu.slab import slab
from kvstore.cli.replay import show_warning
from kvstore.cli.tools.bench import BenchRow
from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from kvstore.tiers.hbm import HbmTier
from kvstore.tiers.tier import Record

SIZE_BYTES: Final = BLOCKS * BLOCK_BYTES
NODE_BYTES: Final = (1 << 30) if HAS_CUDA else (16 << 20)
IPC_DEADLINE_S: Final = 30.0


def rows() -> Iterator[BenchRow]:
    host, pool = pinned(SIZE_BYTES), on_device(SIZE_BYTES)
    out_limit = gb_s(SIZE_BYTES, lambda: host.copy_(pool, non_blocking=True))
    in_limit = gb_s(SIZE_BYTES, lambda: pool.copy_(host, non_blocking=True))
    tier = HbmTier(2 * SIZE_BYTES, str(DEVICE))
    try:
        yield from tier_rows(tier, pool, in_limit, out_limit)
        yield from mapped_rows(tier)
    finally:
        tier.close()
    yield from start_rows()


def tier_rows(tier: HbmTier, pool: Any, in_limit: float, out_limit: float) -> Iterator[BenchRow]:
    what = f"{BLOCKS} x 2 MiB"
    with slab(SIZE_BYTES) as memory:
        memory.copy_(torch.arange(SIZE_BYTES // 8, dtype=torch.int64).view(torch.uint8))
        parts = [part.numpy().data for part in memory.split(BLOCK_BYTES)]
        slots = [tier.allocate(BLOCK_BYTES) for _ in parts]
        records = [Record(slot, part) for slot, part in zip(slots, parts, strict=True)]
        yield from against(f"HbmTier.write_batch {what} from a slab", gb_s(SIZE_BYTES, lambda: tier.write_batch(records)), in_limit, 0.8)
        back = np.ones(SIZE_BYTES, np.uint8)
        targets = [back.data[at : at + BLOCK_BYTES] for at in range(0, SIZE_BYTES, BLOCK_BYTES)]
        yield from against(
            f"HbmTier.read_batch_into {what}", gb_s(SIZE_BYTES, lambda: tier.read_batch_into(slots, targets)), out_limit, 0.8
        )
        if not np.array_equal(back, memory.numpy()):
            yield BenchRow("the HBM tier gave other bytes than it was given", 0, "failed", "equal", False)
    spare = torch.empty_like(pool)
    limit = gb_s(SIZE_BYTES, lambda: spare.copy_(pool))
    yield BenchRow(f"device to device, {what} in one copy: the limit of hits", limit, "GB/s")
    staged = pinned(SIZE_BYTES)
    through = [memoryview(part.numpy()) for part in staged.split(BLOCK_BYTES)]

    def through_host() -> None:
        tier.read_batch_into(slots, through)
        pool.copy_(staged, non_blocking=True)

    yield from against(f"HBM hit into an engine's pool, {what}, through the host as now", gb_s(SIZE_BYTES, through_host), limit, 0.5)
    places = [tier.locate(slot) for slot in slots]
    targets_there = pool.split(BLOCK_BYTES)

    def direct() -> None:
        for place, target in zip(places, targets_there, strict=True):
            target.copy_(tier.arena[place : place + BLOCK_BYTES])

    yield from against(f"blocks of the arena into a pool, {what}, a copy each in one process", gb_s(SIZE_BYTES, direct), limit)


def mapped_rows(tier: HbmTier) -> Iterator[BenchRow]:
    """Another process maps the arena and copies all of it into memory of its own."""
    if not HAS_CUDA:
        yield needs_cuda("the arena mapped by another process (CUDA IPC)")
        return
    synchronize()
    handle = tier.arena.untyped_storage()._share_cuda_()
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.ipc_child"],
        input=repr(handle),
        capture_output=True,
        text=True,
        timeout=IPC_DEADLINE_S,
        check=False,
    )
    if child.returncode:
        yield BenchRow(f"CUDA IPC: {(child.stderr.strip().splitlines() or ['no output'])[-1][:200]}", 0, "not run")
        return
    opened_s, speed = map(float, child.stdout.split())
    yield BenchRow("the arena mapped by another process (CUDA IPC): to map it", opened_s * 1000, "ms")
    yield BenchRow("the arena mapped by another process: copied to its memory", speed, "GB/s")


def start_rows() -> Iterator[BenchRow]:
    """A node until it can serve, with and without the tier, and its memory on the host."""
    for name, hbm in (("without an HBM tier", ""), (f"with an HBM tier of {NODE_BYTES >> 20} MiB", f"{DEVICE}:{NODE_BYTES}")):
        begun_s = time.perf_counter()
        with LocalCluster(ClusterPlan(is_private=True, dram="64MiB", hbm=hbm), on_log=show_warning) as cluster:
            cluster.wait_ready()
            yield BenchRow(f"master and node {name}: start", time.perf_counter() - begun_s, "s")
            for kind in ("RssAnon", "VmRSS"):
                yield BenchRow(f"node {name}: {kind}", memory_mib(cluster.nodes[0].pid, kind), "MiB")


def memory_mib(pid: int, kind: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = [int(line.split()[1]) for line in lines if line.startswith(f"{kind}:")]
    return found[0] / 1024 if found else 0.0
