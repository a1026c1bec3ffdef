"""Promises of model.py: which rails are near which memory, on machines of several kinds."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.protocol.errors import ConfigError
from kvstore.transfer.topology.model import (
    LOOPBACK,
    ROCE,
    Gpu,
    Nic,
    NumaNode,
    RailPreference,
    Topology,
)
from tests.transfer.topology.machines import dgx

LO = Nic("lo", LOOPBACK, "lo", ("127.0.0.1",))
TWO_NODES = (NumaNode(0, (10, 21)), NumaNode(1, (21, 10)))


def nic(name: str, numa: int = -1, pci_path: str = "", *, is_up: bool = True) -> Nic:
    return Nic(name, interface=name, addresses=("10.0.0.1",), numa_node=numa, is_up=is_up, pci_path=pci_path)


def test_dgx_gpus_prefer_the_nic_below_their_switch(tmp_path: Path) -> None:
    topology = dgx(tmp_path).topology()
    for index in range(8):
        preferred, available = topology.preferred(f"cuda:{index}")
        assert preferred == (f"mlx5_{index}",)
        assert len(available) == 8
        same_socket = {f"mlx5_{other}" for other in range(index // 4 * 4, index // 4 * 4 + 4)} - {f"mlx5_{index}"}
        assert same_socket <= set(available[: 3 + (index < 4)]), "eno1 hangs on the first socket too"
    assert topology.preferred("cpu:0") == (("eno1", "mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"), ("mlx5_4", "mlx5_5", "mlx5_6", "mlx5_7"))
    assert topology.preferred("cpu:1").preferred == ("mlx5_4", "mlx5_5", "mlx5_6", "mlx5_7")


def test_a_nic_that_is_down_is_replaced_by_the_next_nearest(tmp_path: Path) -> None:
    topology = dgx(tmp_path).topology()
    nics = tuple(replace(nic, is_up=nic.name != "mlx5_0") for nic in topology.nics)
    degraded = replace(topology, nics=nics)
    assert degraded.preferred("cuda:0").preferred == ("eno1", "mlx5_1", "mlx5_2", "mlx5_3")
    assert "mlx5_0" not in {name for rails in degraded.matrix.values() for part in rails for name in part}


def test_a_nic_without_an_address_is_a_rail_only_with_rdma() -> None:
    topology = Topology("h", (NumaNode(0),), (Nic("eth0"), Nic("mlx5_0", ROCE), LO))
    assert topology.matrix == {"cpu:0": RailPreference(("mlx5_0",), ())}


def test_the_loopback_is_a_rail_only_where_there_is_no_other() -> None:
    assert Topology("h", (NumaNode(0),), (LO, nic("eth0"))).preferred("cpu:0") == (("eth0",), ())
    assert Topology("h", (NumaNode(0),), (LO, nic("eth0", is_up=False))).preferred("cpu:0") == (("lo",), ())
    assert Topology("h", (NumaNode(0),)).preferred("cpu:0") == ((), ())
    assert Topology("h", (NumaNode(0),), (LO, nic("eth0"))).rails("lo") == [LO], "named, it is one all the same"


def test_memory_without_local_nics_prefers_the_nearest_node() -> None:
    nodes = (NumaNode(0, (10, 12, 32)), NumaNode(1, (12, 10, 32)), NumaNode(2, (32, 32, 10)))
    topology = Topology("h", nodes, (nic("near", 1), nic("far", 2)))
    assert topology.preferred("cpu:0") == (("near",), ("far",))
    assert topology.preferred("cpu:2") == (("far",), ("near",))
    only_far = Topology("h", nodes, (nic("a", 2), nic("b", 2)))
    assert only_far.preferred("cpu:0") == (("a", "b"), ())


def test_a_nic_without_node_counts_as_nearest_for_cpus() -> None:
    gpu = Gpu(0, numa_node=0, pci_path="pci0000:00/0000:00:01.0/0000:01:00.0")
    nics = (nic("veth"), nic("near", 0, "pci0000:00/0000:00:02.0"), nic("far", 1, "pci0000:80/0000:80:02.0"))
    topology = Topology("h", TWO_NODES, nics, (gpu,))
    assert topology.preferred("cpu:0") == (("near", "veth"), ("far",))
    assert topology.preferred("cuda:0") == (("near",), ("veth", "far"))


def test_gpus_without_node_or_pci_use_the_other_distance() -> None:
    nics = (nic("a", 0, "pci0000:00/0000:00:02.0"), nic("b", 1, "pci0000:80/0000:80:02.0"))
    gpus = (Gpu(0, pci_path="pci0000:80/0000:80:03.0"), Gpu(1, numa_node=0))
    topology = Topology("h", TWO_NODES, nics, gpus)
    assert topology.preferred("cuda:0") == (("b",), ("a",))
    assert topology.preferred("cuda:1") == (("a",), ("b",))


@pytest.mark.parametrize("location", ["cpu:7", "cuda:0", "disk"])
def test_an_unknown_location_prefers_all_rails_equally(location: str) -> None:
    assert Topology("h", TWO_NODES, (nic("b", 1), nic("a", 0), LO)).preferred(location) == (("a", "b"), ())


def test_an_override_applies_to_its_locations_and_usable_nics() -> None:
    override = {"cpu:0": RailPreference(("b",), ("a",)), "cpu:1": RailPreference(("c",), ()), "cuda:3": RailPreference(("c",), ())}
    topology = Topology("h", TWO_NODES, (nic("a", 0), nic("b", 1), nic("c", 1, is_up=False)), override=override)
    assert topology.preferred("cpu:0") == (("b",), ("a",))
    assert topology.preferred("cpu:1") == (("b",), ("a",)), "nothing that was named is left: as discovered"
    assert topology.preferred("cuda:3") == ((), ())


def test_rails_are_chosen_by_name_or_interface_up_or_down() -> None:
    rdma = replace(nic("mlx5_0"), interface="eth9", is_up=False)
    topology = Topology("h", nics=(nic("eth0"), rdma, LO))
    assert topology.rails("") == [topology.nics[0]]
    assert topology.rails(" eth9, eth0,mlx5_0,") == [rdma, topology.nics[0]]
    with pytest.raises(ConfigError, match=r"names 'eth1', but this machine's NICs are: eth0, mlx5_0, lo"):
        topology.rails("eth1")
    with pytest.raises(ConfigError, match="are: none"):
        Topology("h").rails("eth1")
