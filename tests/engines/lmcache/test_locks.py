"""Which hold of the store may be released when LMCache unlocks objects."""

from kvstore.client.holds import new_hold
from kvstore.engines.lmcache.locks import Locks

S = 10**9


def test_a_hold_is_released_with_the_last_of_its_objects() -> None:
    locks, hold = Locks(), new_hold(30)
    locks.add(hold, [b"a", b"b", b"b"], 0)
    assert len(locks) == 2
    assert locks.unlock([b"a", b"x"]) == []
    assert locks.unlock([b"a"]) == []
    assert locks.unlock([b"b"]) == [hold]
    assert len(locks) == 0


def test_of_several_lookups_the_oldest_is_unlocked_first() -> None:
    locks, first, second = Locks(), new_hold(30), new_hold(30)
    locks.add(first, [b"a"], 0)
    locks.add(second, [b"a"], 0)
    assert locks.unlock([b"a"]) == [first]
    assert locks.unlock([b"a"]) == [second]
    locks.add(first, [b"a", b"b"], 0)
    locks.add(second, [b"a"], 0)
    assert locks.unlock([b"a", b"a", b"b"]) == [second, first]


def test_locks_whose_hold_is_over_are_forgotten() -> None:
    locks, over, later = Locks(), new_hold(1), new_hold(30)
    locks.add(over, [b"a", b"b"], 0)
    locks.add(later, [b"a"], 0)
    locks.add(new_hold(30), [b"c"], S)
    assert len(locks) == 2
    assert locks.unlock([b"b"]) == []
    assert locks.unlock([b"a"]) == [later]


def test_those_who_never_unlock_cost_no_memory_for_long() -> None:
    locks = Locks()
    for number in range(10_000):
        locks.add(new_hold(1), [b"%d" % number], number * S // 100)
    assert len(locks) == len(locks._lookups) == 100
