"""Promises of discovery.py, on machines built in a folder and on this one."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvstore.protocol.errors import ConfigError
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.topology.discovery import Discovery, FoundGpu, nvml_gpus, read_machine
from kvstore.transfer.topology.model import ETHERNET, INFINIBAND, LOOPBACK, ROCE, UNKNOWN_NODE, Gpu, Nic, NumaNode
from kvstore.transfer.topology.netlink import Interface
from tests.transfer.topology.machines import Machine, dgx, laptop, server

BOND_PCI = "pci0000:17/0000:17:00.0/0000:18:00.0"


def nics(machine: Machine) -> dict[str, Nic]:
    return {nic.name: nic for nic in machine.topology().nics}


def test_dgx_topology(tmp_path: Path) -> None:
    topology = dgx(tmp_path).topology()
    assert topology.numa_nodes == (NumaNode(0, (10, 21)), NumaNode(1, (21, 10)))
    by_name = {nic.name: nic for nic in topology.nics}
    assert list(by_name) == ["eno1", "lo", *(f"mlx5_{index}" for index in range(8))]
    assert by_name["mlx5_4"] == Nic(
        "mlx5_4", INFINIBAND, "ibp154s0", (), 1, 400.0, True, "pci0000:97/0000:97:01.0/0000:98:00.0/0000:99:00.0/0000:9a:00.0"
    )
    assert by_name["eno1"] == Nic("eno1", ETHERNET, "eno1", ("10.9.0.1",), 0, 10.0, True, "pci0000:00/0000:00:1c.0/0000:01:00.0")
    assert [(gpu.index, gpu.numa_node) for gpu in topology.gpus] == [(index, index // 4) for index in range(8)]
    assert topology.gpus[0] == Gpu(0, "NVIDIA 0x2330", 0, "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0/0000:19:00.0")


def test_server_with_roce_excludes_container_networks(tmp_path: Path) -> None:
    found = nics(server(tmp_path))
    assert list(found) == ["lo", "mlx5_0", "mlx5_1"]
    pci_path = "pci0000:b1/0000:b1:00.0/0000:b2:00.0"
    assert found["mlx5_1"] == Nic("mlx5_1", ROCE, "ens2f0np0", ("10.0.1.1", "fd00:1::1"), 1, 100.0, True, pci_path)


def test_hardware_of_a_machine_with_one_node_is_on_that_one(tmp_path: Path) -> None:
    topology = laptop(tmp_path).topology()
    assert [(nic.name, nic.numa_node, nic.is_up) for nic in topology.nics] == [
        ("enp0s31f6", 0, False),
        ("lo", UNKNOWN_NODE, True),
        ("wlp0s20f3", 0, True),
    ]
    assert topology.nics[1].kind == LOOPBACK
    assert [(gpu.numa_node, gpu.pci_address) for gpu in topology.gpus] == [(0, "0000:01:00.0")]


def test_a_veth_is_a_nic_only_with_an_address(tmp_path: Path) -> None:
    machine = Machine(tmp_path, [[10]])
    machine.interface("rail0", "10.77.0.1", speed="10000")
    machine.interface("veth1", speed="10000")
    assert nics(machine) == {"rail0": Nic("rail0", ETHERNET, "rail0", ("10.77.0.1",))}


def bond(machine: Machine, *numa: int) -> None:
    devices = []
    for index, node in enumerate(numa):
        device = machine.pci(f"pci0000:17/0000:17:00.0/0000:18:00.{index}", numa=node)
        machine.interface(f"eth{index}", device=device, speed="25000")
        devices.append(f"eth{index}")
    machine.interface("bond0", speed="50000", lower=devices)
    machine.interface("bond0.7", "10.0.0.1", speed="50000", lower=["bond0"])


def test_a_vlan_over_a_bond_is_where_the_bonds_devices_are(tmp_path: Path) -> None:
    machine = Machine(tmp_path, [[10, 20], [20, 10]])
    bond(machine, 1, 1)
    found = nics(machine)
    assert found["bond0.7"] == Nic("bond0.7", ETHERNET, "bond0.7", ("10.0.0.1",), 1, 50.0)
    assert not found["eth0"].is_usable
    assert found["eth0"].pci_path == f"{BOND_PCI}"


def test_a_bridge_over_hardware_is_kept_and_is_where_that_is(tmp_path: Path) -> None:
    machine = Machine(tmp_path, [[10, 20], [20, 10]])
    machine.interface("eth0", device=machine.pci(BOND_PCI, numa=1), speed="1000")
    machine.interface("br0", "10.0.0.1", speed="1000", lower=["eth0"])
    machine.path("devices/virtual/net/br0/bridge").mkdir()
    assert nics(machine)["br0"] == Nic("br0", ETHERNET, "br0", ("10.0.0.1",), 1, 1.0, True, BOND_PCI)


def test_interfaces_missing_in_sysfs_are_nics_by_netlink(tmp_path: Path) -> None:
    machine = Machine(tmp_path, [[10]])
    machine.interface("eth0", "10.0.0.1", device=machine.pci(BOND_PCI), speed="1000")
    machine.interfaces["eth0"] = replace(machine.interfaces["eth0"], index=77)  # the eth0 of another network namespace
    machine.interfaces["eth1"] = Interface(78, False, ("10.0.1.1",))
    machine.interfaces["lo"] = Interface(1, True, ("127.0.0.1",))
    machine.interfaces["veth1"] = Interface(79)
    assert nics(machine) == {
        "eth0": Nic("eth0", ETHERNET, "eth0", ("10.0.0.1",)),
        "eth1": Nic("eth1", ETHERNET, "eth1", ("10.0.1.1",), is_up=False),
        "lo": Nic("lo", LOOPBACK, "lo", ("127.0.0.1",)),
    }


def test_the_ports_of_one_rdma_device_are_nics_of_their_own(tmp_path: Path) -> None:
    machine = Machine(tmp_path, [[10]])
    device = machine.pci(BOND_PCI)
    machine.rdma("mlx4_0", device, layer="InfiniBand", rate="56 Gb/sec (4X FDR)", state="1: DOWN", ports=2)
    machine.interface("ib0", "10.0.0.1", device=device, kind=32)
    machine.interface("ib1", "10.0.1.1", device=device, kind=32)
    machine.write(f"{device}/net/ib1/dev_port", "1")
    found = nics(machine)
    assert {name: (nic.interface, nic.addresses, nic.is_up, nic.speed_gbit_s) for name, nic in found.items()} == {
        "mlx4_0:1": ("ib0", ("10.0.0.1",), False, 56.0),
        "mlx4_0:2": ("ib1", ("10.0.1.1",), False, 56.0),
    }


def test_an_rdma_port_of_another_namespace_has_no_interface(tmp_path: Path) -> None:
    machine = Machine(tmp_path, [[10]])
    machine.rdma("mlx5_0", machine.pci(BOND_PCI), layer="Ethernet", rate="25 Gb/sec (1X EDR)", interface="eth9")
    machine.rdma("mlx5_1", "", layer="InfiniBand", rate="", interface="")
    found = nics(machine)
    assert (found["mlx5_0"].interface, found["mlx5_0"].addresses, found["mlx5_0"].kind) == ("", (), ROCE)
    assert (found["mlx5_1"].interface, found["mlx5_1"].speed_gbit_s, found["mlx5_1"].numa_node) == ("", 0.0, UNKNOWN_NODE)


def test_nvml_gpus_are_located_on_the_pci_bus(tmp_path: Path) -> None:
    machine = dgx(tmp_path)
    named = [FoundGpu(1, "H100", "00000000:2A:00.0"), FoundGpu(0, "H100", "00000000:19:00.0"), FoundGpu(2, "A2", "00010000:FF:00.0")]
    gpus = read_machine(tmp_path, machine.interfaces, named).gpus
    assert [(gpu.index, gpu.name, gpu.numa_node, gpu.pci_address) for gpu in gpus] == [
        (0, "H100", 0, "0000:19:00.0"),
        (1, "H100", 0, "0000:2a:00.0"),
        (2, "A2", UNKNOWN_NODE, "10000:ff:00.0"),
    ]


def test_this_machine_is_looked_at_and_a_file_overrides_it(tmp_path: Path) -> None:
    found = Discovery.configured(TransferSettings()).read_topology()
    assert [nic.kind for nic in found.nics if nic.name == "lo"] == [LOOPBACK]
    assert found.rails("")
    path = tmp_path / "topology.json"
    path.write_text('{"cuda:7": [["lo"], []]}')
    assert Discovery.configured(TransferSettings(topology=str(path))).read_topology().preferred("cuda:7") == (("lo",), ())
    path.write_text('{"cpu:0": [["mlx5_9"], []]}')
    with pytest.raises(ConfigError, match="there is no NIC 'mlx5_9'"):
        Discovery.configured(TransferSettings(topology=str(path)))
    with pytest.raises(ConfigError, match="cannot read"):
        Discovery.configured(TransferSettings(topology=str(tmp_path / "nowhere")))


SOME_LIBRARY = "libc.so.6"
"""In place of the driver's: one that is there."""


