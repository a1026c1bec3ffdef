"""Conformance of tiers, as test classes to inherit. Needs the `dev` extra (pytest).

    class OpenMine:
        def open_tier(self, folder: Path, capacity_bytes: int) -> Tier:
            return MyTier(capacity_bytes, folder)

    class TestMine(OpenMine, TierConformance):           # DurableTierConformance for a durable tier
        def raw_get(self, tier: Tier, slot: Slot) -> bytes: ...
        def raw_set(self, tier: Tier, slot: Slot, data: bytes) -> None: ...

It uses only the interface of tier.py. tier_machine.py compares a tier with a dict under any order of operations.
"""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from kvstore.protocol.errors import ChecksumMismatch, InvalidArgument, StaleHandle
from kvstore.tiers.tier import Buffer, Record, Slot, Tier, TierFull

VALUE_BYTES = 4096
VALUE_COUNT = 8


class OpensTier:
    """Opens the tier under test."""

    def open_tier(self, folder: Path, capacity_bytes: int) -> Tier:
        """Return a tier of `capacity_bytes`. A durable one stores its values in `folder` and has them when opened there
        again.
        """
        raise NotImplementedError

    def slot_bytes(self, size_bytes: int) -> int:
        """Return the capacity that a value takes; override it for a tier that rounds sizes up."""
        return size_bytes


