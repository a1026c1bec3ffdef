"""Ranges of an arena: first fit, the longest where none fits, and neighbours joined."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.tiers.hbm import ArenaRanges
from kvstore.tiers.machine_conformance import MACHINE_SETTINGS


def test_slabs_of_one_size_pack_without_gaps() -> None:
    arena = ArenaRanges(35)
    assert [arena.acquire(slab, 5, 2, "") for slab in range(5)] == [2, 2, 2, 1, 0]
    assert [arena.begin(slab) for slab in range(4)] == [0, 10, 20, 30]
    arena.check_integrity()


def test_a_released_range_is_joined_with_both_neighbours() -> None:
    arena = ArenaRanges(30)
    for slab in range(3):
        arena.acquire(slab, 10, 1, "")
    for slab in (0, 2, 1):
        arena.release(slab)
        arena.check_integrity()
    assert arena.acquire(9, 30, 1, "") == 1


def test_where_no_range_holds_all_the_longest_is_taken() -> None:
    arena = ArenaRanges(60)
    for slab in range(6):
        arena.acquire(slab, 10, 1, "")
    for slab in (0, 2, 3):
        arena.release(slab)
    assert arena.acquire(7, 10, 3, "") == 2
    assert arena.begin(7) == 20
    arena.check_integrity()


class ArenaAgainstBytes(RuleBasedStateMachine):
    """No schedule of acquire and release gives a byte to two slabs; a byte array that each slab marks is the model."""

    CAPACITY_BYTES = 64

    def __init__(self) -> None:
        super().__init__()
        self.arena = ArenaRanges(self.CAPACITY_BYTES)
        self.owners = [-1] * self.CAPACITY_BYTES
        self.slabs: list[int] = []
        self.next_slab = 0

    @rule(slot_bytes=st.integers(1, 20), count=st.integers(1, 4))
    def acquire(self, slot_bytes: int, count: int) -> None:
        granted = self.arena.acquire(self.next_slab, slot_bytes, count, "")
        if granted:
            begin = self.arena.begin(self.next_slab)
            place = slice(begin, begin + granted * slot_bytes)
            assert set(self.owners[place]) == {-1}
            self.owners[place] = [self.next_slab] * (granted * slot_bytes)
            self.slabs.append(self.next_slab)
            self.next_slab += 1

    @precondition(lambda self: self.slabs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slab = self.slabs.pop(data.draw(st.integers(0, len(self.slabs) - 1)))
        self.arena.release(slab)
        self.owners = [-1 if owner == slab else owner for owner in self.owners]

    @invariant()
    def ranges_are_sound(self) -> None:
        self.arena.check_integrity()


TestArenaAgainstBytes = pytest.mark.no_cover(ArenaAgainstBytes.TestCase)
TestArenaAgainstBytes.settings = MACHINE_SETTINGS


def test_an_arena_is_as_fast_to_write_at_first_as_later() -> None:
    assert ArenaRanges(100).has_warm(10, 1, "")
