"""Tests of batch operations of the block table against a table that gets the same blocks one by one."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.store.block_table.block import DRAM, Block
from kvstore.store.block_table.copies import IsProtected
from kvstore.store.block_table.uncommitted import UNCOMMITTED
from tests.store.integrity import check
from tests.store.made import made
from tests.store.tables import LocalClient, Store

SIZE = 500
OWNER = "writer"


class Table(Store):
    """DRAM for 20 blocks, and a client that looks at what is shown."""

    def __init__(self, *, max_blocks: int | None = None) -> None:
        super().__init__(20 * SIZE, slab_bytes=7 * SIZE, policy="leaf_lru", max_blocks=max_blocks)
        self.local: LocalClient = self.client()


def block(key: bytes, parent: bytes = b"", namespace: str = "") -> Block:
    return made("red", key, SIZE, UNCOMMITTED, namespace, parent)


@pytest.fixture
def two() -> Iterator[tuple[Table, Table]]:
    both = Table(), Table()
    yield both
    for one in both:
        one.close()


def put_at_once(table: Table, blocks: list[Block]) -> None:
    """As many at a time as there are spare slots; where there are none, one for which room is made."""
    number = 0
    while number < len(blocks):
        slots = table.table.slots.spare_slots("red", SIZE, len(blocks) - number)
        new = blocks[number : number + len(slots)]
        assert table.table.are_new("red", [one.key for one in new])
        for one, slot in zip(new, slots, strict=True):
            one.set_slot(DRAM, slot)
        puts = table.table.puts.add_all(new, OWNER, now_ns=1) if new else []
        assert not new or not table.table.are_new("red", [blocks[0].key, b"other"])
        if not puts:
            put = table.table.open(blocks[number], OWNER, now_ns=1)
            assert put is not None
            puts = [put]
        table.table.store_all_uncommitted(puts, range(number, number + len(puts)))
        number += len(puts)


def put_each(table: Table, blocks: list[Block]) -> None:
    for number, one in enumerate(blocks):
        put = table.table.open(one, OWNER, now_ns=1)
        assert put is not None
        table.table.store_uncommitted(put, number)


def order(table: Table) -> list[bytes]:
    """The keys in the order in which they would leave; the table is empty then."""
    keys = []
    while (coldest := table.table._ingest_tier.order.coldest(lambda _: True)) is not None:
        keys.append(coldest.key)
        table.table.copies.drop(coldest)
    return keys


def state(table: Table) -> list[object]:
    check(table.table)
    check(table.shared_index)
    return [
        sorted(
            (one.key, one.checksum, one.last_access, one.parent, table.local.find(one.key.decode()) is not None)
            for one in table.table.blocks()
        ),
        (table.dram.used_bytes, table.table.open_puts, len(table.table.uncommitted)),
    ]


def found_in(table: Table, numbers: set[int]) -> list[Block]:
    found = (table.table.find("red", b"%d" % number) for number in sorted(numbers))
    return [block for block in found if block is not None]


STEPS = st.lists(
    st.one_of(
        st.lists(st.tuples(st.integers(0, 30), st.integers(-1, 30)), min_size=1, max_size=25, unique_by=lambda step: step[0]),
        st.integers(0, 30),
        st.sets(st.integers(0, 30), min_size=1),
    ),
    max_size=8,
)


@given(STEPS)
@settings(max_examples=40)
def test_batch_operations_equal_single_operations(steps: list[list[tuple[int, int]] | int | set[int]]) -> None:
    at_once, each = Table(), Table()
    try:
        for step in steps:
            if isinstance(step, int):
                for one in (at_once, each):
                    found = one.table.find("red", b"%d" % step)
                    if found is not None:
                        one.table.copies.drop(found)
                continue
            if isinstance(step, set):
                at_once.table.copies.drop_each(found_in(at_once, step))
                for gone in found_in(each, step):
                    each.table.copies.drop(gone)
                continue
            new = [(b"%d" % key, b"" if parent < 0 else b"%d" % parent) for key, parent in step]
            new = [(key, parent) for key, parent in new if each.table.find("red", key) is None]
            put_at_once(at_once, [block(key, parent) for key, parent in new])
            put_each(each, [block(key, parent) for key, parent in new])
            assert state(at_once) == state(each)
        claims = [[one.key for one in table.table.uncommitted.take(1000)] for table in (at_once, each)]
        assert claims[0] == claims[1]
        assert order(at_once) == order(each)
    finally:
        at_once.close()
        each.close()


def test_placed_values_evict_no_protected_blocks(two: tuple[Table, Table]) -> None:
    table, _ = two
    put_each(table, [block(b"%d" % number) for number in range(20)])
    look = table.local.look("0")
    assert look is not None
    for number in range(40):
        one = block(b"new-%d" % number)
        slot = table.table.place(one)
        assert slot is not None
        table.table.copies.make_placed_visible(one, table.dram.locate(slot))
        table.table.enter_placed(one)
        assert table.table.find("red", b"0") is not None
        assert bytes(look[0]) == bytes(SIZE)
    assert state(table)[1] == (20 * SIZE, 0, 20)


ROOM_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("room"), st.sampled_from(["red", "blue"]), st.sampled_from([SIZE, SIZE, 2 * SIZE]), st.integers(1, 24)),
        st.tuples(st.just("hit"), st.integers(0, 60)),
        st.tuples(st.just("use"), st.integers(0, 60)),
        st.tuples(st.just("look"), st.integers(0, 60)),
        st.tuples(st.just("warm"), st.integers(0, 60)),
        st.tuples(st.just("spare"), st.integers(0, 60)),
    ),
    max_size=14,
)


class Crowded(Store):
    """A full node with clients of two tenants; with HBM some blocks have another copy there."""

    def __init__(self, policy: str, *, hbm_bytes: int, at_once: bool) -> None:
        super().__init__(20 * SIZE, hbm_bytes=hbm_bytes, slab_bytes=4 * SIZE, policy=policy)
        self.clients = {tenant: self.client(tenant, tenant) for tenant in ("red", "blue")}
        if not at_once:
            self.table.evictor._free_coldest = lambda *_: 0  # type: ignore[method-assign]
        self.count = 0
        self.put_slots: list[int] = []
        self.used: list[Block] = []
        self.looks: list[object] = []
        """Views; each ends with its last reference."""

    def make_room(self, tenant: str, size_bytes: int, count: int) -> None:
        """Put as many blocks as there are slots for, every other one decided about."""
        for slot in self.table.slots.free_slots(tenant, size_bytes, count):
            self.put_slots.append(slot.index)
            one = made(tenant, b"%d" % self.count, size_bytes, UNCOMMITTED, dram=slot)
            self.table.store_all_uncommitted(self.table.puts.add_all([one], OWNER, now_ns=1), [self.count])
            if self.count % 2:
                self.table.mark_committed(one, self.count)
            self.count += 1

    def step(self, what: str, *rest: object) -> None:
        if what == "room":
            self.make_room(*rest)  # type: ignore[arg-type]
            return
        [number] = rest
        assert isinstance(number, int)
        for tenant in ("red", "blue"):
            one = self.table.find(tenant, b"%d" % number)
            if one is None:
                continue
            if what == "hit":
                self.table.hit(one)
            elif what == "use":
                self.used.append(one)
                self.table.copies.acquire(one)
            elif what == "look":
                self.looks.append(self.clients[tenant].look(one.key.decode()))
            elif what == "spare" and one.dram is not None:
                spares = self.table.lowest.replicated_victims
                spares.set_answer(one.dram.group, [(one, one.last_access)], b"\x01", now_ns=0)
            elif what == "warm":
                one.hits = 2
                self.table.evictor.promote_to_hbm(one)
                self.settle()

    def state(self) -> list[object]:
        check(self.table)
        check(self.shared_index)
        level = self.table._ingest_tier
        groups = sorted(level.order._groups)
        return [
            [(one.tenant, one.key, one.last_access, one.tier_mask()) for one in self.table.blocks()],
            [(tenant, key) for tenant in self.clients for key in range(self.count) if self.clients[tenant].find(str(key)) is not None],
            [(kind, one.tenant, one.key, mask) for kind, one, mask in self.events],
            (self.put_slots, self.dram.used_bytes, self.dram.quarantined_bytes),
            (level.counts.evictions, level.counts.evicted, sorted(level.replicated_victims._due)),
            [[one.key for one in level.order.next_victims(group, lambda _: True, 100)] for group in groups],
        ]

    def shut(self) -> None:
        for one in self.used:
            self.table.copies.release(one)
        check(self.table)
        self.close()


@given(st.sampled_from(["lru", "leaf_lru", "lfu"]), st.sampled_from([0, 3 * SIZE]), ROOM_STEPS)
@settings(max_examples=50)
def test_batch_evictions_equal_single_evictions(policy: str, hbm_bytes: int, steps: list[tuple[object, ...]]) -> None:
    """Under policies without state changes on refusal. SIEVE's hand passes each refused key; one search for many
    victims refuses each once, single searches many times."""
    at_once, each = (Crowded(policy, hbm_bytes=hbm_bytes, at_once=at_once) for at_once in (True, False))
    try:
        for step in (("room", "red", SIZE, 20), *steps):
            for one in (at_once, each):
                one.step(*step)  # type: ignore[arg-type]
            assert at_once.state() == each.state()
    finally:
        at_once.shut()
        each.shut()


def test_a_hazard_set_after_the_victim_search_keeps_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hazard is set after the node found no hazard and before the block is removed from the index."""
    table = Crowded("lru", hbm_bytes=0, at_once=True)
    table.make_room("red", SIZE, 20)
    looks = table.shared_index.protection_of
    seen: list[object] = []

    def look_afterwards(tenant: str) -> IsProtected | None:
        found = looks(tenant)
        if not seen:
            seen.append(table.clients["red"].look("4"))
        return found

    monkeypatch.setattr(table.shared_index, "protection_of", look_afterwards)
    slots = table.table.slots.free_slots("red", SIZE, 6)
    assert table.dram.quarantined_bytes == SIZE
    assert len(slots) == 6, "of one more block, which left for it"
    assert table.table.find("red", b"4") is None
    table.table.slots.free(slots)
    table.shut()
