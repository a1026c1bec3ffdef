"""Promises of disk.py: the conformance suite of tiers, and what it models of a crash."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.testing.tier_conformance import DurableTierConformance
from kvstore.tiers.tier import Record, Slot, Tier
from tests.simulation.disk import Disk, DiskTier

DISKS: dict[Path, Disk] = {}


class TestDiskTier(DurableTierConformance):
    @pytest.fixture(autouse=True)
    def _disks(self) -> Iterator[None]:
        yield
        DISKS.clear()

    def open_tier(self, folder: Path, capacity_bytes: int) -> Tier:
        return DiskTier(DISKS.setdefault(folder, Disk()), capacity_bytes=capacity_bytes)

    def raw_get(self, tier: Tier, slot: Slot) -> bytes:
        assert isinstance(tier, DiskTier)
        return tier._disk.values[slot.index][0]

    def raw_set(self, tier: Tier, slot: Slot, data: bytes) -> None:
        assert isinstance(tier, DiskTier)
        _, checksum, tag = tier._disk.values[slot.index]
        tier._disk.values[slot.index] = data, checksum, tag


def test_what_was_freed_and_not_flushed_is_there_after_a_crash() -> None:
    disk = Disk()
    tier = DiskTier(disk, capacity_bytes=100)
    slots = [tier.allocate(10) for _ in range(2)]
    tier.write_batch([Record(slot, b"0123456789") for slot in slots])
    tier.free(slots[0])
    assert [found.slot.index for found in DiskTier(disk, capacity_bytes=100).recover()] == [1, 0]
    tier.flush()
    assert [found.slot.index for found in DiskTier(disk, capacity_bytes=100).recover()] == [1]
