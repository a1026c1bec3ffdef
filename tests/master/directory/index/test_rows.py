"""Tests of rows.py; a state machine holds parents and reuse of rows against a dictionary."""

import itertools

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.master.catalogs.interface import BlockPuts
from kvstore.master.directory.index.holders import HINT
from kvstore.master.directory.index.key_index import SMALL_BATCH
from kvstore.master.directory.index.keys import NO_ROW
from kvstore.master.directory.index.rows import Rows
from kvstore.master.directory.index.tenants import Tenant, Tenants
from kvstore.master.directory.records import Version

HELD = ((1, 2),)


def table() -> tuple[Rows, Tenant]:
    tenants = Tenants()
    return Rows(tenants), tenants.of("red")


def version(generation: int = 1, parent: bytes = b"", namespace: str = "ns") -> Version:
    return Version(10, 20, generation, namespace, parent)


def columns(keys: list[bytes], versions: list[Version]) -> BlockPuts:
    return BlockPuts(
        "red",
        keys,
        [one.size for one in versions],
        [one.checksum for one in versions],
        [one.generation for one in versions],
        [one.namespace for one in versions],
        [one.parent for one in versions],
        [()] * len(keys),
    )


def test_a_row_gives_back_what_was_put_in() -> None:
    rows, red = table()
    row = rows.insert(red, b"a", version(namespace="one"), HELD)
    assert rows.version(row) == version(namespace="one")
    assert rows.pairs(row) == HELD
    assert rows.is_version(row, version(namespace="another"))
    rows.insert(red, b"a", version(2), ((1, 2), (2, 2)))
    assert rows.version(row).generation == 2
    assert not rows.is_version(row, version())
    rows.check_integrity()


@pytest.mark.parametrize("more", [0, SMALL_BATCH])
@pytest.mark.parametrize("freed", [0, 2, 5, 9, 30])
def test_many_new_rows_are_those_that_are_inserted_one_by_one(freed: int, more: int) -> None:
    at_once, each = table(), table()
    for rows, red in (at_once, each):
        rows.insert(red, b"before", version(), HELD)
        old = [rows.insert(red, b"old%d" % number, version(), HELD) for number in range(freed)]
        for row in old[::2] + old[1::2]:
            rows.remove(row)
    parents = [b"", b"before", b"k0", b"k2", b"k9", b"k5", b"unknown", *[b"k1"] * more]
    keys = [b"k%d" % number for number in range(len(parents))]
    versions = [version(number, parent, f"ns{number % 2}") for number, parent in enumerate(parents)]
    at_once[0].insert_new(at_once[1], columns(keys, versions), HELD)
    for key, one in zip(keys, versions, strict=True):
        each[0].insert(each[1], key, one, HELD)
    for rows, red in (at_once, each):
        rows.check_integrity()
        assert dict(red.rows.items()) == dict(each[1].rows.items())
        assert [rows.version(red.rows[key]) for key in keys] == [each[0].version(each[1].rows[key]) for key in keys]
        assert {rows.pairs(red.rows[key]) for key in keys} == {HELD}
    at_once[0].insert_new(at_once[1], columns([], []), HELD)
    many = [b"m%d" % number for number in range(3000)]
    at_once[0].insert_new(at_once[1], columns(many, [version()] * len(many)), HELD)
    at_once[0].check_integrity()


def test_readable_at_returns_live_holders() -> None:
    rows, red = table()
    rows.insert(red, b"a", version(), ((1, 2), (2, 2)))
    rows.sets.set_live([2])
    assert list(rows.readable_at(red, b"a")) == [2]
    assert list(rows.readable_at(red, b"unknown")) == []


def replayed(*links: tuple[bytes, bytes], generation: int = 1, holders: tuple[int, ...] = (1,)) -> BlockPuts:
    """Records of blocks, (key, parent) each."""
    keys, parents = [key for key, _parent in links], [parent for _key, parent in links]
    numbers, count = range(generation, generation + len(keys)), len(keys)
    return BlockPuts("red", keys, numbers, [20] * count, numbers, [f"ns{n % 2}" for n in numbers], parents, [holders] * count)


def links_of(rows: Rows, red: Tenant) -> dict[bytes, bytes]:
    return {key: rows.version(row).parent for key, row in red.rows.items()}


def test_from_a_catalog_children_come_before_their_parents() -> None:
    rows, red = table()
    rows.replay(red, replayed((b"a", b"b"), (b"x", b"b")))
    rows.replay(red, replayed((b"b", b"c")))
    rows.replay(red, replayed((b"c", b"")))
    assert links_of(rows, red) == {b"a": b"b", b"b": b"c", b"c": b"", b"x": b"b"}
    rows.replay(red, replayed((b"a", b"c"), generation=9))
    assert links_of(rows, red)[b"a"] == b"b", "a row keeps its parent"
    assert rows.version(red.rows[b"a"]).generation == 9
    rows.check_integrity()


