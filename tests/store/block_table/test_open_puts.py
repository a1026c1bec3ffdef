"""Tests of open_puts.py: one writer per key, an end for every put, and slots kept until their writers are done."""

from array import array

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.store.block_table import open_puts
from kvstore.store.block_table import open_puts as ended_puts
from kvstore.store.block_table.block import DRAM
from kvstore.store.block_table.open_puts import EndedPuts, OpenBatch, OpenPut, OpenPuts
from kvstore.tiers.dram import DramTier
from kvstore.tiers.tier import Slot
from tests.store.integrity import check
from tests.store.made import made
from tests.store.tables import RemoteWriter

RED, BLUE = object(), object()


@pytest.fixture
def puts() -> OpenPuts:
    return OpenPuts(ttl_ns=10)


def add(puts: OpenPuts, name: str, *, owner: object = RED, now_ns: int = 0) -> OpenPut:
    block = made("red", name.encode(), 1, 1)
    block.set_slot(DRAM, Slot(ord(name), 1, 1))
    put = puts.add(block, owner, now_ns=now_ns)
    put.is_named = True
    check(puts)
    return put


def test_many_puts_are_added_and_found_as_one_by_one(puts: OpenPuts) -> None:
    blocks = [made("red", b"%d" % number, 1, 1, dram=Slot(number, 1, 1)) for number in range(5)]
    many = puts.add_all(blocks, RED, now_ns=3)
    check(puts)
    assert [put.block for put in many] == blocks
    assert {put.expires_ns for put in many} == {13}
    assert puts.add(made("red", b"x", 1, 1), RED, now_ns=3).put_id == many[-1].put_id + 1
    numbers = [put.put_id for put in many]
    for put in many:
        put.is_named = True
    assert [puts.get(number, RED) for number in numbers] == many
    assert puts.has_any("red", [b"y", b"3"])
    assert not puts.has_any("red", [b"y"])
    assert not puts.has_any("blue", [b"3"])


def test_a_put_with_an_undisclosed_id_cannot_be_looked_up(puts: OpenPuts) -> None:
    put = add(puts, "a")
    put.is_named = False
    assert puts.get(put.put_id, RED) is None
    assert puts.holds(put)
    puts.close(put)
    assert not puts.holds(put)


@pytest.mark.promise("no-wait-for-peers")
def test_expire_is_bounded_per_call(puts: OpenPuts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_puts, "MAX_EXPIRED", 2)
    batch = add_batch(puts, "abc")
    last = add(puts, "d")
    first = puts.expire(now_ns=10)
    check(puts)
    assert [put.block.key for put in first] == [b"a", b"b"]
    assert puts.expire(now_ns=10) == [batch.puts[2], last]
    assert puts.expire(now_ns=10) == []


def add_batch(puts: OpenPuts, names: str, *, tenant: str = "red", owner: object = RED, now_ns: int = 0) -> OpenBatch:
    blocks = [made(tenant, name.encode(), 1, 0, dram=Slot(ord(name), 1, 1)) for name in names]
    batch = puts.add_batch(blocks, owner, now_ns=now_ns)
    batch.is_named = True
    check(puts)
    return batch


def test_get_batch_needs_all_ids_and_the_owner(puts: OpenPuts) -> None:
    first, second = add_batch(puts, "abc"), add_batch(puts, "de")
    assert second.first_id == first.first_id + 3
    assert puts.get_batch(array("Q", first.ids), RED) is first
    for ids in ([], list(first.ids)[:2], list(first.ids)[::-1], [*first.ids, *second.ids], [99]):
        assert puts.get_batch(ids, RED) is None
    assert puts.get_batch(first.ids, BLUE) is None
    second.is_named = False
    assert puts.get_batch(second.ids, RED) is None
    assert (len(puts), puts.count_of("red"), puts.count_of("blue"), puts.tenants()) == (5, 5, 0, {"red"})
    assert puts.has_any("red", [b"x", b"e"])
    assert not puts.has_any("blue", [b"e"])
    puts.close_batch(first)
    check(puts)
    assert puts.get_batch(first.ids, RED) is None
    assert puts.of_key("red", b"a") is None
    assert puts.expire(now_ns=0) == []
    assert len(puts._expiry) == 1, "what is over is forgotten before its time"


def test_getting_one_put_splits_its_batch(puts: OpenPuts) -> None:
    for ask in (lambda batch: puts.of_key("red", b"b"), lambda batch: puts.get(batch.first_id + 1, RED), puts.puts_of):
        batch = add_batch(puts, "abc")
        ask(batch)
        assert puts.get_batch(batch.ids, RED) is None
        made = puts.puts_of(batch)
        assert [(put.put_id, put.block) for put in made] == list(zip(batch.ids, batch.blocks, strict=True))
        assert all(put.is_named and put.owner is RED for put in made)
        assert [puts.get(number, RED) for number in batch.ids] == made
        puts.close(made[1])
        check(puts)
        assert puts.expire(now_ns=10) == [made[0], made[2]]
        assert puts.reclaim_all(RED) == [made[0], made[2]]
        check(puts)


