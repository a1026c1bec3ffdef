"""Tests of node_load.py: what a node has measured counts for its time and no longer, and is bounded."""

from math import inf, nan

import pytest

from kvstore.master.directory.membership.node_load import MAX_BYTES_PER_S, NodeRate, NodeRates
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.message import MAX_RATES

S = 1_000_000_000


def rate(node_id: int = 1, bytes_per_s: float = 5.0, age_s: float = 0.0) -> pb.PeerRate:
    return pb.PeerRate(node_id=node_id, bytes_per_s=bytes_per_s, basis_bytes=7, age_s=age_s)


def test_rate_expires_by_its_measurement_time() -> None:
    rates = NodeRates([rate(1, age_s=2.0), rate(2, 6.0)], ttl_ns=10 * S, now_ns=100 * S)
    assert rates.fresh(100 * S) == {1: NodeRate(5.0, 7, 98 * S), 2: NodeRate(6.0, 7, 100 * S)}
    assert rates.bytes_per_s(108 * S - 1) == {1: 5.0, 2: 6.0}
    assert rates.bytes_per_s(108 * S) == {2: 6.0}
    assert rates.fresh(110 * S) == {}


@pytest.mark.parametrize(
    "bad", [rate(bytes_per_s=0), rate(bytes_per_s=-1), rate(bytes_per_s=nan), rate(bytes_per_s=2 * MAX_BYTES_PER_S)], ids=str
)
def test_a_rate_that_cannot_be_is_refused(bad: pb.PeerRate) -> None:
    with pytest.raises(InvalidArgument, match="bytes/s"):
        NodeRates([rate(), bad])


@pytest.mark.parametrize("age_s", [-1.0, inf, nan])
def test_an_age_that_cannot_be_is_refused(age_s: float) -> None:
    with pytest.raises(InvalidArgument, match="s ago"):
        NodeRates([rate(age_s=age_s)])


def test_more_rates_than_a_node_may_tell_are_refused() -> None:
    NodeRates([rate(number) for number in range(MAX_RATES)])
    with pytest.raises(InvalidArgument, match=f"at most {MAX_RATES}"):
        NodeRates([rate(number) for number in range(MAX_RATES + 1)])
