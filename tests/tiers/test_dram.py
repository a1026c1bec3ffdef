"""The DRAM tier: a tier like any other, whose slabs other processes can map."""

import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvstore.protocol.errors import InvalidArgument, StaleHandle, Unauthorized
from kvstore.testing.tier_conformance import VolatileTierConformance, get, put, record, value
from kvstore.testing.tier_machine import MACHINE_SETTINGS, TierMachine
from kvstore.tiers import memfd
from kvstore.tiers.dram import DramTier
from kvstore.tiers.huge_pages import HUGE_PAGE_BYTES
from kvstore.tiers.tier import Slot, Tier, TierFull

PAGE = mmap.PAGESIZE


class OpenDram:
    def open_tier(self, folder: Path, capacity_bytes: int) -> Tier:
        return DramTier(capacity_bytes)


class TestDram(OpenDram, VolatileTierConformance):
    def raw_get(self, tier: Tier, slot: Slot) -> bytes:
        assert isinstance(tier, DramTier)
        return read_as_client(tier, slot)

    def raw_set(self, tier: Tier, slot: Slot, data: bytes) -> None:
        assert isinstance(tier, DramTier)
        slab_id, offset_bytes = tier.locate(slot)
        descriptor = tier.slab_fd(slab_id, writable=True, tenant="")
        os.pwrite(descriptor, data, offset_bytes)
        os.close(descriptor)


class DramAgainstDict(OpenDram, TierMachine):
    pass


TestDramAgainstDict = DramAgainstDict.TestCase
TestDramAgainstDict.settings = MACHINE_SETTINGS


@pytest.fixture
def tier() -> Iterator[DramTier]:
    tier = DramTier(8 * PAGE, slab_bytes=2 * PAGE)
    yield tier
    tier.check_integrity()
    tier.close()


@pytest.mark.promise("space-accounted")
def test_free_bytes_are_those_neither_used_nor_quarantined(tier: DramTier) -> None:
    slot = tier.allocate(PAGE)
    tier.quarantine(tier.allocate(PAGE))
    assert (tier.used_bytes, tier.quarantined_bytes, tier.free_bytes) == (PAGE, PAGE, 6 * PAGE)
    tier.free(slot)
    assert tier.free_bytes == 7 * PAGE


def test_a_client_reads_where_the_tier_says_the_slot_is(tier: DramTier) -> None:
    slots = put(tier, [value(1, PAGE), value(2, PAGE), value(3, 100)])
    assert [read_as_client(tier, slot) for slot in slots] == [value(1, PAGE), value(2, PAGE), value(3, 100)]


