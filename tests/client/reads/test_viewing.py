"""Views against a scripted cluster."""

import re

import pytest

from kvstore.client.reads import batch_read as reading
from kvstore.client.reads.mapped_values import OpenView, close_view
from kvstore.protocol.errors import InvalidArgument, LeaseExpired
from kvstore.protocol.node_messages import ReadBlocks
from tests.client.oracle import Oracle, OracleNode


def open_view(oracle: Oracle, key: bytes) -> OpenView | None:
    view: OpenView | None = oracle.run(reading.open_view(oracle.resources, key, oracle.deadline(), lambda: 0))
    return view


def test_a_view_is_the_nodes_memory_until_it_is_closed(node: OracleNode) -> None:
    oracle = Oracle(node, view_lease_s=5.0)
    oracle.store(b"k", b"value", 1)
    view = open_view(oracle, b"k")
    assert view is not None
    assert bytes(view.memory) == b"value"
    assert view.memory.readonly
    assert not oracle.all_given_back()
    assert (oracle.sent(ReadBlocks)[0].lease_ms, oracle.sent(ReadBlocks)[0].inline_bytes) == (5000, 0)
    oracle.run(close_view(view, lambda: 0))
    assert oracle.all_given_back()
    assert oracle.releases() == [1]
    with pytest.raises(ValueError, match="released"):
        bytes(view.memory)
    assert (oracle.resources.counters.snapshot().hits, oracle.resources.counters.snapshot().misses) == (1, 0)


@pytest.mark.promise("slots-not-reused-early")
def test_view_open_past_its_lease_raises(node: OracleNode) -> None:
    oracle = Oracle(node)
    oracle.store(b"k", b"value", 1)
    oracle.lease_until_ns = 100
    view = open_view(oracle, b"k")
    assert view is not None
    with pytest.raises(LeaseExpired):
        oracle.run(close_view(view, lambda: 100))
    assert oracle.all_given_back()


def test_a_view_whose_connection_broke_ends_with_an_error(node: OracleNode) -> None:
    oracle = Oracle(node)
    oracle.store(b"k", b"value", 1)
    view = open_view(oracle, b"k")
    assert view is not None
    assert view.connection is not None
    view.connection.channel.close()
    with pytest.raises(LeaseExpired):
        oracle.run(close_view(view, lambda: 0))


def test_a_use_of_the_memory_that_outlives_its_view_is_an_error(node: OracleNode) -> None:
    oracle = Oracle(node)
    oracle.store(b"k", b"value", 1)
    view = open_view(oracle, b"k")
    assert view is not None
    searching = re.finditer(b"v", view.memory)
    with pytest.raises(InvalidArgument, match="still uses"):
        oracle.run(close_view(view, lambda: 0))
    assert oracle.releases() == [1]
    assert next(searching).start() == 0  # its pages stay mapped
