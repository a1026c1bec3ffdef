"""Tests of eviction_order.py: the coldest block of a group and of all groups, and when a group gets another group's
slab."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from random import Random

import pytest

from kvstore.store.block_table import eviction_order as eviction
from kvstore.store.block_table import policy_families
from kvstore.store.block_table.block import Block
from kvstore.store.block_table.eviction_order import EvictionOrder
from kvstore.store.block_table.policy_families import PolicyFamilies
from kvstore.tiers.policies.by_name import make_policy
from kvstore.tiers.policies.interface import EvictionPolicy, SeparatePolicies
from kvstore.tiers.policies.lru import LRU
from tests.store.integrity import check
from tests.store.made import made


def block(name: str, last_access: int) -> Block:
    return made("red", name.encode(), 100, 1, last_access=last_access)


def anyone(block: Block) -> bool:
    return True


class Visible(EvictionOrder):
    """As in a table of blocks: what is inserted is visible, by tenant and key."""

    def __init__(self, make: Callable[[], EvictionPolicy[bytes]], max_remembered: int | None = None) -> None:
        self.blocks: defaultdict[str, dict[bytes, Block]] = defaultdict(dict)
        self.families = PolicyFamilies(lambda: SeparatePolicies(make), self.blocks.__getitem__, max_remembered=max_remembered)
        super().__init__(self.families)

    def insert(self, block: Block, group: int) -> None:
        self.blocks[block.tenant][block.key] = block
        super().insert(block, group)


@pytest.fixture
def order() -> EvictionOrder:
    return Visible(lambda: make_policy("lru"))


def test_victim_is_the_groups_coldest_evictable_block(order: EvictionOrder) -> None:
    old, new = block("old", 1), block("new", 2)
    order.insert(old, 0)
    order.insert(new, 0)
    order.insert(block("other", 0), 1)
    assert order.victim(0, anyone) is old
    assert order.victim(0, lambda one: one is not old) is new
    order.touch(old, 0)
    assert order.victim(0, anyone) is new


def test_next_victim_is_the_coldest_with_its_reason(order: EvictionOrder) -> None:
    old, new, other = block("old", 1), block("new", 2), block("other", 3)
    order.insert(old, 0)
    order.insert(new, 0)
    order.insert(other, 1)
    assert order.next_victim(anyone) == (old, "", None), "LRU knows no values"
    assert order.next_victim(lambda one: one is not old) == (new, "", None)
    order.mark_secondary(new, 0)
    assert order.next_victim(anyone) == (new, "secondary", None)
    order.is_retired = lambda one: one is old
    order.retire(old, 0)
    assert order.next_victim(anyone) == (old, "retired", None)
    assert order.victim(0, anyone) is old


def test_next_victim_passes_over_few_blocks_in_use(order: EvictionOrder) -> None:
    blocks = [block(str(number), number) for number in range(1000)]
    for one in blocks:
        order.insert(one, 0)
    assert order.next_victim(lambda one: False) == (blocks[eviction.MAX_PASSED], "", None)


def test_next_victim_has_a_worth_if_the_policy_knows() -> None:
    order = Visible(lambda: make_policy("prefix"))
    for number in range(3):
        order.insert(block(str(number), number), 0)
    found = order.next_victim(anyone)
    assert found is not None
    assert found.block is order.victim(0, anyone)
    assert found.worth is not None
    assert found.worth > 0


def test_next_victim_is_shown_without_moving_sieves_hand() -> None:
    order = Visible(lambda: make_policy("sieve"))
    assert order.next_victim(anyone) is None
    first, second = block("a", 1), block("b", 2)
    order.insert(first, 0)
    order.insert(second, 0)
    order.touch(first, 0)
    assert order.next_victim(anyone) == (second, "", None)
    order.touch(second, 0)
    assert order.victim(0, anyone) is first, "both bits were set"
    order.mark_secondary(second, 0)
    assert order.next_victim(anyone) == (second, "secondary", None)


def test_pending_touches_reach_the_policy_first_and_in_order(order: EvictionOrder) -> None:
    told: list[tuple[str, bytes]] = []

    class Listening(LRU[bytes]):
        def insert(self, key: bytes, parent: bytes | None = None) -> None:
            told.append(("insert", key))
            super().insert(key, parent)

        def touch(self, key: bytes) -> None:
            told.append(("touch", key))
            super().touch(key)

        def remove(self, key: bytes) -> None:
            told.append(("remove", key))
            super().remove(key)

    order = Visible(Listening)
    a, b, c = block("a", 1), block("b", 2), block("c", 3)
    order.insert(a, 0)
    order.insert(b, 1)
    told.clear()
    order.touch(b, 1)
    order.touch(a, 0)
    assert told == []
    order.insert(c, 0)
    order.touch(c, 0)
    order.remove(c, 0)
    order.touch(a, 0)
    order.families.flush_touches()
    order.families.flush_touches()
    assert told == [("touch", b"b"), ("touch", b"a"), ("insert", b"c"), ("touch", b"c"), ("remove", b"c"), ("touch", b"a")]
    asks: list[Callable[[], object]] = [lambda: order.victim(0, anyone), lambda: order.coldest(anyone), lambda: check(order)]
    for ask in asks:
        told.clear()
        order.touch(a, 0)
        ask()
        assert told == [("touch", b"a")]
    told.clear()
    for _ in range(policy_families.MAX_PENDING_TOUCHES + 1):
        order.touch(a, 0)
    assert len(told) == policy_families.MAX_PENDING_TOUCHES


def test_coldest_elsewhere_is_in_another_group(order: EvictionOrder) -> None:
    mine, cold, warm = block("mine", 1), block("cold", 2), block("warm", 3)
    for group, one in enumerate((mine, cold, warm)):
        order.insert(one, group)
    assert order.coldest_elsewhere(0, anyone) is cold
    assert order.coldest_elsewhere(0, lambda one: one is not cold) is warm
    assert order.coldest_elsewhere(0, lambda one: one is mine) is None
    assert order.coldest(anyone) is mine


def test_only_some_of_many_groups_are_searched_round_robin(order: EvictionOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "MAX_GROUPS_SEARCHED", 3)
    blocks = [block(str(number), last_access) for number, last_access in enumerate((9, 8, 7, 1, 2, 3, 4, 5, 6))]
    for group, one in enumerate(blocks):
        order.insert(one, group)
    assert [order.coldest(anyone) for _ in range(4)] == [blocks[2], blocks[3], blocks[6], blocks[2]]
    assert order.coldest_elsewhere(3, lambda one: one is blocks[1]) is blocks[1]
    assert order.coldest(lambda one: False) is None
    check(order)


@pytest.mark.parametrize("tenant", [None, "red", "blue"])
@pytest.mark.parametrize("count", [1, 2, 9, 40, 1000])
def test_next_coldest_equals_repeated_coldest(order: EvictionOrder, tenant: str | None, count: int) -> None:
    rng = Random(count)
    blocks = [made(rng.choice(["red", "blue"]), b"%d" % number, 100, 1, last_access=rng.randrange(1000)) for number in range(100)]
    for number, one in enumerate(blocks):
        order.insert(one, 2 * (number % 3) + (one.tenant == "red"))
    moving = set(blocks[::7])
    there = [one for one in blocks if one not in moving and tenant in (None, one.tenant)]
    found = order.next_coldest(lambda block: block not in moving, count, tenant)
    expected = list[Block]()
    for _ in found:
        coldest = order.coldest if tenant is None else partial(order.coldest_of, tenant)
        next_one = coldest(lambda block: block not in moving)
        assert next_one is not None
        expected.append(next_one)
        moving.add(next_one)
    assert found == expected
    assert 0 < len(found) <= count
    assert count < 1000 or len(found) == len(there)


def test_one_cold_group_among_many_gives_the_whole_count(order: EvictionOrder) -> None:
    """A block or two at a time would make the evictor skip the group's blocks in use again for each of them."""
    cold = [block(f"cold {number}", number) for number in range(20)]
    for one in cold:
        order.insert(one, 0)
    for group in range(1, 10):
        for number in range(2):
            order.insert(block(f"warm {group} {number}", 1000), group)
    assert order.next_coldest(anyone, 16) == cold[:16]