@pytest.mark.parametrize("freed", [0, 1, 2, 4, 9])
@pytest.mark.parametrize("known", [0, 1, 3])
def test_replay_is_the_same_with_known_and_free_rows(freed: int, known: int) -> None:
    rows, red = table()
    old = [rows.insert(red, b"old%d" % number, version(), HELD) for number in range(freed)]
    for row in old:
        rows.remove(row)
    links = [(b"1", b"0"), (b"2", b"1"), (b"3", b"9"), (b"4", b"2"), (b"5", b"5"), (b"6", b"")]
    rows.replay(red, replayed(*links[:known], generation=50, holders=(7,)))
    records = replayed(*links)._replace(holders=[(1,), (1, 2), (1,), (2,), (1,), (1,)])
    rows.replay(red, records)
    rows.check_integrity()
    for at, (key, parent) in enumerate(links):
        row = red.rows[key]
        wanted = Version(records.sizes[at], 20, records.generations[at], records.namespaces[at], b"" if parent == key else parent)
        assert (rows.version(row), rows.pairs(row)) == (wanted, tuple((node_id, HINT) for node_id in records.holders[at]))
    assert {rows.pairs(red.rows[parent]) for parent in (b"0", b"9")} == {()}
    for key, _parent in links:
        rows.remove(red.rows[key])
    assert not red.rows


def test_replayed_parent_cycles_are_not_adopted() -> None:
    """In each order of the cycle and of what depends on it; the order of the other two keys makes no difference to these."""
    links = {b"1": b"2", b"2": b"3", b"3": b"1", b"a": b"3", b"b": b"c", b"self": b"self"}
    for order in [(b"b", *linked, b"self") for linked in itertools.permutations((b"1", b"2", b"3", b"a"))]:
        for parts in ([order], [order[:2], order[2:]], [[key] for key in order]):
            rows, red = table()
            for part in parts:
                rows.replay(red, replayed(*((key, links[key]) for key in part)))
            rows.check_integrity()
            kept = [key for key in links if rows.version(red.rows[key]).parent == links[key]]
            assert len(kept) == 4, "one of the cycle has no parent, and who is its own parent had none"
            assert {b"a", b"b"} < set(kept)
            for key in links:
                rows.remove(red.rows[key])
            assert not red.rows


def test_remove_all_frees_waiting_ancestors() -> None:
    rows, red = table()
    for key, parent in ((b"a", b""), (b"b", b"a"), (b"c", b"b"), (b"d", b"b"), (b"e", b"")):
        rows.insert(red, key, version(parent=parent, namespace=key.decode()), HELD)
    rows.remove(red.rows[b"a"])
    rows.remove_all(red, np.array([red.rows[b"b"], red.rows[b"d"]], np.uint32))
    rows.check_integrity()
    assert {key for key, _row in red.rows.items()} == {b"a", b"b", b"c", b"e"}, "c stays, and what it comes after"
    rows.remove_all(red, np.array([red.rows[b"c"], red.rows[b"e"]], np.uint32))
    rows.check_integrity()
    assert not red.rows
    rows.insert(red, b"x", version(), HELD)
    rows.remove_all(red, np.array([], np.uint32))
    rows.check_integrity()


class AgainstModel(RuleBasedStateMachine):
    """Any order of inserts and removes leaves the parents that a dictionary of links says."""

    KEYS = st.sampled_from([bytes([65 + n]) for n in range(6)])

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.red = table()
        self.held: set[bytes] = set()
        self.links: dict[bytes, bytes] = {}

    @rule(key=KEYS, parent=KEYS)
    def insert(self, key: bytes, parent: bytes) -> None:
        if key not in self.links:
            self.links[key] = parent if parent in self.links and parent != key else b""
        self.rows.insert(self.red, key, version(parent=parent), HELD)
        self.held.add(key)

    @rule(key=KEYS)
    def remove(self, key: bytes) -> None:
        if key in self.held:
            self.held.remove(key)
            self.rows.remove(self.red.rows[key])
        self.forget_links()

    @rule(keys=st.sets(KEYS, min_size=1))
    def remove_all(self, keys: set[bytes]) -> None:
        gone = sorted(keys & self.held)
        self.held -= keys
        self.rows.remove_all(self.red, np.array(list(map(self.red.rows.__getitem__, gone)), np.uint32))
        self.forget_links()

    def forget_links(self) -> None:
        while gone := [link for link in self.links if link not in self.held and link not in self.links.values()]:
            for link in gone:
                del self.links[link]

    @invariant()
    def agrees(self) -> None:
        self.rows.check_integrity()
        assert {key: self.rows.version(row).parent for key, row in self.red.rows.items()} == self.links


TestAgainstModel = AgainstModel.TestCase


@pytest.mark.parametrize(("at_once", "more"), [(False, 0), (True, 0), (True, SMALL_BATCH)])
def test_foreign_parent_has_a_row_for_its_children(at_once: bool, more: int) -> None:
    rows, red = table()
    rows.is_elsewhere = lambda key: key.startswith(b"far")
    children = {b"a": b"far-1", b"b": b"near", b"c": b"far-1", b"d": b"far-2", b"e": b"", b"far-3": b"far-3"}
    children |= {b"more %d" % number: b"" for number in range(more)}
    if at_once:
        rows.insert_new(red, columns(list(children), [version(parent=parent) for parent in children.values()]), HELD)
    else:
        for key, parent in children.items():
            rows.insert(red, key, version(parent=parent), HELD)
    rows.check_integrity()
    told = {key: rows.version(red.rows.get(key)).parent for key in list(children)[:6]}
    assert told == {b"a": b"far-1", b"b": b"", b"c": b"far-1", b"d": b"far-2", b"e": b"", b"far-3": b""}
    assert not rows.sets.live[rows.holders[red.rows.get(b"far-1")]]
    for key in (b"a", b"c"):
        rows.remove(red.rows.get(key))
    assert red.rows.get(b"far-1") == NO_ROW, "it waited for its children only"
    rows.check_integrity()
