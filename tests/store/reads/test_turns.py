"""Promises of turns.py: so many bytes at once, of the node and of each connection, and a value too large for any limit goes alone."""

import pytest

from kvstore.store.reads.turns import MANY_BYTES, OVERHEAD_BYTES, ReadTurns, charge_of

UNIT = 10 * OVERHEAD_BYTES
SIZE = UNIT - OVERHEAD_BYTES


@pytest.fixture
def turns() -> ReadTurns:
    return ReadTurns(node_bytes=4 * UNIT, peer_bytes=2 * UNIT)


def test_a_connection_has_its_share_and_the_node_its_limit(turns: ReadTurns) -> None:
    assert [turns.take("a", SIZE) for _ in range(3)] == [True, True, False]
    assert [turns.take(peer, SIZE) for peer in "bcd"] == [True, True, False]
    turns.check_integrity()
    turns.give_back("a", 2 * UNIT)
    assert [turns.take("d", SIZE) for _ in range(3)] == [True, True, False]
    turns.check_integrity()


def test_a_value_larger_than_a_limit_goes_alone(turns: ReadTurns) -> None:
    assert turns.take("a", 100 * UNIT)
    assert not turns.take("a", 1)
    assert not turns.take("b", 1)
    turns.give_back("a", charge_of(100 * UNIT))
    assert turns.take("b", SIZE)
    assert not turns.take("a", 100 * UNIT)
    turns.check_integrity()


def test_many_small_values_are_limited_too(turns: ReadTurns) -> None:
    assert [turns.take("a", 1) for _ in range(20)].count(True) < 20


def test_it_is_over_once_after_much_was_held_and_a_while_without_more() -> None:
    turns = ReadTurns(node_bytes=1 << 30, peer_bytes=1 << 30)
    assert turns.take("a", 1)
    turns.give_back("a", charge_of(1))
    assert [turns.is_over() for _ in range(2)] == [False, False], "it was little"
    assert turns.take("a", MANY_BYTES)
    assert [turns.is_over() for _ in range(2)] == [False, False], "it is held"
    turns.give_back("a", charge_of(MANY_BYTES))
    assert turns.take("a", 1)
    turns.give_back("a", charge_of(1))
    assert [turns.is_over() for _ in range(3)] == [False, True, False]
