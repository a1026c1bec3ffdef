"""The HBM tier: blocks in one arena of device memory, a torch tensor. It needs the `hbm` extra.

Any torch device will do (`cpu` in tests). How bytes get there and back is device_copy.py's.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvstore.protocol.errors import ConfigError, InvalidArgument, KVStoreError, TierFailed
from kvstore.protocol.settings import format_size
from kvstore.tiers.arena import ArenaRanges
from kvstore.tiers.device_copy import CudaCopier, PlainCopier, import_torch
from kvstore.tiers.slab_tier import SlabTier, chosen_first_bytes, chosen_slab_bytes
from kvstore.tiers.slabs import position_of
from kvstore.tiers.tier import Record, Slot


class HbmTier(SlabTier):
    """See the module and Tier. `arena` is the device memory (uint8, one dimension).

    A device that failed once takes no values until the process starts anew.
    """

    name = "hbm"

    def __init__(self, capacity_bytes: int, device: str = "cuda:0", *, slab_bytes: int | None = None, exact_classes: int = 16) -> None:
        """Raises ConfigError: torch is missing, there is no such device, or it has not so much memory."""
        torch = import_torch()
        first_bytes = chosen_first_bytes(slab_bytes, capacity_bytes)
        slab_bytes = chosen_slab_bytes(slab_bytes, capacity_bytes)
        try:
            self.arena: Any = torch.empty(capacity_bytes, dtype=torch.uint8, device=device)
        except (RuntimeError, AssertionError) as refusal:
            # torch raises an AssertionError where it was built without CUDA; its messages go on with advice for developers.
            reason = str(refusal).splitlines()[0]
            raise ConfigError(f"no HBM tier of {format_size(capacity_bytes)} on {device!r}: {reason}") from refusal
        self._copier: PlainCopier | CudaCopier = CudaCopier(self.arena) if self.arena.is_cuda else PlainCopier(self.arena)
        self._failure = ""
        self._ranges = ArenaRanges(capacity_bytes)
        super().__init__(capacity_bytes, slab_bytes=slab_bytes, first_bytes=first_bytes, backing=self._ranges, exact_classes=exact_classes)

    @property
    def health(self) -> str:
        return self._failure or "ok"

    def allocate(self, size_bytes: int, *, tenant: str = "") -> Slot:
        if self._failure:
            raise TierFailed(self._failure)
        return super().allocate(size_bytes, tenant=tenant)

    def locate(self, slot: Slot) -> int:
        """Offset of the slot's first byte in the arena. Raises StaleHandle."""
        slab = self._slabs.find(slot)
        return self._ranges.begin(slab.number) + position_of(slot) * slab.group.slot_bytes

    def write_batch(self, records: Sequence[Record]) -> None:
        """See Tier. The bytes are on the device when this returns."""
        pieces = [(self.locate(record.slot), record.data) for record in records]
        for record in records:
            if memoryview(record.data).nbytes != record.slot.size_bytes:
                raise InvalidArgument(f"{memoryview(record.data).nbytes} bytes of data for a slot of {record.slot.size_bytes}")
        with self._translating():
            self._copier.write(pieces)

    def read_batch_into(self, slots: Sequence[Slot], destinations: Sequence[memoryview]) -> list[Exception | None]:
        answers: list[Exception | None] = []
        pieces: list[tuple[int, memoryview]] = []
        for slot, destination in zip(slots, destinations, strict=True):
            try:
                pieces.append((self.locate(slot), destination))
                answers.append(None)
            except KVStoreError as stale:
                answers.append(stale)
        try:
            with self._translating():
                self._copier.read(pieces)
        except TierFailed as failed:
            return [answer or failed for answer in answers]
        return answers

    def check_integrity(self) -> None:
        super().check_integrity()
        self._ranges.check_integrity()

    def close(self) -> None:
        self.arena = self._copier = None  # type: ignore[assignment]

    @contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._failure = f"the device failed: {str(error).splitlines()[0]}"
            raise TierFailed(self._failure) from error
