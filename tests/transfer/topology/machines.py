"""Machines as sysfs shows them, built in a folder from a compact description, and three that stand for many.

Only what discovery reads is there, with the links between folders that a real /sys has. The devices' names and places follow what such
machines show; no file was copied from one.
"""

from collections.abc import Sequence
from pathlib import Path

from kvstore.transfer.topology.discovery import read_machine
from kvstore.transfer.topology.model import Topology
from kvstore.transfer.topology.netlink import Interface


class Machine:
    """A sysfs below `root`, and the interfaces that netlink would report."""

    def __init__(self, root: Path, numa_distances: Sequence[Sequence[int]]) -> None:
        self.root = root
        self.interfaces: dict[str, Interface] = {}
        for number, distances in enumerate(numa_distances):
            self.write(f"devices/system/node/node{number}/distance", " ".join(map(str, distances)))
        self.write("devices/system/node/online", f"0-{len(numa_distances) - 1}")

    def topology(self) -> Topology:
        return read_machine(self.root, self.interfaces, None)

    def path(self, name: str) -> Path:
        return self.root / "sys" / name

    def write(self, name: str, text: str) -> None:
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    def link(self, name: str, target: str) -> None:
        """A symbolic link from one place of the tree to another, relative, as the kernel makes them."""
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        up = "../" * (len(path.relative_to(self.root / "sys").parts) - 1)
        path.symlink_to(up + target)

    def pci(self, path: str, *, numa: int = -1, vendor: str = "0x8086", device: str = "0x1234", kind: str = "0x020000") -> str:
        """A PCI device at `path` ("pci0000:00/0000:00:01.0/..."), by default some Ethernet controller; its folder."""
        folder, address = f"devices/{path}", path.rpartition("/")[2]
        for name, text in (("numa_node", str(numa)), ("vendor", vendor), ("device", device), ("class", kind)):
            self.write(f"{folder}/{name}", text)
        self.link(f"bus/pci/devices/{address}", folder)
        return folder

    def gpu(self, path: str, *, numa: int = -1, kind: str = "0x030200") -> None:
        self.pci(path, numa=numa, vendor="0x10de", device="0x2330", kind=kind)

    def interface(
        self, name: str, *addresses: str, device: str = "", speed: str = "-1", is_up: bool = True, kind: int = 1, lower: Sequence[str] = ()
    ) -> None:
        """A network interface: of the device whose folder is named, or virtual, possibly on top of others."""
        folder = f"{device}/net/{name}" if device else f"devices/virtual/net/{name}"
        index = len(self.interfaces) + 1
        for file, text in (("ifindex", str(index)), ("speed", speed), ("type", str(kind)), ("dev_port", "0")):
            self.write(f"{folder}/{file}", text)
        self.link(f"class/net/{name}", folder)
        if device:
            self.link(f"{folder}/device", device)
        for other in lower:
            self.link(f"{folder}/lower_{other}", f"class/net/{other}")
        self.interfaces[name] = Interface(index, is_up, addresses)

    def rdma(self, name: str, device: str, *, layer: str, rate: str, state: str = "4: ACTIVE", ports: int = 1, interface: str = "") -> None:
        """An RDMA device of the PCI device whose folder is named ("": in software)."""
        folder = f"{device}/infiniband/{name}" if device else f"devices/virtual/infiniband/{name}"
        for port in range(1, ports + 1):
            for file, text in (("link_layer", layer), ("rate", rate), ("state", state)):
                self.write(f"{folder}/ports/{port}/{file}", text)
            if interface:
                self.write(f"{folder}/ports/{port}/gid_attrs/ndevs/0", interface)
        self.link(f"class/infiniband/{name}", folder)
        if device:
            self.link(f"{folder}/device", device)

    def loopback(self) -> None:
        self.interface("lo", "127.0.0.1", "::1", kind=772)


def dgx(root: Path) -> Machine:
    """Two sockets; below each four PCI switches, with a GPU and an InfiniBand NIC of 400 Gbit/s each; one Ethernet NIC for management.

    InfiniBand has no IP address; the GPUs' order is that of their PCI addresses.
    """
    machine = Machine(root, [[10, 21], [21, 10]])
    machine.loopback()
    for index, bus in enumerate((0x15, 0x26, 0x3D, 0x4F, 0x97, 0xA7, 0xB9, 0xCB)):
        numa = index // 4
        switch = f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0"
        device = machine.pci(f"{switch}/0000:{bus + 2:02x}:00.0/0000:{bus + 3:02x}:00.0", numa=numa, vendor="0x15b3")
        machine.interface(f"ibp{bus + 3}s0", device=device, kind=32)
        machine.rdma(f"mlx5_{index}", device, layer="InfiniBand", rate="400 Gb/sec (4X NDR)", interface=f"ibp{bus + 3}s0")
        machine.gpu(f"{switch}/0000:{bus + 2:02x}:01.0/0000:{bus + 4:02x}:00.0", numa=numa)
    management = machine.pci("pci0000:00/0000:00:1c.0/0000:01:00.0", numa=0)
    machine.interface("eno1", "10.9.0.1", device=management, speed="10000")
    return machine


def server(root: Path) -> Machine:
    """Two sockets with a RoCE NIC of 100 Gbit/s each, and a container engine's bridge."""
    machine = Machine(root, [[10, 20], [20, 10]])
    machine.loopback()
    for index, bus in enumerate((0x17, 0xB1)):
        device = machine.pci(f"pci0000:{bus:02x}/0000:{bus:02x}:00.0/0000:{bus + 1:02x}:00.0", numa=index, vendor="0x15b3")
        name = f"ens{index + 1}f0np0"
        machine.interface(name, f"10.0.{index}.1", f"fd00:{index}::1", device=device, speed="100000")
        machine.rdma(f"mlx5_{index}", device, layer="Ethernet", rate="100 Gb/sec (4X EDR)", interface=name)
    machine.interface("veth5f1c", speed="10000")
    machine.interface("docker0", "172.17.0.1", speed="10000", lower=["veth5f1c"])
    machine.path("devices/virtual/net/docker0/bridge").mkdir()
    return machine


def laptop(root: Path) -> Machine:
    """One NUMA node that no device names, Wi-Fi of unknown speed, Ethernet without a cable, a GPU that drives the screen."""
    machine = Machine(root, [[10]])
    machine.loopback()
    machine.interface("wlp0s20f3", "192.168.1.7", device=machine.pci("pci0000:00/0000:00:14.3"))
    machine.interface("enp0s31f6", device=machine.pci("pci0000:00/0000:00:1f.6", vendor="0x8086"), is_up=False)
    machine.gpu("pci0000:00/0000:00:01.0/0000:01:00.0", kind="0x030000")
    return machine
