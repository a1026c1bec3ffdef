"""Promises of health.py."""

import pytest

from kvstore.client.tools.health import exit_status, line, of
from kvstore.client.tools.masters import MasterTold
from kvstore.protocol import control_pb2 as pb


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        (MasterTold("m:1", "owner", catalog_health="ok", took_s=0.0123), "master m:1 is healthy: owner, took 12 ms"),
        (MasterTold("m:1", "owner", catalog_health="ok", owned=2, partitions=4), "master m:1 is healthy: owner of 2 of 4 partitions"),
        (MasterTold("m:1", "following", catalog_health="etcd is full"), "master m:1 is unhealthy: catalog: etcd is full"),
        (MasterTold("m:1", "cut off", catalog_health="gone"), "master m:1 is unhealthy: cut off; catalog: gone"),
        (MasterTold("m:1", trouble="refused"), "master m:1 is unhealthy: refused"),
    ],
)
def test_a_master_is_told_of_in_a_line(told: MasterTold, shown: str) -> None:
    (one,) = of([told], None)
    assert line(one) == shown


def test_nodes_are_by_name_and_a_failed_tier_is_unhealthy() -> None:
    nodes = [
        pb.NodeStatus(name="b", state="dead"),
        pb.NodeStatus(name="a", state="alive", tiers=[pb.TierStatus(name="nvme", health="no space left"), pb.TierStatus(name="dram")]),
        pb.NodeStatus(name="c", state="syncing"),
        pb.NodeStatus(name="d", state="stopped"),
    ]
    found = of([], pb.StatusReply(nodes=nodes))
    shown = ["node a is unhealthy: nvme: no space left", "node b is unhealthy: dead", "node c is healthy: syncing", "node d is stopped"]
    assert list(map(line, found)) == shown
    assert [one.is_healthy for one in found] == [False, False, True, True], "a stop that was asked for is no fault"


def test_the_exit_status_is_2_without_an_owner() -> None:
    well, ill = of([MasterTold("m:1", "owner"), MasterTold("m:2", trouble="refused")], None)
    assert [exit_status([well], has_owner=True), exit_status([well, ill], has_owner=True), exit_status([ill], has_owner=False)] == [0, 1, 2]
