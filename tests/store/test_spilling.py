"""Promises of spilling.py: when and which blocks a node would have copied elsewhere."""

from collections.abc import Callable

import pytest

from kvstore.store.blocks.level import Level
from kvstore.store.last_copies import AHEAD_BLOCKS, MAX_PAUSE_NS, MIN_PAUSE_NS, Spilling
from tests.store.tables import Store

SIZE = 100
BLOCKS = 20


class Node:
    """A tier with room for BLOCKS blocks, 19 of which are there, and a clock."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.now_ns = 0
        self.lowest: Level = store.table.lowest
        self.spilling = Spilling(self.lowest, clock_ns=lambda: self.now_ns)
        for number in range(BLOCKS - 1):
            store.put(f"{number:02}", SIZE)

    def is_due(self) -> bool:
        return self.spilling.due_group() is not None

    def pause(self, flags: bytes) -> int:
        """The time from one question to the next, once the first has been answered so."""
        self.spilling.answered(flags)
        begin_ns = self.now_ns
        while not self.is_due():
            self.now_ns += MIN_PAUSE_NS
        return self.now_ns - begin_ns


@pytest.fixture
def node(make_store: Callable[..., Store]) -> Node:
    return Node(make_store(BLOCKS * SIZE, slab_bytes=BLOCKS * SIZE))


def test_nothing_is_offered_unless_the_master_wants_it_and_the_tier_is_nearly_full(node: Node) -> None:
    assert not node.is_due()
    node.spilling.begin(0.05)
    assert not node.is_due(), "a twentieth is free"
    assert node.spilling.offered(list(node.store.table.blocks())) == b""
    node.store.put("last", SIZE)
    assert node.is_due()
    assert not node.is_due(), "not before the pause is over"
    node.now_ns += MIN_PAUSE_NS
    assert node.is_due()
    node.spilling.begin(0.0)
    assert not node.is_due()


def test_a_quarter_is_offered_and_no_more_than_the_limit(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.spilling.begin(0.1)
    group = node.spilling.due_group()
    assert group is not None
    coldest = node.lowest.coldest(group)
    assert node.spilling.offered(coldest) == bytes(4 * (1,)) + bytes(BLOCKS - 5)
    assert [block.key for block in coldest[:4]] == [b"00", b"01", b"02", b"03"]
    assert node.spilling.ahead < AHEAD_BLOCKS
    monkeypatch.setattr("kvstore.store.last_copies.AHEAD_BLOCKS", 2)
    assert node.spilling.offered(coldest) == bytes(2 * (1,)) + bytes(BLOCKS - 3)


def test_a_guest_is_not_offered_again(node: Node) -> None:
    node.spilling.begin(0.1)
    coldest = list(node.store.table.blocks())[:3]
    coldest[1].is_guest = True
    assert node.spilling.offered(coldest) == b"\1\0\1"


def test_questions_become_rare_where_answers_say_nothing_new(node: Node) -> None:
    node.spilling.begin(0.1)
    assert node.is_due()
    node.now_ns += MIN_PAUSE_NS
    assert node.is_due()
    assert [node.pause(flags) // MIN_PAUSE_NS for flags in (b"\0\0", b"\0\0", b"\0\1", b"\0\1", b"\1\1", b"\1\1")] == [1, 2, 4, 1, 2, 1]
    for _ in range(10):
        last_ns = node.pause(b"\1\1")
    assert last_ns == MAX_PAUSE_NS


def test_where_all_is_in_use_nothing_is_asked(node: Node) -> None:
    node.spilling.begin(0.1)
    blocks = list(node.store.table.blocks())
    for block in blocks:
        block.pinned = True
    assert not node.is_due()
    for block in blocks:
        block.pinned = False