class BatchesAgainstPuts(RuleBasedStateMachine):
    """Puts that were opened as batches are those that were opened one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.batches, self.each = OpenPuts(ttl_ns=10), OpenPuts(ttl_ns=10)
        self.known: list[tuple[OpenBatch, list[OpenPut]]] = []
        self.now_ns = 0

    @rule(keys=st.lists(st.integers(0, 9), unique=True, min_size=1), tenant=st.sampled_from(["red", "blue"]), owner=st.sampled_from("ab"))
    def open(self, keys: list[int], tenant: str, owner: str) -> None:
        names = [b"%d" % key for key in keys]
        assert self.batches.has_any(tenant, names) == self.each.has_any(tenant, names)
        if self.each.has_any(tenant, names):
            return
        blocks = [made(tenant, name, 1, 0) for name in names]
        batch = self.batches.add_batch(blocks, owner, now_ns=self.now_ns)
        puts = [self.each.add(block, owner, now_ns=self.now_ns) for block in blocks]
        batch.is_named = True
        for put in puts:
            put.is_named = True
        self.known.append((batch, puts))

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        if not self.known:
            return
        batch, puts = self.known[data.draw(st.integers(0, len(self.known) - 1))]
        if data.draw(st.booleans()) and self.batches.get_batch(batch.ids, batch.owner) is batch:
            self.batches.close_batch(batch)
            self.each.close_all(puts)
            return
        at = data.draw(st.integers(0, len(puts) - 1))
        mine, other = self.batches.get(batch.ids[at], batch.owner), self.each.get(puts[at].put_id, batch.owner)
        assert same(mine) == same(other)
        if mine is not None and other is not None:
            self.batches.close(mine)
            self.each.close(other)

    @rule(key=st.integers(0, 9), tenant=st.sampled_from(["red", "blue"]))
    def ask(self, key: int, tenant: str) -> None:
        assert same(self.batches.of_key(tenant, b"%d" % key)) == same(self.each.of_key(tenant, b"%d" % key))

    @rule(owner=st.sampled_from("ab"))
    def end_owner(self, owner: str) -> None:
        mine, others = self.batches.of_owner(owner), self.each.of_owner(owner)
        assert {same(put) for put in mine} == {same(put) for put in others}
        for put in mine:
            self.batches.close(put)
        for put in others:
            self.each.close(put)
        stranded = [{same(put) for put in puts.reclaim_all(owner)} for puts in (self.batches, self.each)]
        assert stranded[0] == stranded[1]

    @rule(passed_ns=st.integers(1, 12))
    def expire(self, passed_ns: int) -> None:
        self.now_ns += passed_ns
        expired = [[same(put) for put in puts.expire(now_ns=self.now_ns)] for puts in (self.batches, self.each)]
        assert expired[0] == expired[1]

    @invariant()
    def agree(self) -> None:
        found = [(len(puts), puts.tenants(), puts.count_of("red"), puts.count_of("blue")) for puts in (self.batches, self.each)]
        assert found[0] == found[1]
        check(self.batches)
        check(self.each)


def same(put: OpenPut | None) -> tuple[object, ...] | None:
    return None if put is None else (put.put_id, put.block, put.owner, put.expires_ns, put.is_named)


TestBatchesAgainstPuts = BatchesAgainstPuts.TestCase


class Puts:
    def __init__(self) -> None:
        self.tier = DramTier(1000, slab_bytes=100)
        self.open = OpenPuts(ttl_ns=10)
        self.ended = EndedPuts(self.open, self.tier)

    def add(self, name: str, owner: object = "writer", *, is_remote: bool = False) -> OpenPut:
        block = made("red", name.encode(), 100, 1)
        block.set_slot(DRAM, self.tier.allocate(100, tenant="red"))
        put = self.open.add(block, owner, now_ns=0)
        put.grant = RemoteWriter(self.tier.view(put.slot)) if is_remote else None
        return put

    @property
    def room(self) -> tuple[int, int]:
        """Bytes used, and quarantined."""
        check(self.ended)
        return self.tier.used_bytes, self.tier.quarantined_bytes


def test_an_expired_puts_slot_waits_for_settle_or_disconnect() -> None:
    puts = Puts()
    first, _second = puts.add("a"), puts.add("b")
    assert puts.ended.expire(now_ns=10) == 2
    assert puts.room == (0, 200)
    assert puts.ended.awaited() == ["writer"]
    puts.ended.settle(first.put_id, "writer")
    puts.ended.settle(first.put_id, "writer")
    assert puts.room == (0, 100)
    puts.add("c")
    puts.ended.forget_owner("writer")
    assert puts.room == (0, 0)
    assert puts.ended.awaited() == []


@pytest.mark.promise("no-wait-for-peers")
def test_puts_of_a_disconnected_writer_end_in_bounded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended_puts, "MAX_ENDED", 2)
    puts = Puts()
    for name in "abc":
        puts.add(name)
    puts.ended.expire(now_ns=10)
    for name in "de":
        puts.add(name)
    kept = puts.add("z", owner="another")
    left = []
    puts.ended.forget_owner("writer")
    assert puts.ended.awaited() == [], "nobody waits for who is gone"
    for _ in range(4):
        left.append(puts.room)
        puts.ended.run_due()
    assert left == [(100, 300), (100, 100), (100, 0), (100, 0)]
    assert puts.open.holds(kept)
