"""Copies between host and device: bare pinned memory, which is the limit of all other figures, pageable memory, and a slab
of the DRAM tier that is page-locked.
"""

from collections.abc import Iterator
from typing import Any, Final

from benchmarks.gpu.device import HAS_CUDA, against, gb_s, needs_cuda, on_device, pinned
from benchmarks.gpu.slab import locked_slab
from kvstore.cli.tools.bench import BenchRow

SIZE_BYTES: Final = (256 if HAS_CUDA else 8) << 20


def rows() -> Iterator[BenchRow]:
    there, other = on_device(SIZE_BYTES), on_device(SIZE_BYTES)
    what = f"{SIZE_BYTES >> 20} MiB"
    limits = both_ways(pinned(SIZE_BYTES), there)
    for way, limit in limits.items():
        yield BenchRow(f"{way}, {what} of pinned memory: the limit", limit, "GB/s")
    import torch

    for way, speed in both_ways(torch.ones(SIZE_BYTES, dtype=torch.uint8), there).items():
        yield BenchRow(f"{way}, pageable", speed, "GB/s")
        yield BenchRow(f"{way}, pageable / limit", speed / limits[way], "ratio")
    yield BenchRow(f"device to device, {what} (bytes moved, not read + written)", gb_s(SIZE_BYTES, lambda: other.copy_(there)), "GB/s")
    if not HAS_CUDA:
        yield needs_cuda("device to host and back through a page-locked slab")
        return
    with locked_slab(SIZE_BYTES) as memory:
        for way, speed in both_ways(memory, there).items():
            yield from against(f"{way}, page-locked slab", speed, limits[way], 0.9)


def both_ways(host: Any, there: Any) -> dict[str, float]:
    """GB/s from the device to the host and back."""
    return {
        "device to host": gb_s(len(host), lambda: host.copy_(there, non_blocking=True)),
        "host to device": gb_s(len(host), lambda: there.copy_(host, non_blocking=True)),
    }
