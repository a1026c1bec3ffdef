"""Copies between host memory and a torch tensor of bytes on a device: plain ones, and faster ones for CUDA.

On CUDA they go through pinned staging memory on a stream of their own, so that they overlap the engine's kernels and reach the
bus's full rate, which pageable memory does not. torch is imported when first used: it is an extra.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.protocol.errors import ConfigError
from kvstore.protocol.extras import install_line
from kvstore.tiers.tier import Buffer

Bytes = npt.NDArray[np.uint8]

STAGING_BYTES = 8 << 20
"""Pinned memory for one run of a copy; there are two, so that one is filled while the other is on the bus."""


class PlainCopier:
    """Copies on devices without pinned memory, one value at a time."""

    def __init__(self, arena: Any) -> None:
        self._arena = arena

    def write(self, pieces: Sequence[tuple[int, Buffer]]) -> None:
        torch = import_torch()
        for offset, data in pieces:
            # torch does not wrap read-only memory, hence a copy.
            source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self._arena[offset : offset + len(source)].copy_(source)

    def read(self, pieces: Sequence[tuple[int, memoryview]]) -> None:
        torch = import_torch()
        for offset, destination in pieces:
            target = torch.frombuffer(destination, dtype=torch.uint8)
            target.copy_(self._arena[offset : offset + len(target)])


class CudaCopier:  # pragma: no cover - only with CUDA
    """Copies on a side stream through two pieces of pinned memory. One batch at a time: callers in several threads queue."""

    def __init__(self, arena: Any) -> None:
        torch = import_torch()
        self._arena = arena
        self._lock = threading.Lock()
        self._stream = torch.cuda.Stream(arena.device)
        self._staging = [torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._done = [torch.cuda.Event() for _ in range(2)]

    def write(self, pieces: Sequence[tuple[int, Buffer]]) -> None:
        with self._lock, import_torch().cuda.stream(self._stream):
            for turn, run in enumerate(runs((offset, np.frombuffer(data, np.uint8)) for offset, data in pieces)):
                staging, done = self._staging[turn % 2], self._done[turn % 2]
                done.synchronize()
                at = 0
                for offset, source in run:
                    staged = staging[at : at + len(source)]
                    staged.numpy()[:] = source
                    self._arena[offset : offset + len(source)].copy_(staged, non_blocking=True)
                    at += len(source)
                done.record(self._stream)
            self._stream.synchronize()

    def read(self, pieces: Sequence[tuple[int, memoryview]]) -> None:
        with self._lock, import_torch().cuda.stream(self._stream):
            before: list[tuple[int, Bytes]] = []
            turn = 0
            for turn, run in enumerate(runs((offset, np.frombuffer(target, np.uint8)) for offset, target in pieces), start=1):
                at = 0
                for offset, target in run:
                    source = self._arena[offset : offset + len(target)]
                    self._staging[turn % 2][at : at + len(target)].copy_(source, non_blocking=True)
                    at += len(target)
                self._done[turn % 2].record(self._stream)
                self._unstage(turn - 1, before)
                before = run
            self._unstage(turn, before)

    def _unstage(self, turn: int, run: list[tuple[int, Bytes]]) -> None:
        self._done[turn % 2].synchronize()
        staged = self._staging[turn % 2].numpy()
        at = 0
        for _, target in run:
            target[:] = staged[at : at + len(target)]
            at += len(target)


def runs(pieces: Iterable[tuple[int, Bytes]], limit_bytes: int = STAGING_BYTES) -> Iterator[list[tuple[int, Bytes]]]:
    """The pieces (offset, bytes), in order, in runs of at most `limit_bytes`; a piece that crosses the limit is cut."""
    run: list[tuple[int, Bytes]] = []
    room = limit_bytes
    for offset, data in pieces:
        at = 0
        while at < len(data):
            part = data[at : at + room]
            run.append((offset + at, part))
            at += len(part)
            room -= len(part)
            if not room:
                yield run
                run, room = [], limit_bytes
    if run:
        yield run


def import_torch() -> Any:
    """The torch module. Raises ConfigError where it is not installed."""
    try:
        import torch
    except ImportError as missing:
        raise ConfigError(f"the HBM tier needs torch: {install_line('hbm')}") from missing
    return torch