def test_a_client_writes_into_a_slab_of_its_own_tenant(tier: DramTier) -> None:
    slot = tier.allocate(100, tenant="red")
    slab_id, offset_bytes = tier.locate(slot)
    descriptor = tier.slab_fd(slab_id, writable=True, tenant="red")
    mapped = mmap.mmap(descriptor, tier.slab_bytes(slab_id) // PAGE * PAGE, mmap.MAP_SHARED, mmap.PROT_WRITE)
    mapped[offset_bytes : offset_bytes + 100] = value(7, 100)
    mapped.close()
    os.close(descriptor)
    assert get(tier, [slot]) == [value(7, 100)]


@pytest.mark.promise("tenant-isolation")
@pytest.mark.parametrize("writable", [False, True])
def test_no_tenant_gets_a_descriptor_of_anothers_slab(tier: DramTier, writable: bool) -> None:
    slab_id, _ = tier.locate(tier.allocate(100, tenant="red"))
    with pytest.raises(Unauthorized):
        tier.slab_fd(slab_id, writable=writable, tenant="blue")


@pytest.mark.promise("tenant-isolation")
def test_slab_memory_is_read_only_and_of_one_tenant(tier: DramTier) -> None:
    slot = tier.allocate(100, tenant="red")
    tier.view(slot)[:] = b"v" * 100
    slab_id, offset_bytes = tier.locate(slot)
    memory = tier.slab_memory(slab_id, tenant="red")
    assert memory[offset_bytes : offset_bytes + 100] == b"v" * 100
    assert memory.readonly
    assert len(memory) == tier.slab_bytes(slab_id)
    with pytest.raises(PermissionError):
        os.ftruncate(tier._pool.memory(slab_id).fd, 0)
    with pytest.raises(Unauthorized):
        tier.slab_memory(slab_id, tenant="blue")
    with pytest.raises(StaleHandle):
        tier.slab_memory(slab_id + 1000, tenant="red")


def test_a_slab_is_there_until_its_memory_goes_to_another_tenant(tier: DramTier) -> None:
    slots = put(tier, [value(number, PAGE) for number in range(8)])
    slab_id, _ = tier.locate(slots[0])
    assert tier.has_slab(slab_id)
    before = tier.slabs_released
    tier.free_batch(slot for slot in slots if tier.locate(slot)[0] == slab_id)
    tier.allocate(PAGE, tenant="blue")
    assert not tier.has_slab(slab_id)
    assert tier.slabs_released > before


def test_a_slab_that_changes_tenant_is_new_memory_under_a_new_id(tier: DramTier) -> None:
    slots = put(tier, [value(number, PAGE) for number in range(8)])
    slab_id, _ = tier.locate(slots[0])
    old = tier.slab_fd(slab_id, writable=True, tenant="")
    tier.free_batch(slot for slot in slots if tier.locate(slot)[0] == slab_id)
    newcomer = tier.allocate(PAGE, tenant="blue")
    os.pwrite(old, b"late write", 0)
    os.close(old)
    assert tier.locate(newcomer)[0] != slab_id
    assert bytes(tier.view(newcomer)) == bytes(PAGE)
    with pytest.raises(StaleHandle):
        tier.slab_fd(slab_id, writable=False, tenant="")
    with pytest.raises(StaleHandle):
        tier.slab_bytes(slab_id)


def test_a_slot_is_filled_with_its_value_and_no_other(tier: DramTier) -> None:
    before, slot, behind = put(tier, [value(1, 100), value(2, 100), value(3, 100)])
    tier.fill(slot, memoryview(value(9, 100)))
    assert [read_as_client(tier, one) for one in (before, slot, behind)] == [value(1, 100), value(9, 100), value(3, 100)]
    with pytest.raises(ValueError, match="different structures"):
        tier.fill(slot, memoryview(value(9, 99)))
    tier.free(slot)
    with pytest.raises(StaleHandle):
        tier.fill(slot, memoryview(value(9, 100)))


def test_writing_checks_every_record_before_it_copies_one(tier: DramTier) -> None:
    first, second = put(tier, [value(1, 10), value(2, 10)])
    with pytest.raises(InvalidArgument, match="11 bytes of data for a slot of 10"):
        tier.write_batch([record(first, value(3, 10)), record(second, bytes(11))])
    assert get(tier, [first]) == [value(1, 10)]


def test_prefaulting_goes_on_until_the_whole_capacity_is_present(tier: DramTier) -> None:
    assert tier.prefaulted_bytes == 0
    assert tier.prefault_step(3 * PAGE)
    assert tier.prefaulted_bytes == 3 * PAGE
    assert not tier.prefault_step(1 << 30)
    assert tier.prefaulted_bytes == tier.capacity_bytes


def test_prefaulting_changes_no_byte_written_meanwhile() -> None:
    tier = DramTier(4 << 20, slab_bytes=1 << 20)
    slots = [tier.allocate(1 << 16) for _ in range(64)]
    worker = threading.Thread(target=tier.prefault_step, args=(tier.capacity_bytes,))
    worker.start()
    tier.write_batch([record(slot, value(number, 1 << 16)) for number, slot in enumerate(slots)])
    worker.join()
    assert get(tier, slots) == [value(number, 1 << 16) for number in range(64)]
    tier.close()


def test_memory_stays_in_reserved_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory created in other pages would add to the reserved pages, beyond a container's limit."""
    monkeypatch.setattr(memfd, "MFD_HUGETLB", 0)  # ordinary pages stand in for them
    tier = DramTier(96 << 20, hugepages=True)
    assert tier._pool._limit_bytes == 96 << 20
    for tenant, size_bytes in (("a", 4 << 20), ("a", 3 << 20), ("b", 4 << 20), ("b", 100), ("c", 1 << 19), ("c", 5 << 20)):
        slots = list[Slot]()
        with suppress(TierFull):
            while len(slots) < 1000:
                slots.append(tier.allocate(size_bytes, tenant=tenant))
        assert sum(slot.size_bytes for slot in slots) > 60 << 20 or size_bytes == 100
        held = [*tier._pool._spares, *tier._pool._of_slab.values()]
        assert {memory.page_bytes for memory in held} == {HUGE_PAGE_BYTES}
        tier._pool.check_integrity()
        tier.free_batch(slots)
    tier.close()


def read_as_client(tier: DramTier, slot: Slot, tenant: str = "") -> bytes:
    slab_id, offset_bytes = tier.locate(slot)
    descriptor = tier.slab_fd(slab_id, writable=False, tenant=tenant)
    data = os.pread(descriptor, slot.size_bytes, offset_bytes)
    os.close(descriptor)
    return data
