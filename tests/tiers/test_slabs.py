"""The slab allocator: exact capacity, groups, generations, and slabs that change hands when they are vacant."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.errors import InvalidArgument, StaleHandle
from kvstore.tiers import slabs as slabs_module
from kvstore.tiers.slabs import POSITION_BITS, SlabTier, growth_sizes, position_of
from kvstore.tiers.tier import Record, Slot, TierFull


class AnyMemory:
    """A SlabAllocator that grants up to `grant` slots at once and records its slabs."""

    def __init__(self, grant: int = 1 << 30) -> None:
        self.grant = grant
        self.is_warm = True
        self.slabs: dict[int, int] = {}
        self.released: list[int] = []

    def acquire(self, slab: int, slot_bytes: int, count: int, tenant: str) -> int:
        count = min(count, self.grant)
        if count:
            self.slabs[slab] = count * slot_bytes
        return count

    def has_warm(self, slot_bytes: int, count: int, tenant: str) -> bool:
        return self.is_warm

    def release(self, slab: int) -> None:
        del self.slabs[slab]
        self.released.append(slab)


class Bare(SlabTier):
    """Slots without bytes."""

    name = "bare"

    def write_batch(self, records: Sequence[Record]) -> None:
        raise NotImplementedError

    def read_batch_into(self, slots: Sequence[Slot], destinations: Sequence[memoryview]) -> list[Exception | None]:
        raise NotImplementedError

    def close(self) -> None:
        return


def allocator(capacity_bytes: int, slab_bytes: int = 100, backing: AnyMemory | None = None) -> SlabTier:
    return Bare(capacity_bytes, slab_bytes=slab_bytes, backing=backing or AnyMemory())


def slab_of(slot: Slot) -> int:
    return slot.index >> POSITION_BITS


@given(
    count=st.integers(1, 300),
    size_bytes=st.integers(1, 500),
    slab_bytes=st.integers(1, 2000),
    first_bytes=st.integers(1, 2000),
    spare_bytes=st.integers(0, 499),
)
def test_n_times_b_bytes_hold_n_blocks_of_b_bytes(count: int, size_bytes: int, slab_bytes: int, first_bytes: int, spare_bytes: int) -> None:
    capacity_bytes = count * size_bytes + spare_bytes % size_bytes
    slabs = Bare(capacity_bytes, slab_bytes=slab_bytes, first_bytes=first_bytes, backing=AnyMemory())
    slots = [slabs.allocate(size_bytes, "") for _ in range(count)]
    assert len({slot.index for slot in slots}) == count
    assert slabs.used_bytes == count * size_bytes
    with pytest.raises(TierFull):
        slabs.allocate(size_bytes, "")
    slabs.check_integrity()


STEPS = st.lists(
    st.tuples(st.sampled_from(["unused", "allocate", "free"]), st.integers(0, 12), st.sampled_from(["red", "blue"])), max_size=30
)


@given(STEPS)
def test_slots_given_many_at_a_time_are_those_given_one_by_one(steps: list[tuple[str, int, str]]) -> None:
    """Of two allocators one is asked for many, the other for each of as many."""
    many, each = allocator(300, slab_bytes=70), allocator(300, slab_bytes=70)
    held: list[tuple[Slot, Slot]] = []
    newest = 0
    for what, count, tenant in steps:
        if what == "free":
            for pair in held[: count // 2]:
                many.free(pair[0])
                each.free(pair[1])
            del held[: count // 2]
            continue
        if what == "allocate":
            try:
                found = [many.allocate(10, tenant)]
            except TierFull:
                continue
        else:
            found = many.allocate_unused(10, tenant, count)
            assert len(found) <= count
            assert len(set(map(slab_of, found))) <= 1
            assert found == sorted(found)
        others = sorted(each.allocate(10, tenant) for _ in found)
        assert [slot.index for slot in found] == [slot.index for slot in others]
        assert all(slot.generation > newest for slot in found), "a place that is used again has a later generation"
        newest = max(slot.generation for slot in found) if found else newest
        assert all(many.find(slot).group.tenant == tenant for slot in found)
        held += zip(found, others, strict=True)
        many.check_integrity()
        assert many.used_bytes == each.used_bytes


def test_tenant_slabs_count_used_and_quarantined_slots() -> None:
    slabs = allocator(1000)
    assert slabs.needs_slab(50, "red")
    first, second, third = (slabs.allocate(size_bytes, "red") for size_bytes in (50, 50, 30))
    other = slabs.allocate(50, "blue")
    assert slabs.tenant_slabs == {"red": 2, "blue": 1}
    assert [slabs.needs_slab(size_bytes, "red") for size_bytes in (50, 30, 20)] == [True, False, True]
    slabs.quarantine(first)
    slabs.free(second)
    slabs.free(other)
    assert slabs.tenant_slabs == {"red": 2}
    slabs.release(first)
    slabs.free(third)
    assert slabs.tenant_slabs == {}
    assert slabs.reserve_slabs(first.group, 2), "memory made ahead of need is whoever's who needs it first"
    assert slabs.tenant_slabs == {}
    assert len(slabs.allocate_unused(50, "red", 9)) == 2
    assert slabs.tenant_slabs == {"red": 1}
    slabs.check_integrity()
    with pytest.raises(InvalidArgument):
        slabs.needs_slab(1001, "red")


def test_the_first_sizes_are_exact_and_later_ones_round_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs_module, "EXACT_CLASSES", 2)
    slabs = allocator(10_000)
    for size_bytes in (101, 203, 305, 307):
        slabs.allocate(size_bytes, "red")
    assert slabs.used_bytes == 101 + 203 + 320 + 320
    assert slabs.group(305, "red") == slabs.group(319, "red") == slabs.group(320, "red")
    assert slabs.group(305, "blue") != slabs.group(320, "blue")


def test_a_size_that_never_fits_is_misuse() -> None:
    with pytest.raises(InvalidArgument):
        allocator(1000).allocate(1001, "")


def test_a_handle_is_good_for_one_use_of_its_place() -> None:
    slabs = allocator(10)
    first = slabs.allocate(10, "")
    slabs.free(first)
    second = slabs.allocate(10, "")
    assert (second.index, position_of(second)) == (first.index, position_of(first))
    assert second.generation > first.generation
    for act in (slabs.free, slabs.quarantine, slabs.find, slabs.slab_value_bytes, slabs.slab_used, slabs.release):
        with pytest.raises(StaleHandle):
            act(first)
    assert slabs.find(second).number == slab_of(second)


def test_a_quarantined_place_waits_for_its_release() -> None:
    slabs = allocator(20)
    held, other = slabs.allocate(10, ""), slabs.allocate(10, "")
    slabs.quarantine(held)
    assert (slabs.used_bytes, slabs.quarantined_bytes) == (10, 10)
    with pytest.raises(TierFull):
        slabs.allocate(10, "")
    slabs.free(other)
    slabs.check_integrity()
    with pytest.raises(TierFull):
        slabs.allocate(20, "")
    slabs.release(held)
    assert slabs.quarantined_bytes == 0
    slabs.check_integrity()
    assert slabs.allocate(20, "").size_bytes == 20


def test_a_vacant_slab_serves_its_group_without_new_memory() -> None:
    memory = AnyMemory()
    slabs = allocator(100, backing=memory)
    first = slabs.allocate(10, "")
    slabs.free(first)
    assert slab_of(slabs.allocate(10, "")) == slab_of(first)
    assert memory.released == []


def test_blocks_go_to_slabs_in_use_before_vacant_ones() -> None:
    slabs = allocator(200)
    slots = [slabs.allocate(10, "") for _ in range(20)]
    for slot in slots[:10]:
        slabs.free(slot)
    slabs.free(slots[10])
    assert slab_of(slabs.allocate(10, "")) == slab_of(slots[10])


def test_a_vacant_slab_moves_to_another_group() -> None:
    memory = AnyMemory()
    slabs = allocator(100, backing=memory)
    slots = [slabs.allocate(10, "red") for _ in range(10)]
    with pytest.raises(TierFull):
        slabs.allocate(25, "blue")
    assert {slab_of(slot) for slot in slots} == {slab_of(slots[0])}
    assert (slabs.slab_used(slots[0]), slabs.slab_value_bytes(slots[0])) == (10, 100)
    slabs.quarantine(slots[1])
    assert (slabs.slab_used(slots[0]), slabs.slab_value_bytes(slots[0])) == (9, 90)
    slabs.release(slots.pop(1))
    for slot in slots:
        slabs.free(slot)
    newcomer = slabs.allocate(25, "blue")
    assert memory.released == [slab_of(slots[0])]
    assert slab_of(newcomer) != slab_of(slots[0])
    for refused in (slabs.find, slabs.release):
        with pytest.raises(StaleHandle):
            refused(slots[0])
    with pytest.raises(StaleHandle):
        slabs.slab(slab_of(slots[0]))
    assert slabs.slab(slab_of(newcomer)).size_bytes == 100
    slabs.check_integrity()


def test_a_closed_slab_allocates_nothing_until_vacant_or_opened() -> None:
    slabs = allocator(200)
    first, *others = [slabs.allocate(50, "red") for _ in range(4)]
    slabs.close_slab(slab_of(first))
    slabs.free(first)
    slabs.check_integrity()
    with pytest.raises(TierFull):
        slabs.allocate(50, "red")
    assert slabs.needs_slab(50, "red")
    slabs.open_slab(slab_of(first))
    slabs.open_slab(slab_of(first))
    again = slabs.allocate(50, "red")
    assert slab_of(again) == slab_of(first)
    slabs.close_slab(slab_of(again))
    slabs.open_slab(slab_of(again))
    slabs.check_integrity()
    slabs.close_slab(slab_of(again))
    for slot in (again, others[0]):
        slabs.free(slot)
        slabs.check_integrity()
    slabs.close_slab(slab_of(first))
    assert slabs.allocate(100, "blue"), "it is vacant, and another's"
    slabs.open_slab(slab_of(first))
    slabs.check_integrity()
    with pytest.raises(StaleHandle):
        slabs.close_slab(slab_of(first))


def test_a_slot_larger_than_a_slab_takes_several_vacant_ones() -> None:
    slabs = allocator(400)
    for slot in [slabs.allocate(10, "") for _ in range(40)]:
        slabs.free(slot)
    assert slabs.allocate(350, "").size_bytes == 350
    slabs.check_integrity()


def test_vacant_slabs_are_released_until_memory_is_found() -> None:
    memory = AnyMemory()
    slabs = allocator(200, backing=memory)
    for slot in [slabs.allocate(10, "") for _ in range(10)]:
        slabs.free(slot)
    memory.grant = 0
    with pytest.raises(TierFull):
        slabs.allocate(20, "")
    assert memory.released == [0]
    slabs.check_integrity()


def test_slabs_are_reserved_ahead_out_of_unassigned_bytes() -> None:
    memory = AnyMemory()
    slabs = allocator(250, backing=memory)
    group = slabs.group(10, "")
    [number] = slabs.reserve_slabs(group, 1)
    assert slabs.reserve_slabs(group, 1) == [number], "it has one"
    assert slab_of(slabs.allocate(10, "")) == number
    assert len(slabs.reserve_slabs(group, 2)) == 1, "there is room for one more"
    assert slabs.reserve_slabs(slabs.group(20, ""), 1) == [], "the other group has not used its slab yet"
    slabs.allocate(10, "")
    memory.grant = 0
    assert slabs.reserve_slabs(slabs.group(50, ""), 1) == []
    slabs.check_integrity()


def test_slabs_of_forgotten_values_are_reserved_for_another_size() -> None:
    memory = AnyMemory()
    slabs = allocator(300, backing=memory)
    for tenant in ("red", "blue"):
        slots = [slabs.allocate(10, tenant) for _ in range(10)]
        slabs.free_batch(slots)
    [first, second] = slabs.reserve_slabs(slabs.group(50, "red"), 2)
    assert memory.released == [0], "red's own, for blue's memory would have to be made anew"
    assert slabs.reserve_slabs(slabs.group(50, "red"), 3) == [first, second]
    slabs.check_integrity()


def test_slabs_of_a_group_grow_with_it_until_they_are_whole() -> None:
    memory = AnyMemory()
    slabs = Bare(10_000, slab_bytes=1000, first_bytes=20, backing=memory)
    slots = [slabs.allocate(10, "red") for _ in range(300)]
    sizes = list(memory.slabs.values())
    assert sizes == [20, 60, 240, 960, 1000, 1000]
    assert sizes[:4] == growth_sizes(20, 1000)
    slabs.allocate(10, "blue")
    assert list(memory.slabs.values())[6:] == [20]
    slabs.check_integrity()
    for slot in slots:
        slabs.free(slot)
    slabs.allocate(9000, "blue")
    slabs.check_integrity()
    slabs.allocate(10, "red")
    assert list(memory.slabs.values())[-1] == 20, "it begins anew"


@given(st.lists(st.integers(0, 30), unique=True, max_size=31))
def test_many_that_are_freed_at_once_are_free_as_one_by_one(order: list[int]) -> None:
    at_once, each = allocator(40 * 10), allocator(40 * 10)
    slots = [[slabs.allocate(10, "red") for _ in range(31)] for slabs in (at_once, each)]
    at_once.free_batch(slots[0][number] for number in order)
    for number in order:
        each.free(slots[1][number])
    for slabs in (at_once, each):
        slabs.check_integrity()
    assert (at_once.used_bytes, at_once.tenant_bytes, at_once.tenant_slabs) == (each.used_bytes, each.tenant_bytes, each.tenant_slabs)
    assert [at_once.allocate(10, "red").index for _ in range(40 - 31 + len(order))] == [
        each.allocate(10, "red").index for _ in range(40 - 31 + len(order))
    ]


def test_free_batch_frees_no_slot_of_a_slab_with_a_stale_one() -> None:
    slabs = allocator(100)
    first, second, third = (slabs.allocate(10, "red") for _ in range(3))
    slabs.free(first)
    for wrong in ([second, first], [second, second], [third._replace(index=9 << POSITION_BITS)]):
        with pytest.raises(StaleHandle):
            slabs.free_batch(wrong)
    slabs.check_integrity()
    assert slabs.used_bytes == 20
    slabs.free_batch([second, third])
    assert slabs.used_bytes == 0
