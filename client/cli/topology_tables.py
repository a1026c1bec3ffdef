"""Topologies for human eyes: rich tables of NICs, GPUs and the matrix. Pure.

Cells are Text: rich would take the ":ab:" of a PCI address for an emoji.
"""

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvstore.client.cli.topology_drawing import Subject, speed
from kvstore.transfer.topology.model import UNKNOWN_NODE, Topology


def topology_view(subject: Subject) -> RenderableType:
    """One host: a headline, its NICs, its GPUs if any, and which rails are near which memory."""
    topology = subject.topology
    if topology is None:
        return Group(Text(subject.title, style="bold"), Text(f"  {subject.note}", style="red"), Text())
    counts = (("NUMA node", topology.numa_nodes), ("NIC", topology.nics), ("GPU", topology.gpus))
    headline = ", ".join(f"{len(found)} {noun}{'s' if len(found) != 1 else ''}" for noun, found in counts)
    parts: list[RenderableType] = [Text.assemble((subject.title, "bold"), f"  {headline}"), _indented(_nics(topology))]
    if topology.gpus:
        parts.append(_indented(_gpus(topology)))
    return Group(*parts, _indented(_matrix(topology)), Text())


def _indented(table: Table) -> Padding:
    return Padding(table, (1, 0, 0, 2), expand=False)


def _table(*names: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in names:
        table.add_column(name, overflow="fold", justify="right" if name in ("speed", "NUMA") else "left")
    return table


def _node(number: int) -> str:
    return "-" if number == UNKNOWN_NODE else str(number)


def _nics(topology: Topology) -> Table:
    table = _table("NIC", "interface", "kind", "link", "speed", "NUMA", "PCI", "addresses")
    for nic in topology.nics:
        link = Text("up", style="green") if nic.is_up else Text("down", style="red")
        carries = speed(nic) if nic.speed_gbit_s else "-"
        row = (carries, _node(nic.numa_node), nic.pci_address or "-", ", ".join(nic.addresses))
        table.add_row(*map(Text, (nic.name, nic.interface or "-", nic.kind)), link, *map(Text, row))
    return table


def _gpus(topology: Topology) -> Table:
    table = _table("GPU", "name", "NUMA", "PCI")
    for gpu in topology.gpus:
        table.add_row(*map(Text, (f"cuda:{gpu.index}", gpu.name, _node(gpu.numa_node), gpu.pci_address or "-")))
    return table


def _matrix(topology: Topology) -> Table:
    table = _table("memory", "preferred rails", "available rails")
    for location, rails in topology.matrix.items():
        table.add_row(*map(Text, (location, ", ".join(rails.preferred) or "-", ", ".join(rails.available) or "-")))
    return table
