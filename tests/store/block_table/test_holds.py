"""Tests of holds.py: which blocks stay in their tier, until when, and what ends a hold early."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.security.quotas.quota import UNLIMITED, Quota, Quotas
from kvstore.store.block_table.block import DRAM, NVME, ON_HOLD, Block
from kvstore.store.block_table.holds import MIN_STALE_ENTRIES, SHARE, Holds
from kvstore.store.block_table.tier_view import evictable_in
from kvstore.tiers.tier import Slot
from tests.store.integrity import check
from tests.store.made import made
from tests.store.tables import MAX_HOLD_NS, Store

ONE, OTHER = object(), object()
SIZE = 100
FITTING = 10
"""Blocks of SIZE that may be held in either tier."""
CAPACITIES = {DRAM: SHARE * FITTING * SIZE, NVME: SHARE * FITTING * SIZE}


def block(name: str, tier: int = DRAM, *, size_bytes: int = SIZE, tenant: str = "red") -> Block:
    found = made(tenant, name.encode(), size_bytes, 1)
    found.set_slot(tier, Slot(1, 1, size_bytes, 1))
    return found


def blocks(count: int, tier: int = DRAM, *, tenant: str = "red") -> list[Block]:
    return [block(f"{tenant} {number}", tier, tenant=tenant) for number in range(count)]


@pytest.fixture
def holds() -> Iterator[Holds]:
    holds = Holds(CAPACITIES, max_ns=MAX_HOLD_NS)
    yield holds
    check(holds)


def hold(
    holds: Holds, found: Sequence[Block], number: int = 1, *, owner: object = ONE, tenant: str = "red", until_ns: int = 100, now_ns: int = 0
) -> list[bool]:
    return holds.add(owner, tenant, number, found, until_ns=until_ns, now_ns=now_ns)


def are_held(found: Sequence[Block]) -> list[bool]:
    return [bool(one.hold_bits) for one in found]


def test_a_held_block_stays_in_its_tier_only(holds: Holds) -> None:
    in_dram, in_nvme = block("a", DRAM), block("b", NVME)
    assert hold(holds, [in_dram, in_nvme]) == [True, True]
    may_leave = [[evictable_in(tier)(one) for tier in (DRAM, NVME)] for one in (in_dram, in_nvme)]
    assert may_leave == [[False, True], [True, False]]
    assert (holds.held_bytes(DRAM), holds.held_bytes(NVME), holds.blocks, len(holds)) == (SIZE, SIZE, 2, 1)
    holds.release("red", 1)
    assert are_held([in_dram, in_nvme]) == [False, False]
    assert (holds.held_bytes(DRAM), holds.held_bytes(NVME), holds.blocks, len(holds)) == (0, 0, 0, 0)


def test_a_known_hold_number_gets_more_blocks_and_the_later_end(holds: Holds) -> None:
    found = blocks(3)
    hold(holds, found[:2], until_ns=50)
    assert hold(holds, found[1:], until_ns=90, now_ns=10) == [True, True]
    hold(holds, found[:1], until_ns=60, now_ns=20)
    assert (len(holds), holds.expire(now_ns=89), are_held(found)) == (1, 0, [True] * 3)
    assert (holds.expire(now_ns=90), are_held(found)) == (1, [False] * 3)


def test_a_hold_ends_at_its_time_or_the_maximum(holds: Holds) -> None:
    short, long = block("a"), block("b")
    hold(holds, [short], 1, until_ns=100)
    hold(holds, [long], 2, until_ns=100 * MAX_HOLD_NS)
    assert (holds.expire(now_ns=99), holds.expire(now_ns=100)) == (0, 1)
    assert (holds.expire(now_ns=MAX_HOLD_NS), are_held([short, long])) == (1, [False, False])


def test_no_more_than_a_tenth_of_a_tier_is_held(holds: Holds) -> None:
    found, below = blocks(FITTING + 2), block("n", NVME)
    assert hold(holds, found) == [True] * FITTING + [False] * 2
    assert hold(holds, [below], 2) == [True], "the other tier has its own tenth"
    assert (holds.refused, holds.held_bytes(DRAM)) == (2, FITTING * SIZE)
    assert hold(holds, [found[0], found[-1]], 3) == [True, False], "what is held already costs nothing"
    holds.release("red", 1)
    assert hold(holds, found[-2:], 4) == [True, True]


def test_a_tenant_holds_a_tenth_of_its_quota(holds: Holds) -> None:
    holds.set_quotas(Quotas(tenants={"red": Quota(dram_bytes=3 * SHARE * SIZE), "green": Quota(blocks=SHARE)}))
    assert hold(holds, blocks(4), 1) == [True] * 3 + [False]
    assert hold(holds, blocks(2, NVME, tenant="green"), 1, tenant="green") == [True, False]
    assert hold(holds, blocks(4, tenant="blue"), 1, tenant="blue") == [True] * 4


@pytest.mark.promise("holds-keep")
def test_a_quota_that_is_lowered_ends_the_oldest_holds(holds: Holds) -> None:
    found = blocks(3)
    for number, one in enumerate(found):
        hold(holds, [one], number)
    holds.set_quotas(Quotas(tenants={"red": Quota(dram_bytes=SHARE * SIZE)}))
    assert (are_held(found), holds.yielded) == ([False, False, True], 2)
    holds.set_quotas(UNLIMITED)
    assert are_held(found) == [False, False, True]


def test_yield_oldest_ends_half_of_the_holds(holds: Holds) -> None:
    found = blocks(3)
    for number, one in enumerate(found):
        hold(holds, [one], number)
    assert holds.yield_oldest(NVME) is False
    assert (holds.yield_oldest(DRAM), are_held(found)) == (True, [False, False, True])
    assert (holds.yield_oldest(DRAM), are_held(found)) == (True, [False, False, False])
    assert (holds.yield_oldest(DRAM), holds.yielded) == (False, 3)


def test_100_000_holds_cost_no_memory_once_they_are_released() -> None:
    holds = Holds(CAPACITIES, max_ns=MAX_HOLD_NS)
    found = blocks(1)
    for number in range(100_000):
        hold(holds, found, number)
        holds.release("red", number)
    assert len(holds._expiry) <= MIN_STALE_ENTRIES + 2
    assert (len(holds), len(holds._held), len(holds._by_owner), holds.blocks) == (0, 0, 0, 0)


@pytest.mark.promise("holds-keep")
def test_a_put_ends_holds_if_nothing_else_is_evictable() -> None:
    store = Store(SHARE * SIZE, may_hold_all=True)
    store.holds.add(ONE, "red", 1, [store.put(f"b{number}") for number in range(SHARE)], until_ns=100, now_ns=0)
    assert store.holds.blocks == SHARE
    assert store.try_put("new") is not None
    assert (store.holds.blocks, store.holds.yielded) == (0, SHARE)
    check(store.table)
    store.close()


def test_a_held_block_is_not_demoted(tmp_path: Path) -> None:
    store = Store(SHARE * SIZE, nvme_bytes=100_000, folder=tmp_path, slab_bytes=SIZE)
    held = store.put("held")
    store.holds.add(ONE, "red", 1, [held], until_ns=100, now_ns=0)
    for number in range(3 * SHARE):
        while store.try_put(f"b{number}") is None:
            store.settle()
    assert (held.is_in(DRAM), held.is_in(NVME), store.holds.yielded) == (True, False, 0)
    store.holds.release("red", 1)
    while store.try_put("last") is None:
        store.settle()
    assert (held.is_in(DRAM), held.is_in(NVME)) == (False, True)
    store.close()


def test_a_block_held_during_its_demotion_stays(tmp_path: Path) -> None:
    store = Store(SHARE * SIZE, nvme_bytes=100_000, folder=tmp_path, slab_bytes=SIZE)
    blocks = [store.put(f"b{number}") for number in range(SHARE)]
    assert store.try_put("new") is None
    [move] = store.table.evictor.take_moves()
    assert move.block is blocks[0]
    store.holds.add(ONE, "red", 1, [blocks[0]], until_ns=100, now_ns=0)
    store.finish(move)
    assert (blocks[0].is_in(DRAM), blocks[0].is_in(NVME)) == (True, True)
    check(store.table)
    store.close()


class HoldsMachine(RuleBasedStateMachine):
    """Against a model that looks through all holds: who holds what until when."""

    @initialize()
    def start(self) -> None:
        self.holds = Holds(CAPACITIES, max_ns=MAX_HOLD_NS)
        self.now_ns = 0
        self.blocks = [*blocks(FITTING + 4), *blocks(4, NVME)]
        self.model: dict[int, tuple[int, object, set[Block]]] = {}
        """By number: the end, the owner, what is held."""

    @rule(
        number=st.integers(0, 3),
        places=st.lists(st.integers(0, FITTING + 7), unique=True),
        length_ns=st.integers(1, 50),
        owner=st.sampled_from([ONE, OTHER]),
    )
    def add(self, number: int, places: list[int], length_ns: int, owner: object) -> None:
        found = [self.blocks[place] for place in places]
        flags = self.holds.add(owner, "red", number, found, until_ns=self.now_ns + length_ns, now_ns=self.now_ns)
        held = {one for one, is_held in zip(found, flags, strict=True) if is_held}
        until_ns, _, before = self.model.get(number, (0, None, set()))
        if held | before:
            self.model[number] = max(until_ns, self.now_ns + length_ns), owner, held | before
        everything = set().union(*(entry[2] for entry in self.model.values()))
        for one, is_held in zip(found, flags, strict=True):
            tier = one.fastest()
            assert is_held or sum(other.fastest() == tier for other in everything) == FITTING, "refused though there is room"

    @rule(number=st.integers(0, 3))
    def release(self, number: int) -> None:
        self.holds.release("red", number)
        self.model.pop(number, None)

    @rule(owner=st.sampled_from([ONE, OTHER]))
    def forget_owner(self, owner: object) -> None:
        self.holds.forget_owner(owner)
        self.model = {number: entry for number, entry in self.model.items() if entry[1] is not owner}

    @rule(step_ns=st.integers(1, 40))
    def expire(self, step_ns: int) -> None:
        self.now_ns += step_ns
        left = {number: entry for number, entry in self.model.items() if entry[0] > self.now_ns}
        assert self.holds.expire(now_ns=self.now_ns) == len(self.model) - len(left)
        self.model = left

    @invariant()
    def what_is_held_is_what_the_model_says(self) -> None:
        everything = set().union(*(entry[2] for entry in self.model.values()))
        for one in self.blocks:
            tier = one.fastest()
            assert tier is not None
            assert one.hold_bits == (ON_HOLD[tier] if one in everything else 0)
        check(self.holds)


HoldsMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30)
TestHolds = HoldsMachine.TestCase
