"""The device that is measured, cuda:0 or the CPU, and how long its work takes."""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import torch

from kvstore.cli.tools.bench import BenchRow

HAS_CUDA: Final = torch.cuda.is_available()
DEVICE: Final = torch.device("cuda:0" if HAS_CUDA else "cpu")
BLOCK_BYTES: Final = 2 << 20
BLOCKS: Final = 64 if HAS_CUDA else 4
"""Blocks of a batch."""
ROUNDS: Final = 10 if HAS_CUDA else 3


def needs_cuda(name: str) -> BenchRow:
    """Row of a figure that this machine cannot have."""
    return BenchRow(f"{name}: needs CUDA", 0, "not run")


def synchronize() -> None:
    if HAS_CUDA:
        torch.cuda.synchronize(DEVICE)


def seconds(call: Callable[[], Any], *, rounds: int = ROUNDS) -> float:
    """Return the median time of a call until the device has done its work, after one call that is not timed."""
    call()
    synchronize()
    taken_s = []
    for _ in range(rounds):
        begun_s = time.perf_counter()
        call()
        synchronize()
        taken_s.append(time.perf_counter() - begun_s)
    return statistics.median(taken_s)


def gb_s(size_bytes: int, call: Callable[[], Any], *, rounds: int = ROUNDS) -> float:
    """Return how many gigabytes a second `call`, which moves `size_bytes`, moves."""
    return size_bytes / seconds(call, rounds=rounds) / 1e9


def against(name: str, value: float, limit: float, aim: float | None = None) -> list[BenchRow]:
    """Rows of a throughput in GB/s, and of its share of a limit. On the CPU device no aim is judged."""
    share = value / limit
    if aim is None:
        return [BenchRow(name, value, "GB/s"), BenchRow(f"{name} / limit", share, "ratio")]
    return [BenchRow(name, value, "GB/s"), BenchRow(f"{name} / limit", share, "ratio", f">= {aim:g}", share >= aim if HAS_CUDA else None)]


def pinned(size_bytes: int) -> Any:
    """Page-locked host memory, uint8; plain memory without CUDA."""
    memory = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=HAS_CUDA)
    return memory.fill_(1)


def on_device(size_bytes: int) -> Any:
    return torch.ones(size_bytes, dtype=torch.uint8, device=DEVICE)


def release() -> None:
    """Give freed device memory back to the driver."""
    gc.collect()
    if HAS_CUDA:
        torch.cuda.empty_cache()
