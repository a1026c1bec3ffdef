"""Results a key of puts that go wrong midway. Against a scripted cluster; what goes right is in scattered.py."""

from collections.abc import Sequence

import pytest

from kvstore.client.key_results import put_each
from kvstore.protocol.errors import Full, InvalidArgument, KVStoreError, Unavailable
from kvstore.protocol.node_messages import OpenSlots
from tests.client.oracle import BIG, MASTER, OTHER, Oracle, OracleNode


def put(oracle: Oracle, keys: Sequence[bytes], values: Sequence[bytes]) -> list[bool | KVStoreError]:
    """Checks that no connection stays lent."""
    operation = put_each(oracle.resources, keys, values, namespace="ns", parents=None, acks_at_node=False, deadline=oracle.deadline())
    results: list[bool | KVStoreError] = oracle.run(operation)
    assert oracle.all_given_back()
    return results


def test_put_each_reports_keys_stored_before_the_error(node: OracleNode) -> None:
    oracle = Oracle(node)
    oracle.store(b"there", BIG, 1)
    full = Full("no room")
    oracle.script[OpenSlots].append(full)
    assert put(oracle, [b"small", b"there", b"large", b"small"], [b"1", OTHER, BIG, b"3"]) == [True, False, full, False]


@pytest.mark.promise("value-layouts")
def test_put_each_isolates_a_refused_value(node: OracleNode) -> None:
    oracle = Oracle(node)
    refused = InvalidArgument("larger than this node's DRAM")
    oracle.script[OpenSlots] += [refused, refused]
    assert put(oracle, [b"a", b"b"], [BIG, OTHER]) == [refused, True]
    assert set(node.blocks) == {b"b"}


def test_no_master_is_the_result_of_every_key(node: OracleNode) -> None:
    oracle = Oracle(node)
    oracle.unreachable.add(MASTER)
    assert [type(result) for result in put(oracle, [b"a", b"b"], [b"1", b"2"])] == [Unavailable] * 2
