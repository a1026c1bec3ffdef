"""Page-locking of host memory (cudaHostRegister): what a GiB costs, which a node or client would pay at its start."""

import time
from collections.abc import Iterator
from typing import Any, Final

import torch

from benchmarks.gpu.device import DEVICE, HAS_CUDA, needs_cuda
from benchmarks.gpu.slab import check, slab
from kvstore.cli.tools.bench import BenchRow

SIZE_BYTES: Final = 1 << 30


def rows() -> Iterator[BenchRow]:
    if not HAS_CUDA:
        yield needs_cuda("page-locking of a GiB")
        return
    torch.ones(1, device=DEVICE)
    torch.cuda.synchronize()
    yield from of("touched memory of the process", torch.ones(SIZE_BYTES, dtype=torch.uint8))
    yield from of("untouched memory of the process", torch.empty(SIZE_BYTES, dtype=torch.uint8))
    with slab(SIZE_BYTES) as memory:
        yield from of("a slab of the DRAM tier", memory)
        yield from of("a slab of the DRAM tier, in 16 parts", memory, parts=16)
    begun_s = time.perf_counter()
    torch.empty(SIZE_BYTES, dtype=torch.uint8, pin_memory=True)
    yield BenchRow("allocation of 1 GiB of pinned memory (cudaHostAlloc)", time.perf_counter() - begun_s, "s")


def of(name: str, memory: Any, parts: int = 1) -> Iterator[BenchRow]:
    """Lock, unlock and lock again, as a second client of the same slab would."""
    taken_s = []
    size_bytes = memory.nbytes // parts
    starts = [memory.data_ptr() + index * size_bytes for index in range(parts)]
    for _ in range(2):
        begun_s = time.perf_counter()
        for start in starts:
            check(torch.cuda.cudart().cudaHostRegister(start, size_bytes, 0), "cudaHostRegister")
        locked_s = time.perf_counter()
        for start in starts:
            check(torch.cuda.cudart().cudaHostUnregister(start), "cudaHostUnregister")
        taken_s.append((locked_s - begun_s, time.perf_counter() - locked_s))
    yield BenchRow(f"page-locking of 1 GiB, {name}", taken_s[0][0], "s")
    yield BenchRow(f"page-locking of 1 GiB, {name}, again", taken_s[1][0], "s")
    yield BenchRow(f"unlocking of 1 GiB, {name}", taken_s[0][1], "s")
