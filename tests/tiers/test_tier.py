"""The Tier interface: what it does for a tier that overrides nothing, held by the plainest tier there can be."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.protocol.errors import InvalidArgument, StaleHandle
from kvstore.testing.tier_conformance import TierConformance
from kvstore.testing.tier_machine import MACHINE_SETTINGS, TierMachine
from kvstore.tiers.tier import Record, Slot, Tier, TierFull


class NaiveTier(Tier):
    """A dict from slot to bytes. It counts values' own sizes and never reuses a place."""

    name = "naive"

    def __init__(self, capacity_bytes: int) -> None:
        self.values: dict[Slot, bytes] = {}
        self.owners: dict[Slot, str] = {}
        self._capacity_bytes = capacity_bytes
        self._next = 0

    @property
    def capacity_bytes(self) -> int:
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        return sum(slot.size_bytes for slot in self.values)

    @property
    def quarantined_bytes(self) -> int:
        return 0

    @property
    def tenant_bytes(self) -> dict[str, int]:
        return {tenant: sum(slot.size_bytes for slot in self.owners if self.owners[slot] == tenant) for tenant in self.owners.values()}

    def allocate(self, size_bytes: int, *, tenant: str = "") -> Slot:
        if not 1 <= size_bytes <= min(self._capacity_bytes, 1 << 30):
            raise InvalidArgument(f"{size_bytes} bytes")
        if size_bytes > self.free_bytes:
            raise TierFull(f"{size_bytes} bytes")
        self._next += 1
        slot = Slot(self._next, 0, size_bytes)
        self.values[slot], self.owners[slot] = b"", tenant
        return slot

    def write_batch(self, records: Sequence[Record]) -> None:
        for record in records:
            if record.slot not in self.values:
                raise StaleHandle(f"{record.slot}")
            if len(record.data) != record.slot.size_bytes:
                raise InvalidArgument(f"{len(record.data)} bytes for {record.slot}")
            self.values[record.slot] = bytes(record.data)

    def read_batch_into(self, slots: Sequence[Slot], destinations: Sequence[memoryview]) -> list[Exception | None]:
        answers: list[Exception | None] = []
        for slot, destination in zip(slots, destinations, strict=True):
            if slot in self.values:
                destination[:] = self.values[slot]
            answers.append(None if slot in self.values else StaleHandle(f"{slot}"))
        return answers

    def free(self, slot: Slot) -> None:
        if self.values.pop(slot, None) is None:
            raise StaleHandle(f"{slot}")
        del self.owners[slot]

    def check_integrity(self) -> None:
        assert self.used_bytes <= self._capacity_bytes

    def close(self) -> None:
        pass


class OpenNaive:
    def open_tier(self, folder: Path, capacity_bytes: int) -> Tier:
        return NaiveTier(capacity_bytes)


class TestNaiveTier(OpenNaive, TierConformance):
    """The suite asks of a tier no more than its interface says."""

    def raw_get(self, tier: Tier, slot: Slot) -> bytes:
        assert isinstance(tier, NaiveTier)
        return tier.values[slot]


class NaiveAgainstDict(OpenNaive, TierMachine):
    pass


TestNaiveAgainstDict = NaiveAgainstDict.TestCase
TestNaiveAgainstDict.settings = MACHINE_SETTINGS


@pytest.fixture
def tier() -> NaiveTier:
    return NaiveTier(100)


def test_free_bytes_are_those_neither_used_nor_quarantined(tier: NaiveTier) -> None:
    tier.allocate(30)
    assert tier.free_bytes == 70