class TierConformance(OpensTier):
    """Conformance of any tier. The fixture `tier` holds exactly VALUE_COUNT values of VALUE_BYTES."""

    def raw_get(self, tier: Tier, slot: Slot) -> bytes:
        """Return the slot's bytes on the device, bypassing the code under test."""
        raise NotImplementedError

    def raw_set(self, tier: Tier, slot: Slot, data: bytes) -> None:
        """Write `data` to the slot's location on the device, bypassing the code under test."""
        raise NotImplementedError

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        tier = self.open_tier(tmp_path, VALUE_BYTES * VALUE_COUNT)
        yield tier
        tier.check_integrity()
        tier.close()

    def test_what_was_written_is_read(self, tier: Tier) -> None:
        slots = put(tier, [value(1), value(2), value(3)])
        assert get(tier, slots) == [value(1), value(2), value(3)]

    def test_an_empty_batch_does_nothing(self, tier: Tier) -> None:
        tier.write_batch([])
        assert tier.read_batch_into([], []) == []

    def test_what_is_written_lies_on_the_device(self, tier: Tier) -> None:
        _, slot = put(tier, [value(1), value(2)])
        assert self.raw_get(tier, slot) == value(2)

    def test_any_buffer_can_be_written(self, tier: Tier) -> None:
        data = value(5)
        buffers: list[Buffer] = [data, bytearray(data), memoryview(data)]
        assert get(tier, put(tier, buffers)) == [data] * 3

    def test_a_tier_keeps_no_reference_to_what_it_was_given(self, tier: Tier) -> None:
        data = bytearray(value(1))
        slots = put(tier, [data])
        data[:] = bytes(VALUE_BYTES)
        data.clear()
        assert get(tier, slots) == [value(1)]

    @pytest.mark.parametrize(("count", "size_bytes"), [(1, 1), (3, 7), (10, 4096), (5, 100_000), (33, 1000)])
    def test_capacity_for_n_values_holds_n_values(self, tmp_path: Path, count: int, size_bytes: int) -> None:
        tier = self.open_tier(tmp_path / "exact", count * self.slot_bytes(size_bytes))
        slots = put(tier, [value(number, size_bytes) for number in range(count)])
        with pytest.raises(TierFull):
            tier.allocate(size_bytes)
        assert tier.used_bytes == tier.capacity_bytes == count * self.slot_bytes(size_bytes)
        assert get(tier, slots) == [value(number, size_bytes) for number in range(count)]
        tier.check_integrity()
        tier.close()

    def test_a_full_tier_takes_one_more_for_each_one_freed(self, tier: Tier) -> None:
        slots = put(tier, [value(number) for number in range(VALUE_COUNT)])
        tier.free(slots[3])
        (newcomer,) = put(tier, [value(99)])
        assert newcomer != slots[3]
        assert newcomer.group == slots[3].group == tier.group(VALUE_BYTES)
        with pytest.raises(TierFull):
            tier.allocate(VALUE_BYTES)
        assert get(tier, [newcomer, slots[4]]) == [value(99), value(4)]

    def test_bytes_add_up(self, tier: Tier) -> None:
        first, second, third = put(tier, [value(1), value(2), value(3)])
        tier.free(first)
        tier.quarantine(second)
        assert tier.used_bytes >= third.size_bytes
        assert tier.used_bytes + tier.quarantined_bytes + tier.free_bytes == tier.capacity_bytes
        tier.free(third)
        tier.release(second)
        assert tier.free_bytes == tier.capacity_bytes

    def test_tenant_bytes_count_slots_until_they_are_free(self, tier: Tier) -> None:
        first, second = (tier.allocate(VALUE_BYTES, tenant="red") for _ in range(2))
        other = tier.allocate(VALUE_BYTES, tenant="blue")
        assert tier.tenant_bytes == {"red": 2 * VALUE_BYTES, "blue": VALUE_BYTES}
        assert tier.slot_bytes(VALUE_BYTES, tenant="red") == VALUE_BYTES
        tier.free(first)
        tier.quarantine(second)
        tier.release(second)
        assert tier.tenant_bytes == {"blue": VALUE_BYTES}
        tier.free(other)
        assert tier.tenant_bytes == {}

    @pytest.mark.parametrize("size_bytes", [-1, 0, (1 << 30) + 1, VALUE_BYTES * VALUE_COUNT + 1])
    def test_a_size_that_never_fits_is_misuse(self, tier: Tier, size_bytes: int) -> None:
        with pytest.raises(InvalidArgument):
            tier.allocate(size_bytes)

    def test_data_of_another_size_than_its_slot_is_misuse(self, tier: Tier) -> None:
        slot = tier.allocate(10)
        with pytest.raises(InvalidArgument):
            tier.write_batch([record(slot, b"eleven char")])

    def test_a_freed_slot_is_refused_everywhere(self, tier: Tier) -> None:
        freed, held = put(tier, [value(1), value(2)])
        tier.free(freed)
        for act in (tier.free, tier.quarantine):
            with pytest.raises(StaleHandle):
                act(freed)
        with pytest.raises(StaleHandle):
            tier.write_batch([record(freed, value(3))])
        assert isinstance(read(tier, freed), StaleHandle)
        assert get(tier, [held]) == [value(2)]

    def test_a_stale_handle_does_not_reach_the_next_value(self, tier: Tier) -> None:
        slots = put(tier, [value(number) for number in range(VALUE_COUNT)])
        tier.free_batch(slots)
        put(tier, [value(number) for number in range(10, 10 + VALUE_COUNT)])
        assert all(isinstance(read(tier, slot), StaleHandle) for slot in slots)

    def test_one_bad_slot_does_not_fail_its_neighbours(self, tier: Tier) -> None:
        first, second, third = put(tier, [value(1), value(2), value(3)])
        tier.free(second)
        buffers = [bytearray(VALUE_BYTES) for _ in range(3)]
        answers = tier.read_batch_into([first, second, third], [memoryview(buffer) for buffer in buffers])
        assert answers[0] is None
        assert isinstance(answers[1], StaleHandle)
        assert answers[2] is None
        assert (bytes(buffers[0]), bytes(buffers[2])) == (value(1), value(3))

    def test_values_of_many_sizes_live_side_by_side(self, tier: Tier) -> None:
        values = [value(number, size_bytes) for number, size_bytes in enumerate((1, 63, 64, 65, 1000, 4095, 4096))]
        assert get(tier, put(tier, values)) == values

    def test_a_worker_copies_while_the_owner_allocates_and_frees(self, tier: Tier) -> None:
        slots = [tier.allocate(VALUE_BYTES) for _ in range(2)]
        wrong: list[int] = []

        def copy_in_and_out() -> None:
            for number in range(20):
                values = [value(number), value(number + 1)]
                tier.write_batch([record(slot, data) for slot, data in zip(slots, values, strict=True)])
                if get(tier, slots) != values:
                    wrong.append(number)

        worker = threading.Thread(target=copy_in_and_out)
        worker.start()
        while worker.is_alive():
            tier.free_batch([tier.allocate(VALUE_BYTES) for _ in range(VALUE_COUNT - 2)])
        worker.join()
        assert wrong == []

    def test_several_threads_write_and_read_slots_of_their_own(self, tier: Tier) -> None:
        slots = [tier.allocate(VALUE_BYTES) for _ in range(VALUE_COUNT)]
        wrong: list[int] = []

        def copy_in_and_out(first: int) -> None:
            own = slots[first : first + 2]
            for number in range(10):
                values = [value(100 * first + number), value(100 * first + number + 50)]
                tier.write_batch([record(slot, data) for slot, data in zip(own, values, strict=True)])
                if get(tier, own) != values:
                    wrong.append(first)

        workers = [threading.Thread(target=copy_in_and_out, args=(first,)) for first in range(0, len(slots), 2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert wrong == []

    def test_a_sound_tier_reports_ok(self, tier: Tier) -> None:
        assert tier.health == "ok"

    def test_closing_twice_is_closing_once(self, tmp_path: Path) -> None:
        tier = self.open_tier(tmp_path / "closed", VALUE_BYTES)
        tier.close()
        tier.close()


class VolatileTierConformance(TierConformance):
    """Conformance of tiers whose values end with the process."""

    def test_what_lies_on_the_device_is_read(self, tier: Tier) -> None:
        (slot,) = put(tier, [value(1)])
        self.raw_set(tier, slot, value(2))
        assert get(tier, [slot]) == [value(2)]

    @pytest.mark.promise("slots-not-reused-early")
    def test_a_quarantined_place_is_not_reused_before_its_release(self, tier: Tier) -> None:
        slots = put(tier, [value(number) for number in range(VALUE_COUNT)])
        tier.quarantine(slots[0])
        assert isinstance(read(tier, slots[0]), StaleHandle)
        with pytest.raises(TierFull):
            tier.allocate(VALUE_BYTES)
        assert tier.quarantined_bytes == VALUE_BYTES
        assert self.raw_get(tier, slots[1]) == value(1)
        tier.release(slots[0])
        assert tier.allocate(VALUE_BYTES).index == slots[0].index

    def test_only_a_quarantined_slot_can_be_released_and_only_once(self, tier: Tier) -> None:
        (slot,) = put(tier, [value(1)])
        with pytest.raises(StaleHandle):
            tier.release(slot)
        tier.quarantine(slot)
        tier.release(slot)
        with pytest.raises(StaleHandle):
            tier.release(slot)

    def test_nothing_is_recovered(self, tmp_path: Path) -> None:
        tier = self.open_tier(tmp_path, VALUE_BYTES)
        put(tier, [value(1)])
        tier.close()
        again = self.open_tier(tmp_path, VALUE_BYTES)
        assert list(again.recover()) == []
        again.close()


class DurableTierConformance(TierConformance):
    """Conformance of tiers whose values survive the process."""

    def reopen(self, tier: Tier, folder: Path) -> Tier:
        tier.close()
        return self.open_tier(folder, VALUE_BYTES * VALUE_COUNT)

    @pytest.mark.promise("restart-keeps-nvme")
    def test_values_outlive_the_tier(self, tmp_path: Path) -> None:
        tier = self.open_tier(tmp_path, VALUE_BYTES * VALUE_COUNT)
        put(tier, [value(1), value(2, 100)], tags=[b"one", b"two"])
        used_bytes = tier.used_bytes
        tier = self.reopen(tier, tmp_path)
        recovered = {found.tag: found for found in tier.recover()}
        assert set(recovered) == {b"one", b"two"}
        assert tier.used_bytes == used_bytes
        assert recovered[b"two"].checksum == xxh3_64_intdigest(value(2, 100))
        assert get(tier, [recovered[b"one"].slot, recovered[b"two"].slot]) == [value(1), value(2, 100)]
        tier.check_integrity()
        tier.close()

    def test_adopt_counts_a_recovered_value_for_its_tenant(self, tmp_path: Path) -> None:
        tier = self.open_tier(tmp_path, VALUE_BYTES * VALUE_COUNT)
        put(tier, [value(1), value(2)], tags=[b"kept", b"let go"])
        tier = self.reopen(tier, tmp_path)
        found = {found.tag: found.slot for found in tier.recover()}
        slot = tier.adopt(found[b"kept"], tenant="red")
        tier.free(found[b"let go"])
        assert tier.tenant_bytes == {"red": VALUE_BYTES}
        assert get(tier, [slot]) == [value(1)]
        tier.check_integrity()
        tier.free(slot)
        assert tier.tenant_bytes == {}
        tier.close()

    def test_recovered_slots_are_not_given_to_others(self, tmp_path: Path) -> None:
        tier = self.open_tier(tmp_path, VALUE_BYTES * VALUE_COUNT)
        put(tier, [value(1)], tags=[b"one"])
        tier = self.reopen(tier, tmp_path)
        (found,) = tier.recover()
        put(tier, [value(number) for number in range(10, 9 + VALUE_COUNT)])
        with pytest.raises(TierFull):
            tier.allocate(VALUE_BYTES)
        assert get(tier, [found.slot]) == [value(1)]
        tier.free(found.slot)
        assert tier.allocate(VALUE_BYTES) != found.slot
        tier.close()

    def test_freed_values_are_not_recovered(self, tmp_path: Path) -> None:
        tier = self.open_tier(tmp_path, VALUE_BYTES * VALUE_COUNT)
        slots = put(tier, [value(1), value(2), value(3)], tags=[b"freed", b"quarantined", b"kept"])
        tier.free(slots[0])
        tier.quarantine(slots[1])
        tier.allocate(VALUE_BYTES)
        tier = self.reopen(tier, tmp_path)
        assert [found.tag for found in tier.recover()] == [b"kept"]
        tier.close()

    def test_a_batch_with_a_stale_slot_writes_nothing(self, tmp_path: Path) -> None:
        tier = self.open_tier(tmp_path, VALUE_BYTES * VALUE_COUNT)
        good, stale = tier.allocate(VALUE_BYTES), tier.allocate(VALUE_BYTES)
        tier.free(stale)
        with pytest.raises(StaleHandle):
            tier.write_batch([record(good, value(1)), record(stale, value(2))])
        tier = self.reopen(tier, tmp_path)
        assert list(tier.recover()) == []
        tier.close()

    def test_a_flipped_bit_is_noticed(self, tier: Tier) -> None:
        first, second = put(tier, [value(1), value(2)])
        damaged = bytearray(self.raw_get(tier, first))
        damaged[VALUE_BYTES // 2] ^= 1
        self.raw_set(tier, first, bytes(damaged))
        assert isinstance(read(tier, first), ChecksumMismatch)
        assert get(tier, [second]) == [value(2)]

    def test_tags_of_up_to_4096_bytes_are_kept(self, tmp_path: Path) -> None:
        tier = self.open_tier(tmp_path, VALUE_BYTES * VALUE_COUNT)
        tags = [b"", bytes(range(256)) * 16]
        put(tier, [value(1), value(2)], tags=tags)
        tier = self.reopen(tier, tmp_path)
        assert sorted(found.tag for found in tier.recover()) == tags
        tier.close()


def value(number: int, size_bytes: int = VALUE_BYTES) -> bytes:
    """Return a value unique to `number` (from 8 bytes on)."""
    pattern = number.to_bytes(8, "little")
    return (pattern * (size_bytes // 8 + 1))[:size_bytes]


def record(slot: Slot, data: Buffer, tag: bytes = b"") -> Record:
    return Record(slot, data, xxh3_64_intdigest(data), tag)


def put(tier: Tier, values: Sequence[Buffer], tags: list[bytes] | None = None) -> list[Slot]:
    """Allocate and write one slot per value, in one batch."""
    slots = [tier.allocate(len(data)) for data in values]
    tier.write_batch([record(*parts) for parts in zip(slots, values, tags or [b""] * len(slots), strict=True)])
    return slots


def get(tier: Tier, slots: list[Slot]) -> list[bytes]:
    """Read the slots in one batch; raises the first error."""
    buffers = [bytearray(slot.size_bytes) for slot in slots]
    for answer in tier.read_batch_into(slots, [memoryview(buffer) for buffer in buffers]):
        if answer is not None:
            raise answer
    return [bytes(buffer) for buffer in buffers]


def read(tier: Tier, slot: Slot) -> Exception | None:
    """Read one slot and return its result."""
    return tier.read_batch_into([slot], [memoryview(bytearray(slot.size_bytes))])[0]
