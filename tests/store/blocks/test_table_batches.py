"""Promises of the block table about many blocks at once, against a table that is given the same blocks one after the other."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.store.blocks.block import Block
from kvstore.store.blocks.undecided import UNDECIDED
from tests.store.tables import LocalClient, Store

SIZE = 500
OWNER = "writer"


class Table(Store):
    """DRAM for 20 blocks, and a client that looks at what is shown."""

    def __init__(self, *, max_blocks: int | None = None) -> None:
        super().__init__(20 * SIZE, slab_bytes=7 * SIZE, policy="leaf_lru", max_blocks=max_blocks)
        self.local: LocalClient = self.client()


def block(key: bytes, parent: bytes = b"", namespace: str = "") -> Block:
    return Block("red", key, SIZE, UNDECIDED, namespace, parent)


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
        slots = table.table.spare_slots("red", SIZE, len(blocks) - number)
        new = blocks[number : number + len(slots)]
        assert table.table.are_new("red", [one.key for one in new])
        for one, slot in zip(new, slots, strict=True):
            one.dram = slot
        puts = table.table.open_all(new, OWNER, now_ns=1) if new else []
        assert not new or not table.table.are_new("red", [blocks[0].key, b"other"])
        if not puts:
            put = table.table.open(blocks[number], OWNER, now_ns=1)
            assert put is not None
            puts = [put]
        table.table.commit_all_undecided(puts, range(number, number + len(puts)))
        number += len(puts)


def put_each(table: Table, blocks: list[Block]) -> None:
    for number, one in enumerate(blocks):
        put = table.table.open(one, OWNER, now_ns=1)
        assert put is not None
        table.table.commit_undecided(put, number)


def order(table: Table) -> list[bytes]:
    """The keys in the order in which they would leave; the table is empty then."""
    keys = []
    while (coldest := table.table._landing.order.coldest(lambda _: True)) is not None:
        keys.append(coldest.key)
        table.table.copies.drop(coldest)
    return keys


def state(table: Table) -> list[object]:
    table.table.check_integrity()
    table.showing.check_integrity()
    return [
        sorted(
            (one.key, one.checksum, one.last_access, one.parent, table.local.find(one.key.decode()) is not None)
            for one in table.table.blocks()
        ),
        (table.dram.used_bytes, table.table.open_puts, len(table.table.undecided)),
    ]


STEPS = st.lists(
    st.one_of(
        st.lists(st.tuples(st.integers(0, 30), st.integers(-1, 30)), min_size=1, max_size=25, unique_by=lambda step: step[0]),
        st.integers(0, 30),
    ),
    max_size=8,
)


@given(STEPS)
@settings(max_examples=60)
def test_many_blocks_at_once_are_the_same_blocks_one_after_the_other(steps: list[list[tuple[int, int]] | int]) -> None:
    at_once, each = Table(), Table()
    try:
        for step in steps:
            if isinstance(step, int):
                for one in (at_once, each):
                    found = one.table.find("red", b"%d" % step)
                    if found is not None:
                        one.table.copies.drop(found)
                continue
            new = [(b"%d" % key, b"" if parent < 0 else b"%d" % parent) for key, parent in step]
            new = [(key, parent) for key, parent in new if each.table.find("red", key) is None]
            put_at_once(at_once, [block(key, parent) for key, parent in new])
            put_each(each, [block(key, parent) for key, parent in new])
            assert state(at_once) == state(each)
        claims = [[one.key for one in table.table.undecided.take(1000)] for table in (at_once, each)]
        assert claims[0] == claims[1]
        assert order(at_once) == order(each)
    finally:
        at_once.close()
        each.close()


def test_spare_slots_are_those_that_nobody_leaves_for(two: tuple[Table, Table]) -> None:
    table, _ = two
    put_each(table, [block(b"first")])
    slots = table.table.spare_slots("red", SIZE, 100)
    assert len(slots) == 19, "of the slabs that are there, and of those that there is room for"
    table.table.give_back(slots)
    table.table.check_integrity()
    put_each(table, [block(b"%d" % number) for number in range(19)])
    assert table.table.spare_slots("red", SIZE, 5) == []
    assert table.table.find("red", b"first") is not None


def test_for_slots_that_are_not_spare_those_leave_who_would_one_after_the_other(two: tuple[Table, Table]) -> None:
    table, other = two
    for one in two:
        put_each(one, [block(b"%d" % number) for number in range(18)])
        found = one.table.find("red", b"0")
        assert found is not None
        one.table.hit(found)
    slots = table.table.free_slots("red", SIZE, 9)
    assert len(slots) == len(set(slots)) == 9
    new = [block(b"new-%d" % number) for number in range(9)]
    for opened, slot in zip(new, slots, strict=True):
        opened.dram = slot
    table.table.commit_all_undecided(table.table.open_all(new, OWNER, now_ns=1), range(9))
    puts = [other.table.open(block(b"new-%d" % number), OWNER, now_ns=1) for number in range(9)]
    for number, put in enumerate(puts):
        assert put is not None
        other.table.commit_undecided(put, number)
    assert state(table) == state(other)
    assert order(table) == order(other)


def test_no_more_leave_than_may_and_the_slots_of_those_are_had(two: tuple[Table, Table]) -> None:
    table, _ = two
    put_each(table, [block(b"%d" % number) for number in range(20)])
    for number in range(15):
        one = table.table.find("red", b"%d" % number)
        assert one is not None
        table.table.copies.acquire(one)
    slots = table.table.free_slots("red", SIZE, 9)
    assert len(slots) == 5
    table.table.give_back(slots)
    assert table.names() == "".join(sorted(str(number) for number in range(15)))
    table.table.check_integrity()


def test_no_more_slots_are_spare_than_blocks_may_be_known() -> None:
    table = Table(max_blocks=5)
    put_each(table, [block(b"a"), block(b"b")])
    slots = table.table.spare_slots("red", SIZE, 100)
    assert len(slots) == 3
    table.table.give_back(slots)
    put_each(table, [block(b"c"), block(b"d"), block(b"e")])
    assert table.table.spare_slots("red", SIZE, 1) == []
    table.close()


def test_nothing_at_once_is_nothing(two: tuple[Table, Table]) -> None:
    table, _ = two
    table.table.commit_all_undecided([], [])
    assert table.table.spare_slots("red", SIZE, 0) == []
    assert state(table) == [[], (0, 0, 0)]


def test_blocks_of_several_namespaces_are_claimed_apart(two: tuple[Table, Table]) -> None:
    table, other = two
    names = [(b"a", "x"), (b"b", "y"), (b"c", "x")]
    put_each(table, [block(b"first")])
    put_each(other, [block(b"first")])
    put_at_once(table, [block(key, namespace=namespace) for key, namespace in names])
    put_each(other, [block(key, namespace=namespace) for key, namespace in names])
    claims = [[{one.key for one in each.table.undecided.take(9)} for _ in range(4)] for each in two]
    assert sorted(map(sorted, claims[0])) == sorted(map(sorted, claims[1])) == [[], [b"a", b"c"], [b"b"], [b"first"]]


def test_a_value_that_is_here_is_placed_and_kept(two: tuple[Table, Table]) -> None:
    table, other = two
    one = block(b"a", b"above")
    slot = table.table.place(one)
    assert slot is not None
    table.dram.fill(slot, memoryview(b"v" * SIZE))
    one.checksum = 7
    table.table.keep(one)
    put = other.table.open(block(b"a", b"above"), OWNER, now_ns=1)
    assert put is not None
    other.table.commit_undecided(put, 7)
    assert state(table) == state(other)
    assert bytes(table.dram.view(slot)) == b"v" * SIZE


def test_what_clients_look_at_is_not_left_for_a_value_that_is_placed(two: tuple[Table, Table]) -> None:
    table, _ = two
    put_each(table, [block(b"%d" % number) for number in range(20)])
    look = table.local.look("0")
    assert look is not None
    for number in range(40):
        one = block(b"new-%d" % number)
        assert table.table.place(one) is not None
        table.table.keep(one)
        assert table.table.find("red", b"0") is not None
        assert bytes(look[0]) == bytes(SIZE)
    assert state(table)[1] == (20 * SIZE, 0, 20)
