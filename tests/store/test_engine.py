"""A node's engine is reached as the node is."""

import pytest

from kvstore.store.storage import engine_settings
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.topology.model import ETHERNET, LOOPBACK, Nic, Topology

HOST = Topology("host", nics=(Nic("lo", LOOPBACK, "lo", ("127.0.0.1",)), Nic("eth0", ETHERNET, "eth0", ("10.0.0.1",))))


@pytest.mark.parametrize(
    ("listens_on", "rails", "chosen"),
    [
        ("127.0.0.1", "", "lo"),
        ("::1", "", "lo"),
        ("localhost", "", "lo"),
        ("0.0.0.0", "", ""),
        ("10.0.0.1", "", ""),
        ("127.0.0.1", "eth0", "eth0"),
    ],
)
def test_the_engine_is_not_to_be_reached_from_outside_unless_the_node_is_or_its_rails_are_named(
    listens_on: str, rails: str, chosen: str
) -> None:
    assert engine_settings(TransferSettings(rails=rails), HOST, listens_on=listens_on).rails == chosen


@pytest.mark.parametrize(
    ("transports", "chosen"),
    [("auto", "tcp"), ("shm", "tcp"), ("shm,tcp", "tcp"), ("ucx, shm ,tcp", "ucx,tcp"), ("my.own:Agent", "my.own:Agent")],
)
def test_the_engine_serves_other_hosts_for_clients_of_this_one_map_slabs(transports: str, chosen: str) -> None:
    assert engine_settings(TransferSettings(transports=transports), HOST, listens_on="0.0.0.0").transports == chosen


def test_a_node_on_a_host_without_a_loopback_in_its_topology_takes_the_rails_there_are() -> None:
    assert engine_settings(TransferSettings(), Topology("host"), listens_on="127.0.0.1").rails == ""
