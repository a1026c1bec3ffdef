"""Tiers with injected device failures."""

from collections.abc import Sequence

from kvstore.protocol.errors import TierFailed
from kvstore.tiers.hbm import HbmTier
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.tier import Record, Slot


class FailingNvme(NvmeTier):
    """Raises what is set in `write_failure`, `read_failure` and `flush_failure`, as often as it is asked."""

    write_failure: Exception | None = None
    read_failure: Exception | None = None
    flush_failure: Exception | None = None

    def write_batch(self, records: Sequence[Record]) -> None:
        if self.write_failure is not None:
            raise self.write_failure
        super().write_batch(records)

    def read_batch_into(self, slots: Sequence[Slot], destinations: Sequence[memoryview]) -> list[Exception | None]:
        if self.read_failure is not None:
            raise self.read_failure
        return super().read_batch_into(slots, destinations)

    def flush(self) -> None:
        if self.flush_failure is not None:
            raise self.flush_failure
        super().flush()


class FailingHbm(HbmTier):
    """Cannot read the slots in `unreadable`."""

    unreadable: frozenset[Slot] = frozenset()

    def read_batch_into(self, slots: Sequence[Slot], destinations: Sequence[memoryview]) -> list[Exception | None]:
        answers = super().read_batch_into(slots, destinations)
        return [TierFailed("ECC") if slot in self.unreadable else answer for slot, answer in zip(slots, answers, strict=True)]
