"""Promises of uncommitted.py."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.store.block_table.block import Block
from kvstore.store.block_table.partitioning import Partitioning
from kvstore.store.block_table.uncommitted import UNDECIDED, UncommittedBlocks
from tests.store.integrity import check
from tests.store.made import made


def block(key: bytes, *, tenant: str = "red", namespace: str = "ns") -> Block:
    return made(tenant, key, 1, UNDECIDED, namespace)


def added(undecided: UncommittedBlocks, *blocks: Block) -> list[Block]:
    for one in blocks:
        undecided.add(one)
    check(undecided)
    return list(blocks)


def decide(undecided: UncommittedBlocks, one: Block) -> None:
    """Granted, in the order in which the table does it."""
    one.generation = 5
    undecided.remove(one)
    check(undecided)


def test_a_claim_is_of_one_tenant_and_namespace_in_the_order_of_the_puts_and_no_larger_than_a_message() -> None:
    undecided = UncommittedBlocks(Partitioning())
    a, b, c = added(undecided, block(b"a"), block(b"b"), block(b"c"))
    other, blue = added(undecided, block(b"o", namespace="other"), block(b"a", tenant="blue"))
    assert [undecided.take(2) for _ in range(5)] == [[a, b], [c], [other], [blue], []]
    assert len(undecided) == 5, "they are claimed, and not decided about"


def test_claims_of_one_tenant_hold_up_nobody_else_and_nothing_is_claimed_of_nothing() -> None:
    undecided = UncommittedBlocks(Partitioning())
    red, blue = added(undecided, block(b"a"), block(b"a", tenant="blue"))
    undecided.begin([])
    undecided.end([])
    assert undecided.take(9) == [red]
    assert undecided.is_claimed("red", b"a")
    assert not undecided.is_claimed("blue", b"a")
    undecided.end([blue])
    assert undecided.take(9) == [blue]
    undecided.end([red])
    assert undecided.claims == 1


def test_many_at_once_are_those_one_after_the_other() -> None:
    undecided = UncommittedBlocks(Partitioning())
    assert not undecided.has_to_claim
    undecided.add_all([])
    assert not undecided.has_to_claim
    [first] = added(undecided, block(b"first"))
    a, b, c = block(b"a"), block(b"b", namespace="other"), block(b"c")
    waited: list[str] = []
    undecided.when_decided("red", lambda: waited.append("first"))
    undecided.add_all([a, b, c])
    check(undecided)
    assert undecided.has_to_claim
    decide(undecided, first)
    for callback in undecided.take_due():
        callback()
    assert waited == ["first"], "those that came later are not waited for"
    assert [undecided.take(9) for _ in range(3)] == [[a, c], [b], []]
    assert (undecided.has_to_claim, undecided.claims) == (False, 3)


def test_a_key_is_claimed_once_at_a_time_though_its_block_has_left_and_another_one_came() -> None:
    undecided = UncommittedBlocks(Partitioning())
    [former] = added(undecided, block(b"a"))
    assert undecided.take(9) == [former]
    former.is_gone = True
    undecided.remove(former)
    newer, b = added(undecided, block(b"a"), block(b"b"))
    assert undecided.is_claimed("red", b"a")
    assert (undecided.take(9), undecided.take(9)) == ([b], [])
    undecided.end([former])
    assert not undecided.is_claimed("red", b"a")
    assert undecided.take(9) == [newer]


class AgainstASet(RuleBasedStateMachine):
    """Whatever comes in whatever order: what is known is what a set would know, and whoever waits waits for exactly that."""

    def __init__(self) -> None:
        super().__init__()
        self.undecided = UncommittedBlocks(Partitioning())
        self.known: set[Block] = set()
        self.claims: list[list[Block]] = []
        self.waits: dict[int, set[Block]] = {}
        self.due: set[int] = set()
        self.waited = 0

    @rule(key=st.sampled_from([b"a", b"b", b"c"]), tenant=st.sampled_from(["red", "blue"]))
    def put(self, key: bytes, tenant: str) -> None:
        if all((one.tenant, one.key) != (tenant, key) for one in self.known):
            self.known.update(added(self.undecided, block(key, tenant=tenant)))

    @rule()
    def take(self) -> None:
        if taken := self.undecided.take(2):
            self.claims.append(taken)

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def answer(self, data: Any) -> None:
        claimed = self.claims.pop(data.draw(st.integers(0, len(self.claims) - 1)))
        self.undecided.end(claimed)
        if not any(one.is_gone for one in claimed) and data.draw(st.booleans()):
            for one in claimed:
                one.generation = 7
            self.undecided.remove_all(claimed)
            self.known -= set(claimed)
            for left in self.waits.values():
                left -= set(claimed)
            return
        for one in claimed:
            if one.is_gone or data.draw(st.booleans()):
                self.undecided.put_off([one])
            else:
                self._leave(one, generation=7)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def evict(self, data: Any) -> None:
        one = data.draw(st.sampled_from(sorted(self.known, key=lambda block: (block.tenant, block.key))))
        one.is_gone = True
        self._leave(one)

    def _leave(self, one: Block, generation: int = UNDECIDED) -> None:
        one.generation = generation
        self.undecided.remove(one)
        self.known.discard(one)
        for left in self.waits.values():
            left.discard(one)

    @rule()
    def claim_again(self) -> None:
        self.undecided.claim_again()

    @rule(tenant=st.sampled_from(["red", "blue"]))
    def wait(self, tenant: str) -> None:
        number = self.waited
        self.waited += 1
        self.waits[number] = {one for one in self.known if one.tenant == tenant}
        self.undecided.when_decided(tenant, lambda: self.due.add(number))

    @invariant()
    def agree(self) -> None:
        check(self.undecided)
        assert set(self.undecided.blocks()) == self.known
        for callback in self.undecided.take_due():
            callback()
        assert self.due == {number for number, left in self.waits.items() if not left}


TestAgainstASet = AgainstASet.TestCase
TestAgainstASet.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
