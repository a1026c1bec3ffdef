"""Blocks in several values leave value by value, one block after the other, in the order of the policy beneath."""

import random

import pytest

from kvstore.tiers.policies.block_values import BlockValues, block_of_value
from kvstore.tiers.policies.by_name import POLICY_NAMES, make_policy
from kvstore.tiers.policies.interface import MAX_SCAN, EvictionPolicy
from kvstore.tiers.policies.lru import LRU

VALUES = 4
LABEL = "ab" * 16


def key(block: int, value: int) -> bytes:
    return bytes([value]) * 16 + b"hash of %d" % block


def of_block(block: int) -> bytes:
    found = block_of_value(LABEL, key(block, 0))
    assert found is not None
    return found


def insert(policy: BlockValues, block: int, *values: int, parent: int | None = None) -> None:
    for value in values or range(VALUES):
        policy.insert_value(key(block, value), of_block(block), None if parent is None else of_block(parent))


def evicted(policy: BlockValues, count: int) -> list[bytes]:
    return policy.take_victims(count, lambda key: True, lambda key: True)


@pytest.fixture(params=POLICY_NAMES)
def policy(request: pytest.FixtureRequest) -> BlockValues:
    return BlockValues(make_policy(request.param, clock=lambda: 0.0))


def test_values_of_a_block_leave_one_after_the_other(policy: BlockValues) -> None:
    """Whatever the order in which ranks store and read them."""
    order = [(block, value) for block in range(20) for value in range(VALUES)]
    random.Random(0).shuffle(order)
    for block, value in order:
        insert(policy, block, value, parent=block - 1 if block % 5 else None)
        policy.touch(key(block % 7, value))
        policy.check_integrity()
    assert len(policy) == len(order)
    blocks = [found[16:] for found in evicted(policy, len(order))]
    assert len({tuple(blocks[start : start + VALUES]) for start in range(0, len(blocks), VALUES)}) == 20
    assert all(len(set(blocks[start : start + VALUES])) == 1 for start in range(0, len(blocks), VALUES))
    assert len(policy) == 0
    assert policy.victim() is None


def test_the_order_of_blocks_is_that_of_blocks_of_one_value(policy: BlockValues) -> None:
    """Reads of two ranks, each of its own values, count as one read of the block."""
    name = type(policy._blocks).name
    plain: EvictionPolicy[bytes] = make_policy(name, clock=lambda: 0.0)
    for block in range(12):
        parent = block - 1 if block % 4 else None
        insert(policy, block, 0, 1, parent=parent)
        plain.insert(of_block(block), None if parent is None else of_block(parent))
    for block in range(12):
        insert(policy, block, 2, 3)
    for block in (5, 1, 9, 5):
        plain.touch(of_block(block))
    for rank in ((0, 1), (2, 3)):
        for block in (5, 1, 9, 5):
            for value in rank:
                policy.touch(key(block, value))
    wanted = plain.take_victims(12, lambda key: True, lambda key: True)
    found = evicted(policy, 12 * VALUES)
    assert [block_of_value(LABEL, each) for each in found[::VALUES]] == wanted


def test_a_value_that_may_not_leave_is_passed_by() -> None:
    policy = BlockValues(LRU())
    insert(policy, 1)
    insert(policy, 2)
    assert policy.victim(lambda each: each != key(1, 3)) == key(1, 2)
    assert policy.victim(lambda each: not each.endswith(b"1")) == key(2, 3)
    assert policy.victim(lambda each: False) is None
    assert MAX_SCAN > 2


def test_a_block_of_which_values_are_left_goes_on_leaving() -> None:
    policy = BlockValues(LRU())
    insert(policy, 1)
    insert(policy, 2)
    assert evicted(policy, 2) == [key(1, 3), key(1, 2)]
    policy.remove(key(1, 0))
    assert key(1, 0) not in policy
    assert key(1, 1) in policy
    assert of_block(1) not in policy, "no value has the block's own key"
    assert policy.victim() == key(1, 1)
    policy.touch(key(1, 1))
    assert policy.victim() == key(2, 3), "the first value that is left counts as the block's reads"
    policy.remove(key(1, 1))
    policy.remove(key(1, 1))
    assert len(policy) == VALUES
    policy.check_integrity()


def test_a_value_that_is_put_again_is_a_touch() -> None:
    policy = BlockValues(LRU())
    insert(policy, 1)
    insert(policy, 2)
    insert(policy, 1, 0)
    assert len(policy) == 2 * VALUES
    assert policy.victim() == key(2, 3)


def test_blocks_of_one_value_are_beside_the_others() -> None:
    policy = BlockValues(LRU())
    policy.insert(b"alone")
    insert(policy, 1)
    policy.insert_all([b"more", b"last"])
    assert b"alone" in policy
    policy.touch(b"alone")
    assert evicted(policy, 6) == [key(1, 3), key(1, 2), key(1, 1), key(1, 0), b"more", b"last"]
    policy.remove(b"alone")
    assert len(policy) == 0


def test_what_the_policy_beneath_remembers_is_its_own() -> None:
    policy = BlockValues(make_policy("prefix"))
    insert(policy, 1)
    evicted(policy, VALUES)
    assert policy.remembered == 1
    policy.forget(1)
    assert policy.remembered == 0


def test_block_of_value_tells_values_by_the_label_and_the_key() -> None:
    own = bytes.fromhex(LABEL) + b"hash"
    assert block_of_value(LABEL, b"v" * 16 + b"hash") == own
    assert block_of_value(LABEL, own) is None, "one value: its namespace is the label itself"
    assert block_of_value(LABEL, b"v" * 16) is None, "nothing is behind the id"
    assert block_of_value("a text", b"v" * 16 + b"hash") is None
    assert block_of_value("no digits at all, but of 32 bytes", b"v" * 20) is None
    assert block_of_value("x" * 32, b"v" * 20) is None