class Nvml(ModuleType):
    """pynvml of a machine with two GPUs, whose calls can be made to fail: no machine with GPUs is needed."""

    class NVMLError(Exception):
        """As pynvml's."""

    def __init__(self, fails: str = "", name: str | bytes = "H100") -> None:
        super().__init__("pynvml")
        self.fails, self.name = fails, name
        self.is_open = False

    def _maybe_fail(self, call: str) -> None:
        if self.fails == call:
            raise self.NVMLError(call)

    def nvmlInit(self) -> None:  # noqa: N802
        self._maybe_fail("init")
        self.is_open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_open = False
        self._maybe_fail("shutdown")

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        self._maybe_fail("handle")
        return index

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:  # noqa: N802
        return self.name

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:  # noqa: N802
        return type("PciInfo", (), {"busId": b"00000000:19:00.%d" % handle})


@pytest.mark.parametrize("name", ["H100", b"H100"])
@pytest.mark.parametrize("fails", ["", "shutdown"])
def test_nvml_names_the_gpus(fails: str, name: str | bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml(fails, name)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert nvml_gpus(SOME_LIBRARY) == [FoundGpu(0, "H100", "00000000:19:00.0"), FoundGpu(1, "H100", "00000000:19:00.1")]
    assert not nvml.is_open


@pytest.mark.parametrize("fails", ["init", "handle"])
def test_nvml_that_does_not_answer_is_as_good_as_none(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml(fails)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert nvml_gpus(SOME_LIBRARY) is None
    assert not nvml.is_open


def test_without_the_module_of_nvml_there_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml_gpus(SOME_LIBRARY) is None