def test_next_victims_are_distinct() -> None:
    """SIEVE visits its ring twice when it finds too few."""
    order = Visible(lambda: make_policy("sieve"))
    blocks = [block(str(number), number) for number in range(3)]
    for one in blocks:
        order.insert(one, 0)
    assert order.next_victims(0, anyone, 10) == blocks


def test_rebalance_credit_pays_for_a_slab_priced_once(order: EvictionOrder) -> None:
    order.insert(block("mine", 1), 0)
    asked: list[int] = []

    def slab_bytes() -> int:
        asked.append(1)
        return 300

    assert [order.add_rebalance_credit(0, 100, slab_bytes) for _ in range(6)] == [False, False, True, False, False, True]
    assert len(asked) == 2
    assert order.add_rebalance_credit(0, 300, slab_bytes)
    check(order)


def test_a_block_stored_again_is_the_same_key_to_the_policy() -> None:
    """LHD remembers it: of two blocks new to the node, the one stored before is worth more."""
    order = Visible(lambda: make_policy("lhd"))
    order.insert(block("stays", 1), 0)
    first = block("back", 2)
    order.insert(first, 0)
    order.remove(first, 0)
    again = block("back", 3)
    order.insert(again, 0)
    new = block("new", 4)
    order.insert(new, 0)
    assert order.holds(again, 0)
    assert not order.holds(first, 0)
    order.remove(order.victim(0, anyone) or again, 0)
    assert order.victim(0, anyone) is new
    check(order)


