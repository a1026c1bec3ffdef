"""Promises of ended_puts.py: a slot is used again when nobody can write into it any more, and not before. More of them: test_table.py."""

import pytest

from kvstore.store.blocks import open_puts as ended_puts
from kvstore.store.blocks.block import DRAM
from kvstore.store.blocks.open_puts import EndedPuts, OpenPut, OpenPuts
from kvstore.tiers.dram import DramTier
from tests.store.made import made
from tests.store.tables import RemoteWriter


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
        self.ended.check_integrity()
        return self.tier.used_bytes, self.tier.quarantined_bytes


def test_an_aborted_puts_slot_is_free_at_once() -> None:
    puts = Puts()
    puts.ended.abort(puts.add("a"))
    assert puts.room == (0, 0)
    assert len(puts.open) == 0


def test_an_expired_put_is_aborted_by_who_opened_it_once() -> None:
    puts = Puts()
    put = puts.add("a")
    puts.ended.expire(now_ns=10)
    assert puts.room == (0, 100)
    puts.ended.abort(put)
    puts.ended.abort(put)
    assert puts.room == (0, 0)


def test_an_expired_puts_slot_waits_for_its_writers_word_or_end() -> None:
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


def test_a_slot_that_is_being_written_from_another_host_waits_for_the_last_byte() -> None:
    puts = Puts()
    writing, idle = puts.add("a", is_remote=True), puts.add("b", is_remote=True)
    assert isinstance(writing.grant, RemoteWriter)
    writing.grant.begin()
    puts.ended.expire(now_ns=10)
    assert idle.grant is not None
    assert puts.room == (0, 100)
    assert puts.ended.expire(now_ns=11) == 0
    assert puts.room == (0, 100)
    writing.grant.end()
    puts.ended.expire(now_ns=12)
    assert puts.room == (0, 0)


def test_of_very_many_puts_of_a_writer_that_is_gone_some_end_in_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
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
        puts.ended.go_on()
    assert left == [(100, 300), (100, 100), (100, 0), (100, 0)]
    assert puts.open.holds(kept)
