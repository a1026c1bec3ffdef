"""Topology of a host: NUMA nodes, NICs, GPUs, and the matrix of preferred NICs by location of memory. Pure;
discovery.py and json_form.py create it.

The matrix has the form of Mooncake's: for each location of memory ("cpu:0", "cuda:0") the preferred rails and the other
available ones. A NIC is a rail while it is up and reachable: it has an IP address, or supports RDMA, which needs none.
The loopback is a rail only if there is no other. Source: Mooncake's Transfer Engine (FAST'25) for the form and the rule
of the nearest NIC by PCI distance.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvstore.protocol.errors import ConfigError

INFINIBAND: Final = "infiniband"
ROCE: Final = "roce"
ETHERNET: Final = "ethernet"
LOOPBACK: Final = "loopback"
KINDS: Final = (INFINIBAND, ROCE, ETHERNET, LOOPBACK)
RDMA_KINDS: Final = (INFINIBAND, ROCE)

UNKNOWN_NODE: Final = -1
"""NUMA node of a device without one, such as a virtual one."""
NUMA_LOCAL: Final = 10
"""Distance of a NUMA node to itself in ACPI (SLIT) and Linux."""
NUMA_UNKNOWN: Final = 255
"""SLIT's distance of unreachable nodes, used for missing entries."""
PCI_APART: Final = 1000
"""Distance of devices without a common bridge: the path leads through the processor. Real trees are a few bridges deep."""
LOCATION: Final = re.compile(r"(cpu|cuda):(\d{1,4})")


@dataclass(frozen=True, slots=True)
class Nic:
    """A port of a network adapter.

    `name` is the RDMA device's ("mlx5_0"; "mlx4_0:2" for a device with several ports) if it has one, else the
    interface's ("eth0"). `interface` is the IP interface, "" if there is none. `addresses` are its IP addresses without
    link-local ones, IPv4 first. `numa_node` is UNKNOWN_NODE and `speed_gbit_s` 0 for virtual devices. `pci_path` leads
    from the root complex to the device, "pci0000:00/0000:00:01.0/0000:01:00.0", "" for virtual ones.
    """

    name: str
    kind: str = ETHERNET
    interface: str = ""
    addresses: tuple[str, ...] = ()
    numa_node: int = UNKNOWN_NODE
    speed_gbit_s: float = 0.0
    is_up: bool = True
    pci_path: str = ""

    @property
    def pci_address(self) -> str:
        """ "0000:01:00.0", "" for a virtual one."""
        return self.pci_path.rpartition("/")[2]

    @property
    def is_usable(self) -> bool:
        """True if it can be a rail: up, and with an address or RDMA."""
        return self.is_up and (bool(self.addresses) or self.kind in RDMA_KINDS)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU. `index` is NVML's, by PCI address; CUDA has the same order only with CUDA_DEVICE_ORDER=PCI_BUS_ID."""

    index: int
    name: str = ""
    numa_node: int = UNKNOWN_NODE
    pci_path: str = ""

    @property
    def pci_address(self) -> str:
        return self.pci_path.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A NUMA node. `distances` to the host's nodes, in their order in the topology; empty if unknown."""

    number: int
    distances: tuple[int, ...] = ()


class RailPreference(NamedTuple):
    """NICs for one location of memory: the preferred ones by name, the other available ones by distance."""

    preferred: tuple[str, ...]
    available: tuple[str, ...]


Matrix = Mapping[str, RailPreference]
"""By location, "cpu:N" or "cuda:N"."""


@dataclass(frozen=True, slots=True)
class Topology:
    """Topology of a host. `override` replaces the matrix's entries for the locations that it names, as far as its NICs
    are usable.
    """

    host: str
    numa_nodes: tuple[NumaNode, ...] = ()
    nics: tuple[Nic, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    override: Matrix = field(default_factory=dict)
    matrix: Matrix = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "matrix", _matrix(self))  # frozen; computed once, as transfers use it

    def preferred(self, location: str) -> RailPreference:
        """Return the rails for memory at `location`; all are equal for an unknown location."""
        found = self.matrix.get(location)
        return found if found is not None else RailPreference(tuple(sorted(nic.name for nic in self.usable())), ())

    def usable(self) -> list[Nic]:
        """Return the NICs that can be rails now; the loopback only if there is no other."""
        usable = [nic for nic in self.nics if nic.is_usable]
        return [nic for nic in usable if nic.kind != LOOPBACK] or usable

    def rails(self, names: str) -> list[Nic]:
        """Return the NICs in the comma-separated list `names`, up or down, without duplicates; "" is `usable()`.

        A NIC is named by its own name or its interface's. Raises ConfigError for an unknown name.
        """
        wanted = [name.strip() for name in names.split(",") if name.strip()]
        return list(dict.fromkeys(map(self._named, wanted))) if wanted else self.usable()

    def _named(self, name: str) -> Nic:
        for nic in self.nics:
            if name in (nic.name, nic.interface):
                return nic
        raise ConfigError(f"rails names {name!r}, but this machine's NICs are: {', '.join(nic.name for nic in self.nics) or 'none'}")

    def numa_distance(self, one: int, other: int) -> int:
        """Return the distance of two NUMA nodes by the firmware's table; NUMA_LOCAL for a node and itself."""
        if one == other:
            return NUMA_LOCAL
        numbers = [node.number for node in self.numa_nodes]
        if one not in numbers or other not in numbers:
            return NUMA_UNKNOWN
        distances = self.numa_nodes[numbers.index(one)].distances
        at = numbers.index(other)
        return distances[at] if at < len(distances) else NUMA_UNKNOWN


def pci_distance(one: str, other: str) -> int:
    """Return the hops between two PCI paths through their closest common bridge; PCI_APART if they share none.

    A path of "" (a virtual device) shares none.
    """
    here, there = one.split("/"), other.split("/")
    common = 0
    for mine, yours in zip(here, there, strict=False):
        if mine != yours or not mine:
            break
        common += 1
    return len(here) + len(there) - 2 * common if common else PCI_APART


def _matrix(topology: Topology) -> Matrix:
    usable = topology.usable()
    computed = {f"cpu:{node.number}": _rank_rails(topology, usable, node.number) for node in topology.numa_nodes}
    computed |= {f"cuda:{gpu.index}": _rank_rails(topology, usable, gpu.numa_node, gpu.pci_path) for gpu in topology.gpus}
    names = {nic.name for nic in topology.nics if nic.is_usable}
    for location, rails in topology.override.items():
        kept = RailPreference(*(tuple(name for name in part if name in names) for part in rails))
        if any(kept) or location not in computed:
            computed[location] = kept
    return computed


def _rank_rails(topology: Topology, usable: Sequence[Nic], numa_node: int, pci_path: str = "") -> RailPreference:
    """Prefer the NICs of the nearest NUMA node that has any, and those on no node; among them, for a GPU, the nearest
    by PCI.
    """
    by_numa = {
        nic.name: topology.numa_distance(numa_node, nic.numa_node) for nic in usable if UNKNOWN_NODE not in (numa_node, nic.numa_node)
    }
    nearest = min(by_numa.values(), default=NUMA_LOCAL)
    # A NIC of unknown node counts as near as the nearest: it may be that one, behind a virtual device.
    distances = {nic.name: (by_numa.get(nic.name, nearest), pci_distance(pci_path, nic.pci_path) if pci_path else 0) for nic in usable}
    best = min(distances.values(), default=None)
    order = sorted(distances, key=lambda name: (distances[name], name))
    return RailPreference(
        tuple(name for name in order if distances[name] == best), tuple(name for name in order if distances[name] != best)
    )
