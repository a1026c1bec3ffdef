"""Promises of load.py: how busy a node is follows what it tells, and takes a share off it beside the others."""

import math

import pytest

from kvstore.master.directory.membership import Member, NodeInfo
from kvstore.master.directory.node_load import IDLE_BYTES_S, SPAN_S, Load, shares
from tests.master.blocks import S

MIB = 1 << 20


def test_a_rate_is_what_was_counted_between_heartbeats_older_ones_counting_less() -> None:
    load = Load()
    load.told({"in_bytes": 500 * MIB, "out_bytes": 500 * MIB, "misses": 7}, 5 * S)
    assert load.bytes_s == 0, "since when it has counted that is not known"
    load.told({"in_bytes": 600 * MIB, "out_bytes": 800 * MIB}, 7 * S)
    first = (1 - math.exp(-2 / SPAN_S)) * 200 * MIB
    assert load.bytes_s == pytest.approx(first)
    load.told({"in_bytes": 600 * MIB, "out_bytes": 800 * MIB}, 7 * S)
    assert load.bytes_s == pytest.approx(first), "no time has passed"
    load.told({}, 17 * S)
    assert load.bytes_s == pytest.approx(first / math.e), "what counts backwards is no rate"


def node(node_id: int, bytes_s: float) -> Member:
    found = Member(node_id, NodeInfo(f"node{node_id}", 1))
    found.load.bytes_s = bytes_s
    return found


def test_a_node_as_busy_as_the_mean_has_half_the_share_of_an_idle_one() -> None:
    assert shares([node(1, 0), node(2, IDLE_BYTES_S), node(3, 1)]) == {1: 1.0, 2: 1.0, 3: 1.0}
    busy = shares([node(1, 0), node(2, IDLE_BYTES_S + 300 * MIB), node(3, IDLE_BYTES_S + 150 * MIB)])
    assert busy == {1: 1.0, 2: pytest.approx(1 / 3), 3: pytest.approx(1 / 2)}
    assert shares([]) == {}
