"""Discovery of this host's topology: interfaces from netlink, hardware from sysfs, GPUs from NVML (else from PCI).

sysfs is read below a root, so that tests can supply another machine's. Missing files and refused reads mean unknown,
never an error: containers often see half of /sys.
"""

import contextlib
import ctypes
import importlib
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from kvstore.transfer.config import TransferSettings
from kvstore.transfer.topology.json_form import Override, override_from_file
from kvstore.transfer.topology.model import ETHERNET, INFINIBAND, LOOPBACK, ROCE, UNKNOWN_NODE, Gpu, Nic, NumaNode, Topology
from kvstore.transfer.topology.netlink import Interface, read_interfaces

ROOT: Final = Path("/")
ARPHRD_INFINIBAND: Final = 32
ARPHRD_LOOPBACK: Final = 772
PCI_VENDOR_NVIDIA: Final = "0x10de"
PCI_CLASSES_GPU: Final = ("0x0300", "0x0302")
"""VGA controller and 3D controller: the first four hex digits of a PCI class."""
PORT_ACTIVE: Final = "4"
"""InfiniBand's port state ACTIVE, the only one that carries data."""
NVML_LIBRARY: Final = "libnvidia-ml.so.1"
"""Part of NVIDIA's driver; loaded by pynvml."""
MAX_STACK: Final = 4
"""Depth to which virtual devices are followed to hardware: a bridge over a VLAN over a bond is three."""
_PCI_PART: Final = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}|[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True, slots=True, order=True)
class FoundGpu:
    """A GPU by NVML: its index, name, and PCI address as NVML writes it, "00000000:17:00.0"."""

    index: int
    name: str
    pci_address: str


@dataclass(frozen=True, slots=True)
class _DeviceLocation:
    """PCI path and NUMA node of a device; the defaults for a virtual one."""

    pci_path: str = ""
    numa_node: int = UNKNOWN_NODE


class Discovery:
    """Reads this machine's topology and applies an operator's override. Thread-safe."""

    def __init__(self, override: Override | None = None) -> None:
        """Queries NVML once: GPUs change with the driver, not with links."""
        self._override = override
        self._gpus = nvml_gpus()

    @classmethod
    def configured(cls, settings: TransferSettings) -> "Discovery":
        """Return a Discovery with the override that the setting `topology` names.

        Raises ConfigError for a file that is unreadable, malformed or names an unknown NIC, and Broken as
        `read_topology`.
        """
        if not settings.topology:
            return cls()
        override = override_from_file(settings.topology)
        discovery = cls(override)
        override.check(discovery.read_topology())
        return discovery

    def read_topology(self) -> Topology:
        """Return the current topology. Raises Broken if the network interfaces cannot be read."""
        found = read_machine(ROOT, read_interfaces(), self._gpus)
        return self._override.apply(found) if self._override is not None else found


def read_machine(root: Path, interfaces: Mapping[str, Interface], gpus: Sequence[FoundGpu] | None) -> Topology:
    """Return the topology of the machine whose sysfs is below `root`. Without `gpus`, PCI is searched for them."""
    nodes = _numa_nodes(root)
    only_node = nodes[0].number if len(nodes) == 1 else UNKNOWN_NODE
    nics = [_with_node(nic, only_node) for nic in _nics(root, interfaces)]
    found = _gpus(root, _pci_gpus(root) if gpus is None else gpus)
    return Topology(socket.gethostname(), tuple(nodes), tuple(nics), tuple(replace(gpu, numa_node=_node(gpu, only_node)) for gpu in found))


def _with_node(nic: Nic, only_node: int) -> Nic:
    return replace(nic, numa_node=_node(nic, only_node))


def _node(device: Nic | Gpu, only_node: int) -> int:
    """Return the device's NUMA node. Firmware of single-node machines often names none: hardware is then on that node."""
    return only_node if device.numa_node == UNKNOWN_NODE and device.pci_path else device.numa_node


# --- NUMA nodes ---


def _numa_nodes(root: Path) -> list[NumaNode]:
    found = []
    for path in _entries(root / "sys/devices/system/node"):
        number = path.name.removeprefix("node")
        if path.name.startswith("node") and number.isdecimal():
            found.append(NumaNode(int(number), tuple(int(word) for word in _read(path / "distance").split() if word.isdecimal())))
    return sorted(found, key=lambda node: node.number)


# --- NICs ---


def _nics(root: Path, interfaces: Mapping[str, Interface]) -> list[Nic]:
    """Return RDMA ports with their interfaces, and the other interfaces, by name."""
    found = list(_rdma_nics(root, interfaces))
    taken = {nic.interface for nic in found}
    for name, interface in interfaces.items():
        if name not in taken and (nic := _interface_nic(root, name, interface)) is not None:
            found.append(nic)
    return sorted(found, key=lambda nic: nic.name)


def _rdma_nics(root: Path, interfaces: Mapping[str, Interface]) -> Iterator[Nic]:
    for device in _entries(root / "sys/class/infiniband"):
        ports = _entries(device / "ports")
        for port in ports:
            is_ethernet = _read(port / "link_layer") == "Ethernet"
            interface = _rdma_interface(device, port)
            # Software RoCE has no hardware: it is located at its interface.
            location = (
                _interface_location(device, 0) or _interface_location(root / "sys/class/net" / interface, MAX_STACK) or _DeviceLocation()
            )
            addresses = interfaces[interface].addresses if interface in interfaces else ()
            yield Nic(
                device.name if len(ports) == 1 else f"{device.name}:{port.name}",
                ROCE if is_ethernet else INFINIBAND,
                interface if interface in interfaces else "",
                addresses,
                location.numa_node,
                _leading_number(_read(port / "rate")),
                _read(port / "state").partition(":")[0] == PORT_ACTIVE,
                location.pci_path,
            )


