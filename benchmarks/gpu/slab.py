"""A slab of the DRAM tier as a client maps it, and its pages locked for the device."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvstore.tiers.dram import DramTier
from kvstore.transfer.memory.mapped_memory import map_slab


@contextmanager
def slab(size_bytes: int) -> Iterator[Any]:
    """Yield a slot of `size_bytes` of a tier, uint8, mapped from its memfd as a writing client does; touched."""
    tier = DramTier(size_bytes, slab_bytes=size_bytes)
    try:
        number, offset = tier.locate(tier.allocate(size_bytes))
        mapped = map_slab(tier.slab_fd(number, writable=True, tenant=""), tier.slab_bytes(number), writable=True)
        yield torch.frombuffer(mapped.memory, dtype=torch.uint8)[offset : offset + size_bytes].fill_(1)
    finally:
        tier.close()


@contextmanager
def locked(memory: Any) -> Iterator[None]:
    """Context in which the pages of a tensor's memory are locked for the device. Raises RuntimeError: CUDA refuses."""
    check(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0), "cudaHostRegister")
    try:
        yield
    finally:
        check(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()), "cudaHostUnregister")


@contextmanager
def locked_slab(size_bytes: int) -> Iterator[Any]:
    with slab(size_bytes) as memory, locked(memory):
        yield memory
        torch.cuda.synchronize()


def check(status: Any, what: str) -> None:
    if int(status):
        raise RuntimeError(f"{what} of {os.getpid()}: CUDA error {int(status)}")
