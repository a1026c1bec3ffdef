"""Promises of open_puts.py: one writer a key, an end for every put, and slots kept until their writers are done with them."""

import pytest

from kvstore.store.blocks.block import Block
from kvstore.store.blocks.open_puts import OpenPut, OpenPuts
from kvstore.tiers.tier import Slot

RED, BLUE = object(), object()


@pytest.fixture
def puts() -> OpenPuts:
    return OpenPuts(ttl_ns=10)


def add(puts: OpenPuts, name: str, *, owner: object = RED, now_ns: int = 0) -> OpenPut:
    block = Block("red", name.encode(), 1, 1)
    block.dram = Slot(ord(name), 1, 1)
    put = puts.add(block, owner, now_ns=now_ns)
    put.is_named = True
    puts.check_integrity()
    return put


def test_a_put_is_found_by_its_key_and_by_its_owners_id_only(puts: OpenPuts) -> None:
    put = add(puts, "a")
    assert puts.of_key("red", b"a") is put
    assert puts.of_key("blue", b"a") is None
    assert puts.get(put.put_id, RED) is put
    assert puts.get(put.put_id, BLUE) is None
    assert puts.get(put.put_id + 1, RED) is None
    assert put.put_id != 0


def test_many_puts_are_added_and_found_as_one_by_one(puts: OpenPuts) -> None:
    blocks = [Block("red", b"%d" % number, 1, 1, dram=Slot(number, 1, 1)) for number in range(5)]
    many = puts.add_all(blocks, RED, now_ns=3)
    puts.check_integrity()
    assert [put.block for put in many] == blocks
    assert {put.expires_ns for put in many} == {13}
    assert puts.add(Block("red", b"x", 1, 1), RED, now_ns=3).put_id == many[-1].put_id + 1
    numbers = [put.put_id for put in many]
    assert puts.get_all(numbers, RED) is None, "nobody was told them"
    for put in many:
        put.is_named = True
    assert puts.get_all(numbers, RED) == many
    assert puts.get_all(numbers, BLUE) is None
    assert puts.get_all([*numbers, numbers[0]], RED) is None
    assert puts.get_all([*numbers, 99], RED) is None
    assert puts.has_any("red", [b"y", b"3"])
    assert not puts.has_any("red", [b"y"])
    assert not puts.has_any("blue", [b"3"])


def test_a_put_whose_number_nobody_was_told_is_found_by_nobody(puts: OpenPuts) -> None:
    put = add(puts, "a")
    put.is_named = False
    assert puts.get(put.put_id, RED) is None
    assert puts.holds(put)
    puts.close(put)
    assert not puts.holds(put)


def test_a_closed_put_is_open_no_more_and_does_not_expire(puts: OpenPuts) -> None:
    put = add(puts, "a")
    puts.close(put)
    assert puts.of_key("red", b"a") is puts.get(put.put_id, RED) is None
    assert len(puts) == 0
    assert puts.expire(now_ns=99) == []
    puts.check_integrity()


def test_many_puts_are_closed_as_one_by_one(puts: OpenPuts) -> None:
    many = puts.add_all([Block("red", b"%d" % number, 1, 1) for number in range(5)], RED, now_ns=3)
    other = puts.add(Block("blue", b"1", 1, 1), RED, now_ns=3)
    puts.close_all(many[1:4])
    puts.check_integrity()
    assert [put for put in [*many, other] if puts.holds(put)] == [many[0], many[4], other]
    assert puts.of_key("red", b"2") is None
    puts.close_all([many[0], many[4]])
    puts.check_integrity()
    assert not puts.has_any("red", [b"%d" % number for number in range(5)])
    assert puts.expire(now_ns=99) == [other]


def test_puts_expire_at_their_time_in_order(puts: OpenPuts) -> None:
    first, second = add(puts, "a"), add(puts, "b", now_ns=5)
    assert puts.expire(now_ns=9) == []
    assert puts.expire(now_ns=10) == [first]
    assert puts.of_key("red", b"a") is None
    assert len(puts) == 1
    assert puts.expire(now_ns=15) == [second]


def test_entries_of_closed_puts_are_forgotten_before_their_time(puts: OpenPuts) -> None:
    for _ in range(3):
        puts.close(add(puts, "a"))
    assert puts.expire(now_ns=1) == []
    assert len(puts._expiry) == 0


def test_an_expired_puts_slot_is_reclaimed_once_by_its_own_writer(puts: OpenPuts) -> None:
    first, second = add(puts, "a"), add(puts, "b")
    puts.expire(now_ns=10)
    assert puts.reclaim(first.put_id, BLUE) is None
    assert puts.reclaim(first.put_id, RED) is first
    assert puts.reclaim(first.put_id, RED) is None
    assert puts.reclaim(second.put_id, RED) is second
    assert puts.reclaim_all(RED) == []


def test_the_end_of_a_writer_gives_back_all_its_expired_slots_and_names_its_open_puts(puts: OpenPuts) -> None:
    expired = [add(puts, name) for name in "ab"]
    puts.expire(now_ns=10)
    mine, _other = add(puts, "c", now_ns=10), add(puts, "d", owner=BLUE, now_ns=10)
    assert puts.of_owner(RED) == [mine]
    assert puts.reclaim_all(RED) == expired
    assert puts.reclaim_all(RED) == []
