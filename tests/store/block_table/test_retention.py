"""Tests of retention.py: hints of blocks, their ends, and sessions."""

import gc
from collections.abc import Callable, Collection

import pytest

from kvstore.protocol.node_messages import NO_PRIORITY, SEVERAL_SESSIONS
from kvstore.store.block_table import retention
from kvstore.store.block_table.block import Block
from kvstore.store.block_table.retention import TICK_NS, Hint, priority_of
from kvstore.tiers.policies.interface import SeparatePolicies
from kvstore.tiers.policies.lru import LRU
from tests.store.tables import Store

MakeStore = Callable[..., Store]
MINUTE_NS = 60 * TICK_NS


class PriorityLRU(LRU[bytes]):
    """LRU within a priority, the lowest first: an oracle that shows what a policy has been told."""

    def __init__(self) -> None:
        super().__init__()
        self.priorities: dict[bytes, int] = {}
        self.reuses: dict[bytes, float] = {}

    def set_priority(self, key: bytes, priority: int) -> None:
        self.priorities[key] = priority

    def expect_reuse(self, key: bytes, after_s: float) -> None:
        self.reuses[key] = after_s

    def remove(self, key: bytes) -> None:
        self.priorities.pop(key, None)
        super().remove(key)

    def victim(self, evictable: Callable[[bytes], bool] = lambda key: True) -> bytes | None:
        keys = [key for key in self._keys if evictable(key)]
        return min(keys, key=lambda key: self.priorities.get(key, 50), default=None)


