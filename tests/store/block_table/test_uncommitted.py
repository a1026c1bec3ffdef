"""Tests of uncommitted.py."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.store.block_table.block import Block
from kvstore.store.block_table.partition_map import PartitionMap
from kvstore.store.block_table.uncommitted import UNCOMMITTED, UncommittedBlocks
from tests.store.integrity import check
from tests.store.made import made


def block(key: bytes, *, tenant: str = "red", namespace: str = "ns") -> Block:
    return made(tenant, key, 1, UNCOMMITTED, namespace)


def added(uncommitted: UncommittedBlocks, *blocks: Block) -> list[Block]:
    for one in blocks:
        uncommitted.add(one)
    check(uncommitted)
    return list(blocks)


def decide(uncommitted: UncommittedBlocks, one: Block) -> None:
    """Granted, in the order in which the table does it."""
    one.generation = 5
    uncommitted.remove(one)
    check(uncommitted)


def test_take_returns_one_group_in_put_order_up_to_the_limit() -> None:
    uncommitted = UncommittedBlocks(PartitionMap())
    a, b, c = added(uncommitted, block(b"a"), block(b"b"), block(b"c"))
    other, blue = added(uncommitted, block(b"o", namespace="other"), block(b"a", tenant="blue"))
    assert [uncommitted.take(2) for _ in range(5)] == [[a, b], [c], [other], [blue], []]
    assert len(uncommitted) == 5, "they are claimed, and not decided about"


def test_commits_in_flight_delay_no_other_tenant() -> None:
    uncommitted = UncommittedBlocks(PartitionMap())
    red, blue = added(uncommitted, block(b"a"), block(b"a", tenant="blue"))
    uncommitted.begin([])
    uncommitted.end([])
    assert uncommitted.take(9) == [red]
    assert uncommitted.is_commit_in_flight("red", b"a")
    assert not uncommitted.is_commit_in_flight("blue", b"a")
    uncommitted.end([blue])
    assert uncommitted.take(9) == [blue]
    uncommitted.end([red])
    assert uncommitted.commits_in_flight == 1


def test_uncommitted_batches_equal_single_operations() -> None:
    uncommitted = UncommittedBlocks(PartitionMap())
    assert not uncommitted.has_unsent
    uncommitted.add_all([])
    assert not uncommitted.has_unsent
    [first] = added(uncommitted, block(b"first"))
    a, b, c = block(b"a"), block(b"b", namespace="other"), block(b"c")
    waited: list[str] = []
    uncommitted.when_committed("red", lambda: waited.append("first"))
    uncommitted.add_all([a, b, c])
    check(uncommitted)
    assert uncommitted.has_unsent
    decide(uncommitted, first)
    for callback in uncommitted.take_due():
        callback()
    assert waited == ["first"], "those that came later are not waited for"
    assert [uncommitted.take(9) for _ in range(3)] == [[a, c], [b], []]
    assert (uncommitted.has_unsent, uncommitted.commits_in_flight) == (False, 3)


def test_a_key_has_one_commit_request_at_a_time() -> None:
    uncommitted = UncommittedBlocks(PartitionMap())
    [former] = added(uncommitted, block(b"a"))
    assert uncommitted.take(9) == [former]
    former.is_dropped = True
    uncommitted.remove(former)
    newer, b = added(uncommitted, block(b"a"), block(b"b"))
    assert uncommitted.is_commit_in_flight("red", b"a")
    assert (uncommitted.take(9), uncommitted.take(9)) == ([b], [])
    uncommitted.end([former])
    assert not uncommitted.is_commit_in_flight("red", b"a")
    assert uncommitted.take(9) == [newer]


class AgainstASet(RuleBasedStateMachine):
    """Any order of operations: the content equals a model set, and each wait covers exactly its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.uncommitted = UncommittedBlocks(PartitionMap())
        self.known: set[Block] = set()
        self.claims: list[list[Block]] = []
        self.waits: dict[int, set[Block]] = {}
        self.due: set[int] = set()
        self.waited = 0

    @rule(key=st.sampled_from([b"a", b"b", b"c"]), tenant=st.sampled_from(["red", "blue"]))
    def put(self, key: bytes, tenant: str) -> None:
        if all((one.tenant, one.key) != (tenant, key) for one in self.known):
            self.known.update(added(self.uncommitted, block(key, tenant=tenant)))

    @rule()
    def take(self) -> None:
        if taken := self.uncommitted.take(2):
            self.claims.append(taken)

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def answer(self, data: Any) -> None:
        claimed = self.claims.pop(data.draw(st.integers(0, len(self.claims) - 1)))
        self.uncommitted.end(claimed)
        if not any(one.is_dropped for one in claimed) and data.draw(st.booleans()):
            for one in claimed:
                one.generation = 7
            self.uncommitted.remove_all(claimed)
            self.known -= set(claimed)
            for left in self.waits.values():
                left -= set(claimed)
            return
        for one in claimed:
            if one.is_dropped or data.draw(st.booleans()):
                self.uncommitted.defer([one])
            else:
                self._leave(one, generation=7)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def evict(self, data: Any) -> None:
        one = data.draw(st.sampled_from(sorted(self.known, key=lambda block: (block.tenant, block.key))))
        one.is_dropped = True
        self._leave(one)

    def _leave(self, one: Block, generation: int = UNCOMMITTED) -> None:
        one.generation = generation
        self.uncommitted.remove(one)
        self.known.discard(one)
        for left in self.waits.values():
            left.discard(one)

    @rule()
    def retry_deferred(self) -> None:
        self.uncommitted.retry_deferred()

    @rule(tenant=st.sampled_from(["red", "blue"]))
    def wait(self, tenant: str) -> None:
        number = self.waited
        self.waited += 1
        self.waits[number] = {one for one in self.known if one.tenant == tenant}
        self.uncommitted.when_committed(tenant, lambda: self.due.add(number))

    @invariant()
    def agree(self) -> None:
        check(self.uncommitted)
        assert set(self.uncommitted.blocks()) == self.known
        for callback in self.uncommitted.take_due():
            callback()
        assert self.due == {number for number, left in self.waits.items() if not left}


TestAgainstASet = AgainstASet.TestCase
TestAgainstASet.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
