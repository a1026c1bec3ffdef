"""HBM tier: blocks in one arena of GPU memory, a torch tensor. Requires the `hbm` extra.

Slabs are ranges of the arena. Copies to and from CUDA memory go through pinned staging buffers on a stream of their
own: they overlap the engine's kernels and reach the bus's full rate, which pageable memory does not. Other torch
devices (`cpu` in tests) copy directly. torch is imported on first use.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.protocol.errors import ConfigError, KVStoreError, TierFailed
from kvstore.protocol.extras import install_line
from kvstore.protocol.settings import format_size
from kvstore.tiers.slab import chosen_first_bytes, chosen_slab_bytes
from kvstore.tiers.slabs import SlabTier, position_of
from kvstore.tiers.tier import Buffer, Record, Slot

Bytes = npt.NDArray[np.uint8]

STAGING_BYTES = 8 << 20
"""Size of each of the two pinned buffers: one is filled while the other is on the bus."""


class ArenaRanges:
    """Allocator of slab ranges [begin, end) in an arena of `capacity_bytes`. A SlabAllocator.

    First fit by address; neighbours are coalesced on release. Slabs of one size pack without gaps; mixed sizes may
    leave gaps shorter than a slab. Acquire and release are O(ranges), once per slab.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._free: list[tuple[int, int]] = [(0, capacity_bytes)]
        self._taken: dict[int, tuple[int, int]] = {}

    def begin(self, slab: int) -> int:
        """Return the offset of the slab's first byte in the arena."""
        return self._taken[slab][0]

    def acquire(self, slab: int, slot_bytes: int, count: int, tenant: str) -> int:
        """Take the first range that is long enough, else the longest. See SlabAllocator."""
        wanted_bytes = count * slot_bytes
        long_enough = (index for index in self._free if index[1] - index[0] >= wanted_bytes)
        longest = max(self._free, key=lambda index: index[1] - index[0], default=(0, 0))
        begin, end = next(long_enough, longest)
        count = min(count, (end - begin) // slot_bytes)
        if count:
            self._free.remove((begin, end))
            taken_end = begin + count * slot_bytes
            self._taken[slab] = (begin, taken_end)
            if taken_end < end:
                self._insert(taken_end, end)
        return count

    def has_warm(self, slot_bytes: int, count: int, tenant: str) -> bool:
        """Device memory needs no prefaulting."""
        return True

    def release(self, slab: int) -> None:
        self._insert(*self._taken.pop(slab))

    def check_integrity(self) -> None:
        """Assert that free and taken ranges cover the arena once and free ones are coalesced. For tests."""
        cover = sorted([*self._free, *self._taken.values()])
        assert [end for _, end in cover] == [begin for begin, _ in cover[1:]] + [self._capacity_bytes]
        assert cover[0][0] == 0
        assert self._free == sorted(self._free)
        assert all(left[1] < right[0] for left, right in zip(self._free, self._free[1:], strict=False)), "neighbours are not joined"

    def _insert(self, begin: int, end: int) -> None:
        index = bisect_left(self._free, (begin, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == begin:
            index -= 1
            begin = self._free.pop(index)[0]
        self._free.insert(index, (begin, end))


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
    """Copies on a side stream through two pinned buffers. Concurrent callers are serialised by a lock."""

    def __init__(self, arena: Any) -> None:
        torch = import_torch()
        self._arena = arena
        self._lock = threading.Lock()
        self._stream = torch.cuda.Stream(arena.device)
        self._staging = [torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._done = [torch.cuda.Event() for _ in range(2)]

    def write(self, pieces: Sequence[tuple[int, Buffer]]) -> None:
        with self._lock, import_torch().cuda.stream(self._stream):
            for chunk_number, batch in enumerate(batches_of((offset, np.frombuffer(data, np.uint8)) for offset, data in pieces)):
                staging, done = self._staging[chunk_number % 2], self._done[chunk_number % 2]
                done.synchronize()
                at = 0
                for offset, source in batch:
                    staged = staging[at : at + len(source)]
                    staged.numpy()[:] = source
                    self._arena[offset : offset + len(source)].copy_(staged, non_blocking=True)
                    at += len(source)
                done.record(self._stream)
            self._stream.synchronize()

    def read(self, pieces: Sequence[tuple[int, memoryview]]) -> None:
        with self._lock, import_torch().cuda.stream(self._stream):
            before: list[tuple[int, Bytes]] = []
            chunk_number = 0
            for chunk_number, batch in enumerate(
                batches_of((offset, np.frombuffer(target, np.uint8)) for offset, target in pieces), start=1
            ):
                at = 0
                for offset, target in batch:
                    source = self._arena[offset : offset + len(target)]
                    self._staging[chunk_number % 2][at : at + len(target)].copy_(source, non_blocking=True)
                    at += len(target)
                self._done[chunk_number % 2].record(self._stream)
                self._unstage(chunk_number - 1, before)
                before = batch
            self._unstage(chunk_number, before)

    def _unstage(self, chunk_number: int, batch: list[tuple[int, Bytes]]) -> None:
        self._done[chunk_number % 2].synchronize()
        staged = self._staging[chunk_number % 2].numpy()
        at = 0
        for _, target in batch:
            target[:] = staged[at : at + len(target)]
            at += len(target)


def batches_of(pieces: Iterable[tuple[int, Bytes]], limit_bytes: int = STAGING_BYTES) -> Iterator[list[tuple[int, Bytes]]]:
    """Group (offset, bytes) pieces, in order, into batches of at most `limit_bytes`; pieces that cross the limit are
    cut.
    """
    batch: list[tuple[int, Bytes]] = []
    left_bytes = limit_bytes
    for offset, data in pieces:
        at = 0
        while at < len(data):
            part = data[at : at + left_bytes]
            batch.append((offset + at, part))
            at += len(part)
            left_bytes -= len(part)
            if not left_bytes:
                yield batch
                batch, left_bytes = [], limit_bytes
    if batch:
        yield batch


def import_torch() -> Any:
    """Import torch. Raises ConfigError if it is not installed."""
    try:
        import torch
    except ImportError as missing:
        raise ConfigError(f"the HBM tier needs torch: {install_line('hbm')}") from missing
    return torch


class HbmTier(SlabTier):
    """Tier in GPU memory; `arena` is the device memory (uint8, one dimension). After a device error it accepts no
    values until a restart.
    """

    name = "hbm"

    def __init__(self, capacity_bytes: int, device: str = "cuda:0", *, slab_bytes: int | None = None) -> None:
        """Raises ConfigError: torch is missing, the device does not exist or has too little memory."""
        torch = import_torch()
        first_bytes = chosen_first_bytes(slab_bytes, capacity_bytes)
        slab_bytes = chosen_slab_bytes(slab_bytes, capacity_bytes)
        try:
            self.arena: Any = torch.empty(capacity_bytes, dtype=torch.uint8, device=device)
            self._copier: PlainCopier | CudaCopier = CudaCopier(self.arena) if self.arena.is_cuda else PlainCopier(self.arena)
        except (RuntimeError, AssertionError) as refusal:
            # torch raises an AssertionError if it was built without CUDA. The further lines of its messages are for developers.
            reason = str(refusal).splitlines()[0]
            raise ConfigError(f"cannot allocate an HBM tier of {format_size(capacity_bytes)} on {device!r}: {reason}") from refusal
        self._failure = ""
        self._ranges = ArenaRanges(capacity_bytes)
        super().__init__(capacity_bytes, slab_bytes=slab_bytes, first_bytes=first_bytes, backing=self._ranges)

    @property
    def health(self) -> str:
        return self._failure or "ok"

    def allocate(self, size_bytes: int, tenant: str = "") -> Slot:
        if self._failure:
            raise TierFailed(self._failure)
        return super().allocate(size_bytes, tenant=tenant)

    def locate(self, slot: Slot) -> int:
        """Return the offset of the slot's first byte in the arena. Raises StaleHandle."""
        slab = self.find(slot)
        return self._ranges.begin(slab.number) + position_of(slot) * slab.group.slot_bytes

    def write_batch(self, records: Sequence[Record]) -> None:
        """As Tier.write_batch. The bytes are on the device on return."""
        pieces = [(self.locate(record.slot), record.data) for record in records]
        self._check_sizes(records)
        with self._device_errors_translated():
            self._copier.write(pieces)

    def read_batch_into(self, slots: Sequence[Slot], destinations: Sequence[memoryview]) -> list[Exception | None]:
        errors: list[Exception | None] = []
        pieces: list[tuple[int, memoryview]] = []
        for slot, destination in zip(slots, destinations, strict=True):
            try:
                pieces.append((self.locate(slot), destination))
                errors.append(None)
            except KVStoreError as stale:
                errors.append(stale)
        try:
            with self._device_errors_translated():
                self._copier.read(pieces)
        except TierFailed as failed:
            return [error or failed for error in errors]
        return errors

    def check_integrity(self) -> None:
        super().check_integrity()
        self._ranges.check_integrity()

    def close(self) -> None:
        self.arena = self._copier = None  # type: ignore[assignment]

    @contextmanager
    def _device_errors_translated(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._failure = f"the device failed: {str(error).splitlines()[0]}"
            raise TierFailed(self._failure) from error
