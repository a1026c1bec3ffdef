"""BlockValues evicts a block's values one after the other, in the order of the wrapped policy."""

import random

import pytest

from kvstore.tiers.policies.block_values import BlockValues, block_of_value
from kvstore.tiers.policies.by_name import POLICY_NAMES, make_policy
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
    """In any order in which ranks store and read them."""
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


def test_next_victims_are_the_values_of_the_next_blocks(policy: BlockValues) -> None:
    for block in range(20):
        insert(policy, block)
    found = policy.next_victims(2 * VALUES + 1)
    assert found == policy.next_victims(2 * VALUES + 1)
    assert found[0] == policy.victim()
    assert len({one[16:] for one in found}) == 3
    assert policy.next_victims(5, lambda one: one == found[1]) == [found[1]]


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


def test_hints_of_a_value_are_those_of_its_block() -> None:
    now_s = 0.0
    policy = BlockValues(make_policy("prefix", clock=lambda: now_s))
    for block in range(3):
        insert(policy, block)
    policy.insert(b"whole")
    policy.insert(b"end")
    policy.set_priority(key(2, 1), 0)
    policy.expect_reuse(key(0, 3), 1.0)
    policy.set_priority(b"absent", 0)
    policy.check_integrity()
    assert evicted(policy, VALUES) == [key(2, value) for value in reversed(range(VALUES))]
    policy.set_priority(b"whole", 0)
    assert evicted(policy, 1) == [b"whole"]


def test_block_of_value_tells_values_by_the_label_and_the_key() -> None:
    own = bytes.fromhex(LABEL) + b"hash"
    assert block_of_value(LABEL, b"v" * 16 + b"hash") == own
    assert block_of_value(LABEL, own) is None, "one value: its namespace is the label itself"
    assert block_of_value(LABEL, b"v" * 16) is None, "nothing is behind the id"
    assert block_of_value("a text", b"v" * 16 + b"hash") is None
    assert block_of_value("no digits at all, but of 32 bytes", b"v" * 20) is None
    assert block_of_value("x" * 32, b"v" * 20) is None