def leave(order: Visible, group: int, count: int) -> None:
    """Insert and remove that many blocks of a group."""
    for number in range(count):
        one = block(f"{group} {number}", number)
        order.insert(one, group)
        order.remove(one, group)


def remembered(order: EvictionOrder) -> list[int]:
    return [members.policy.remembered for _, members in sorted(order._groups.items())]


@pytest.mark.promise("space-accounted")
def test_remembered_blocks_are_bounded_over_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_families, "MAX_FORGOTTEN", 4)
    order = Visible(lambda: make_policy("prefix"), 100)
    for group in range(2):
        order.insert(block(f"stays {group}", 0), group)
    leave(order, 0, 1000)
    assert 96 <= order.families.remembered <= 100
    leave(order, 1, 1000)
    assert 92 <= order.families.remembered <= 100
    assert all(45 <= count <= 55 for count in remembered(order)), "each has its share"
    order.insert_all([block(f"0 {number}", 0) for number in (998, 999)], 0)
    check(order)
    leave(order, 2, 1000)
    assert sum(remembered(order)) == order.families.remembered, "who is gone remembers nothing"
    check(order)


def test_take_victims_stops_at_the_first_refused_block(order: EvictionOrder) -> None:
    blocks = [block(str(number), number) for number in range(5)]
    for one in blocks:
        order.insert(one, 0)
    order.insert(block("other", 0), 1)
    assert order.take_victims(0, 3, lambda one: one is not blocks[0], lambda one: one is not blocks[3]) == blocks[1:3]
    assert order.take_victims(0, 3, lambda one: one is not blocks[0], lambda one: one is not blocks[3]) == []
    assert order.take_victims(9, 3, anyone, anyone) == []
    check(order)
    assert order.take_victims(0, 9, anyone, anyone) == [blocks[0], *blocks[3:]]
    assert order.coldest(anyone) is not None
    assert len(order) == 1
    check(order)


def test_a_secondary_copy_that_the_policy_takes_loses_its_mark(order: EvictionOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    """More secondary copies are in use than a search examines, so that the policy chooses the one that is free."""
    monkeypatch.setattr(eviction, "MAX_EARLY_EXAMINED", 2)
    blocks = [block(str(number), number) for number in range(4)]
    for one in blocks:
        order.insert(one, 0)
        one.is_secondary = True
        order.mark_secondary(one, 0)
    assert order.take_victims(0, 1, lambda one: one is blocks[3], anyone) == [blocks[3]]
    [(tenant, keys)] = order.secondary_copies()
    assert (tenant, sorted(keys)) == ("red", [one.key for one in blocks[:3]])
    assert order.released == 1
    check(order)