def _rdma_interface(device: Path, port: Path) -> str:
    """Return the interface of a port: the one of its first GID, else the device's with the port's number."""
    if name := _read(port / "gid_attrs/ndevs/0"):
        return name
    for interface in _entries(device / "device/net"):
        if _leading_number(_read(interface / "dev_port") or "0") + 1 == _leading_number(port.name):
            return interface.name
    return ""


def _interface_nic(root: Path, name: str, interface: Interface) -> Nic | None:
    """Return the NIC, or None for interfaces that lead nowhere: virtual devices without an address, and bridges without
    hardware (docker0, cni0).
    """
    path = root / "sys/class/net" / name
    if _read(path / "ifindex") != str(interface.index):  # /sys belongs to another network namespace, or is missing
        kind = LOOPBACK if name == "lo" else ETHERNET
        return Nic(name, kind, name, interface.addresses, is_up=interface.is_up) if interface.addresses else None
    location = _interface_location(path, MAX_STACK)
    hardware_type = _leading_number(_read(path / "type"))
    is_loopback = hardware_type == ARPHRD_LOOPBACK
    if location is None and not is_loopback and (not interface.addresses or (path / "bridge").is_dir()):
        return None
    kind = LOOPBACK if is_loopback else INFINIBAND if hardware_type == ARPHRD_INFINIBAND else ETHERNET
    # A virtual device without hardware reports a constant of its driver: 10 Gbit/s for a veth, 10 Mbit/s for a tap.
    speed_mbit_s = _leading_number(_read(path / "speed")) if location is not None else 0.0
    location = location or _DeviceLocation()
    return Nic(name, kind, name, interface.addresses, location.numa_node, speed_mbit_s / 1000, interface.is_up, location.pci_path)


def _interface_location(path: Path, depth: int) -> _DeviceLocation | None:
    """Return the location of the hardware behind an interface or RDMA device, None without hardware. A bond of several
    has no PCI path.
    """
    if (path / "device").exists():
        return _location_of(path / "device")
    if not depth:
        return None
    lower = (_interface_location(entry, depth - 1) for entry in _entries(path) if entry.name.startswith("lower_"))
    places = {location for location in lower if location is not None}
    if not places:
        return None
    nodes = {location.numa_node for location in places}
    return next(iter(places)) if len(places) == 1 else _DeviceLocation("", nodes.pop() if len(nodes) == 1 else UNKNOWN_NODE)


def _location_of(device: Path) -> _DeviceLocation:
    """Return the PCI addresses on a device's real path, and the NUMA node of the nearest ancestor that names one."""
    path = device.resolve()
    parts = [part for part in path.parts if _PCI_PART.fullmatch(part)]
    for folder in (path, *path.parents):
        if text := _read(folder / "numa_node"):
            return _DeviceLocation("/".join(parts), int(text) if text.isdecimal() else UNKNOWN_NODE)
    return _DeviceLocation("/".join(parts))


# --- GPUs ---


def _gpus(root: Path, found: Sequence[FoundGpu]) -> Iterator[Gpu]:
    for gpu in sorted(found):
        location = _location_of(root / "sys/bus/pci/devices" / _sysfs_address(gpu.pci_address))
        yield Gpu(gpu.index, gpu.name, location.numa_node, location.pci_path)


def _sysfs_address(address: str) -> str:
    """Convert NVML's PCI address (eight-digit domain, capitals) to sysfs's (four digits if they suffice)."""
    domain, _, rest = address.lower().partition(":")
    return f"{domain.lstrip('0'):0>4}:{rest}"


def _pci_gpus(root: Path) -> list[FoundGpu]:
    """Return NVIDIA's display and 3D controllers, including virtual ones and those of other drivers."""
    devices = [
        path
        for path in _entries(root / "sys/bus/pci/devices")
        if _read(path / "vendor") == PCI_VENDOR_NVIDIA and _read(path / "class")[:6] in PCI_CLASSES_GPU
    ]
    return [FoundGpu(index, f"NVIDIA {_read(path / 'device')}", path.name) for index, path in enumerate(devices)]


def nvml_gpus(library: str = NVML_LIBRARY) -> list[FoundGpu] | None:
    """Return the GPUs of NVIDIA's driver; None if pynvml (nvidia-ml-py) or the driver is missing or does not respond.

    The driver is checked first: importing the module takes 17 ms of processor time, and far longer from a cold disk.
    """
    try:
        ctypes.CDLL(library)
    except OSError:
        return None
    try:
        pynvml: Any = importlib.import_module("pynvml")  # optional: not needed without GPUs
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handles = [(index, pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(pynvml.nvmlDeviceGetCount())]
        return [FoundGpu(i, _text(pynvml.nvmlDeviceGetName(gpu)), _text(pynvml.nvmlDeviceGetPciInfo(gpu).busId)) for i, gpu in handles]
    except pynvml.NVMLError:
        return None
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    """Decode NVML's strings, which are bytes in older releases of its module."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


# --- files ---


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _read(path: Path) -> str:
    """Return the stripped text of a small file; "" if it cannot be read. sysfs fails with EINVAL for unavailable
    values.
    """
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _leading_number(text: str) -> float:
    """ "400 Gb/sec (4X NDR)" is 400, "-1" and "" are 0: unknown."""
    match = re.match(r"\d+(\.\d+)?", text)
    return float(match[0]) if match else 0.0