@pytest.fixture
def store(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store of eight blocks in DRAM."""
    monkeypatch.setattr("tests.store.tables.make_family", lambda name: SeparatePolicies(PriorityLRU))
    return make_store(800, slab_bytes=800)


def policy_of(store: Store, tier: int = 1) -> PriorityLRU:
    [members] = store.table._levels[tier].order._groups.values()
    assert isinstance(members.policy, PriorityLRU)
    return members.policy


def put(store: Store, names: str) -> list[Block]:
    return [store.put(name) for name in names]


def apply(store: Store, blocks: Collection[Block], hint: Hint, now_ns: int = 0) -> None:
    store.table.retention.apply("red", list(blocks), hint, now_ns)


def priorities(store: Store, blocks: Collection[Block]) -> list[int]:
    """The priorities of the blocks, which the policy must have, too."""
    told = [policy_of(store).priorities.get(block.key, 50) for block in blocks]
    assert told == [priority_of(block.columns.retention[block]) for block in blocks]
    return told


def walk(store: Store, now_ns: int) -> None:
    """Walk over all rows, and pass on what changed."""
    for _ in range(3):
        store.table.retention.step(now_ns)


def test_a_hint_reorders_the_evictions(store: Store) -> None:
    blocks = put(store, "abcdefgh")
    apply(store, blocks[:4], Hint(90))
    apply(store, blocks[7:], Hint(10))
    put(store, "wxyz")
    assert store.names() == "abcdwxyz", "h went first, then e, f, g"


def test_the_highest_live_priority_counts(store: Store) -> None:
    a, b, c, d = put(store, "abcd")
    for hint in (Hint(30), Hint(90, 60_000), Hint(70), Hint(80, 120_000)):
        apply(store, [a, b], hint)
    apply(store, [c], Hint(10, 60_000))
    apply(store, [d], Hint(50))
    assert priorities(store, [a, b, c, d]) == [90, 90, 10, 50]
    walk(store, MINUTE_NS - 1)
    assert priorities(store, [a, c]) == [90, 10]
    walk(store, MINUTE_NS)
    assert priorities(store, [a, b, c, d]) == [70, 70, 50, 50], "the hint without an end stays; a lower one with an end is not kept"


def test_a_later_end_of_the_same_priority_counts(store: Store) -> None:
    [a] = put(store, "a")
    for ttl_ms in (60_000, 120_000, 1):
        apply(store, [a], Hint(80, ttl_ms))
    walk(store, MINUTE_NS)
    assert priorities(store, [a]) == [80]
    walk(store, 2 * MINUTE_NS)
    assert priorities(store, [a]) == [50]


def test_a_new_block_in_a_row_has_no_hint(store: Store) -> None:
    blocks = put(store, "abcdefgh")
    apply(store, blocks, Hint(90))
    rows = {int(block) for block in blocks}
    for block in blocks:
        store.table.copies.drop(block)
    store.events.clear()
    del blocks, block
    store.table.expire(now_ns=0)
    gc.collect()
    new = put(store, "ijklmnop")
    assert {int(one) for one in new} == rows, "rows are reused"
    assert priorities(store, new) == [50] * 8
    walk(store, 0)
    assert store.table.retention.blocks == 0


def test_retained_blocks_are_counted(store: Store) -> None:
    blocks = put(store, "abcd")
    apply(store, blocks, Hint(90))
    store.table.copies.drop(blocks[0])
    walk(store, 0)
    assert store.table.retention.counters()["retained_blocks"] == 3


def test_an_ended_session_frees_what_no_other_used(store: Store) -> None:
    own, shared, read, unnamed, other = put(store, "abcde")
    apply(store, [own, shared, read], Hint(90, session=1, owns=True))
    apply(store, [shared], Hint(60, session=2, owns=True))
    apply(store, [read], Hint(50, session=3))
    apply(store, [unnamed], Hint(80))
    apply(store, [unnamed], Hint(50, session=1))
    apply(store, [other], Hint(70, session=2, owns=True))
    apply(store, [own], Hint(None, session=1))
    apply(store, [own], Hint(50))
    assert store.table.retention.end_session("blue", 1) == 0
    assert store.table.retention.end_session("red", 1) == 1
    assert priorities(store, [own, shared, read, unnamed, other]) == [0, 90, 90, 80, 70]
    assert store.table.retention.end_session("red", 1) == 0
    put(store, "wxyz")
    assert "a" not in store.names()
    assert store.table.retention.counters()["retention_sessions_ended"] == 1


def test_a_hint_after_the_end_counts_again(store: Store) -> None:
    [a] = put(store, "a")
    apply(store, [a], Hint(90, session=1, owns=True))
    store.table.retention.end_session("red", 1)
    apply(store, [a], Hint(40))
    assert priorities(store, [a]) == [40]


def test_the_oldest_sessions_are_forgotten(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "MAX_SESSIONS", 4)
    monkeypatch.setattr(retention, "FORGOTTEN_AT_ONCE", 2)
    blocks = put(store, "abcde")
    for session, block in enumerate(blocks[:4], 1):
        apply(store, [block], Hint(90, session=session, owns=True))
    apply(store, blocks[:1], Hint(90, session=1))
    apply(store, blocks[4:], Hint(90, session=5, owns=True))
    assert [store.table.retention.end_session("red", session) for session in range(1, 6)] == [1, 0, 0, 1, 1]
    assert store.table.retention.counters()["retention_sessions_forgotten"] == 2
    assert priorities(store, blocks) == [0, 90, 90, 0, 0]


def test_hints_without_an_index_are_ignored(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "MAX_OWNERS", 4)
    a, b = put(store, "ab")
    apply(store, [a], Hint(90, session=1, owns=True))
    apply(store, [b], Hint(90, session=2, owns=True))
    assert priorities(store, [a, b]) == [90, 50]
    assert store.table.retention.ignored == 1


def test_many_blocks_are_passed_on_in_parts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "PASSED_AT_ONCE", 3)
    blocks = put(store, "abcdefgh")
    apply(store, blocks, Hint(90, session=1, owns=True))
    assert policy_of(store).priorities == {}
    walk(store, 0)
    assert store.table.retention.end_session("red", 1) == 8
    assert list(policy_of(store).priorities.values()) == [90] * 8
    store.table.copies.drop(blocks[0])
    walk(store, 0)
    assert priorities(store, blocks[1:]) == [0] * 7


def test_a_hint_follows_its_block_to_other_tiers(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.store.tables.make_family", lambda name: SeparatePolicies(PriorityLRU))
    store = make_store(200, slab_bytes=200, nvme_bytes=20_000)
    a = store.put("a")
    apply(store, [a], Hint(90))
    store.table.evictor.evict(a, store.table._ingest_tier)
    store.settle()
    assert policy_of(store, 2).priorities == {b"a": 90}
    apply(store, [a], Hint(95))
    assert policy_of(store, 2).priorities == {b"a": 95}


def test_an_expected_reuse_reaches_the_policy(store: Store) -> None:
    a, b = put(store, "ab")
    store.table.retain("red", [a, b], Hint(50), 1500, 0)
    assert policy_of(store).reuses == {b"a": 1.5, b"b": 1.5}


def test_a_copy_takes_the_hints_along(store: Store, make_store: MakeStore) -> None:
    a, b, c, d = put(store, "abcd")
    apply(store, [a], Hint(60, session=7, owns=True))
    apply(store, [a], Hint(90, 60_000))
    apply(store, [b], Hint(None, session=7))
    apply(store, [c], Hint(None, session=7, owns=True))
    rows = store.table.retention.export([a, b, None, c, d], 10 * TICK_NS)
    assert rows == [
        (0, 60, 0, 7),
        (0, 90, 50_000, 7),
        (1, NO_PRIORITY, 0, SEVERAL_SESSIONS),
        (3, NO_PRIORITY, 0, 7),
    ]
    other = make_store(800, slab_bytes=800)
    copies = put(other, "abcd")
    for number, copy in zip((0, 1, 3, 4), copies, strict=True):
        other.table.retention.adopt(copy, [row[1:] for row in rows if row[0] == number], 0)
    assert priorities(other, copies) == [90, 50, 50, 50]
    assert other.table.retention.export([copies[0], copies[1], None, copies[2], copies[3]], 0) == rows
    assert other.table.retention.end_session("red", 7) == 2
