"""Values copied out of mapped slabs. Against a scripted cluster."""

import pytest

from kvstore.protocol.errors import (
    InvalidArgument,
    LeaseExpired,
)
from tests.client.oracle import BIG, Oracle, Pair
from tests.client.reads.gets import get, get_into


def test_oversized_mapped_value_releases_its_lease(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"a", BIG, 1)
    with pytest.raises(InvalidArgument, match="key 0"):
        get_into(oracle, [b"a"], [bytearray(2)])
    assert oracle.releases() == [1]


@pytest.mark.promise("slots-not-reused-early")
def test_copy_after_the_lease_is_read_again(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"k", BIG, 1)
    lapsed = iter([2_000, 0, 0])
    oracle.lease_until_ns = 1_000
    assert get(oracle, b"k", now_ns=lambda: next(lapsed)) == [BIG]
    assert oracle.releases() == [1, 2]


def test_leases_that_always_run_out_are_an_error(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.store(b"k", BIG, 1)
    oracle.lease_until_ns = 10
    with pytest.raises(LeaseExpired):
        get(oracle, b"k")
