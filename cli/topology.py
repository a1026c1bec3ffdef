"""The command `topology`: NUMA nodes, NICs, GPUs and preferred rails of hosts, as tables or an SVG drawing.

The drawing has a panel per host and in it a box per NUMA node: memory (processor, GPUs) on the left, NICs on the right. Lines connect
memory with its preferred rails. The middle of a box is empty, so that lines to another node's NICs cross only lines.
"""

import math
import socket
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

import click
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvstore.cli.options import client_options, console, echo_json, json_option
from kvstore.cli.tools.tables import new_table
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import ConfigError, InvalidArgument, ProtocolError
from kvstore.protocol.settings import load_settings
from kvstore.transfer.config import SECTION, TransferSettings
from kvstore.transfer.topology.discovery import Discovery
from kvstore.transfer.topology.json_form import as_json as topology_as_json
from kvstore.transfer.topology.json_form import parse_topology
from kvstore.transfer.topology.model import RDMA_KINDS, UNKNOWN_NODE, Nic, Topology

MAX_COLUMNS: Final = 3
WIDTH: Final = 720
"""Width of a panel, in pixels like all lengths here."""
MARGIN: Final = 16
CARD_HEIGHT: Final = 40
ROW: Final = 48
MEMORY_WIDTH: Final = 190
NIC_WIDTH: Final = 290
TITLE_HEIGHT: Final = 44
BOX_TITLE_HEIGHT: Final = 28
LEGEND_HEIGHT: Final = 36
CHARACTER_WIDTH: Final = 6.9
"""Average width of a character of the small text; longer texts are truncated."""

_STYLE: Final = """
svg { --ground: #ffffff; --panel: #f6f7f9; --box: #ffffff; --edge: #c5cbd4; --text: #1b2430; --soft: #566170; --down: #c02b22;
  --cpu: #8791a0; --gpu: #2a6fb8; --rdma: #1f7a4d; --plain: #77654a; background: var(--ground); font-family: system-ui, sans-serif; }
@media (prefers-color-scheme: dark) {
  svg { --ground: #14181e; --panel: #1b2129; --box: #222a34; --edge: #46515f; --text: #e8ecf1; --soft: #a3aebb; --down: #ff8278;
    --cpu: #808c9b; --gpu: #6db1f2; --rdma: #56c48d; --plain: #c9ae82; } }
.ground { fill: var(--ground); } .panel { fill: var(--panel); stroke: var(--edge); } .box { fill: none; stroke: var(--edge); }
.card { fill: var(--box); stroke: var(--edge); } .card.down { stroke: var(--down); stroke-dasharray: 5 4; }
text { fill: var(--text); font-size: 13px; } .title { font-size: 16px; font-weight: 600; } .name { font-weight: 600; }
.soft { fill: var(--soft); font-size: 12px; } text.down { fill: var(--down); font-size: 12px; font-weight: 600; }
.end { text-anchor: end; }
path { fill: none; stroke-width: 1.6; } .cpu { stroke: var(--cpu); } .gpu { stroke: var(--gpu); stroke-width: 2.2; }
.kind { stroke: none; fill: var(--plain); } .kind.rdma { fill: var(--rdma); } .kind.off { fill: var(--down); }
"""


@dataclass(frozen=True, slots=True)
class HostPanel:
    """A host to be shown. `state` is its node's ("" for this machine). Without a topology `note` has the reason."""

    name: str
    topology: Topology | None
    state: str = ""
    note: str = ""

    @property
    def title(self) -> str:
        return self.name if self.state in ("", "alive") else f"{self.name} ({self.state})"


def topology_view(subject: HostPanel) -> RenderableType:
    """Return tables of one host: headline, NICs, GPUs, and the rails of each memory."""
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


def _numa(number: int) -> str:
    return "-" if number == UNKNOWN_NODE else str(number)


def _nics(topology: Topology) -> Table:
    table = new_table("NIC", "interface", "kind", "link", "speed", "NUMA", "PCI", "addresses", right=("speed", "NUMA"))
    for nic in topology.nics:
        link = Text("up", style="green") if nic.is_up else Text("down", style="red")
        carries = speed(nic) if nic.speed_gbit_s else "-"
        row = (carries, _numa(nic.numa_node), nic.pci_address or "-", ", ".join(nic.addresses))
        table.add_row(*map(Text, (nic.name, nic.interface or "-", nic.kind)), link, *map(Text, row))
    return table


def _gpus(topology: Topology) -> Table:
    table = new_table("GPU", "name", "NUMA", "PCI", right=("NUMA",))
    for gpu in topology.gpus:
        table.add_row(*map(Text, (f"cuda:{gpu.index}", gpu.name, _numa(gpu.numa_node), gpu.pci_address or "-")))
    return table


def _matrix(topology: Topology) -> Table:
    table = new_table("memory", "preferred rails", "available rails")
    for location, rails in topology.matrix.items():
        table.add_row(*map(Text, (location, ", ".join(rails.preferred) or "-", ", ".join(rails.available) or "-")))
    return table


def draw(subjects: Sequence[HostPanel]) -> str:
    """Return the SVG document, with one panel per host."""
    columns = max(1, min(MAX_COLUMNS, math.ceil(math.sqrt(len(subjects)))))
    panels = [_Panel(subject) for subject in subjects]
    parts, top = [], float(MARGIN)
    for begin in range(0, len(panels), columns):
        row = panels[begin : begin + columns]
        for column, panel in enumerate(row):
            x = MARGIN + column * (WIDTH + MARGIN)
            parts.append(f'<g transform="translate({x} {top:g})">\n{panel.text()}</g>\n')
        top += max(panel.height for panel in row) + MARGIN
    width, height = MARGIN + columns * (WIDTH + MARGIN), top + LEGEND_HEIGHT
    legend = "Lines lead from memory to its preferred rails. Dashed: the link is down. A green bar: RDMA; a red one: down."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:g}" viewBox="0 0 {width} {height:g}">\n'
        f'<style>{_STYLE}</style>\n<rect class="ground" width="100%" height="100%"/>\n'
        + "".join(parts)
        + _label(MARGIN, top + 14, legend, "soft")
        + "</svg>\n"
    )


@dataclass(slots=True)
class _Panel:
    """SVG panel of one host. Cards are laid out first, because lines lead to cards of later boxes."""

    subject: HostPanel
    height: float = field(init=False)
    _parts: list[str] = field(init=False, default_factory=list)
    _memory: dict[str, float] = field(init=False, default_factory=dict)
    """Location -> y of the middle of its card; `_nics` likewise by name."""
    _nics: dict[str, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.height = float(TITLE_HEIGHT)
        topology = self.subject.topology
        if topology is None:
            self._parts.append(_label(MARGIN, TITLE_HEIGHT + 8, _fit(self.subject.note, WIDTH - 2 * MARGIN), "soft"))
            self.height += 28
            return
        numbers = [node.number for node in topology.numa_nodes]
        for number in numbers:
            self._box(topology, f"NUMA node {number}", number, [number])
        others = {nic.numa_node for nic in topology.nics} | {gpu.numa_node for gpu in topology.gpus}
        if others := others.difference(numbers):
            self._box(topology, "on no NUMA node", UNKNOWN_NODE, others)
        self._lines(topology)

    def text(self) -> str:
        frame = f'<rect class="panel" width="{WIDTH}" height="{self.height:g}" rx="8"/>\n'
        return frame + _label(MARGIN, 28, _fit(self.subject.title, WIDTH - 2 * MARGIN), "title") + "".join(self._parts)

    def _box(self, topology: Topology, title: str, number: int, nodes: Collection[int]) -> None:
        top, left, right = self.height, 2 * MARGIN, WIDTH - 2 * MARGIN - NIC_WIDTH
        memory = [(f"cpu:{number}", "processor and its memory")] if number != UNKNOWN_NODE else []
        memory += [(f"cuda:{gpu.index}", gpu.name or gpu.pci_address) for gpu in topology.gpus if gpu.numa_node in nodes]
        nics = [nic for nic in topology.nics if nic.numa_node in nodes]
        height = BOX_TITLE_HEIGHT + ROW * max(len(memory), len(nics), 1)
        self._parts.append(f'<rect class="box" x="{MARGIN}" y="{top:g}" width="{WIDTH - 2 * MARGIN}" height="{height}" rx="6"/>\n')
        self._parts.append(_label(left, top + 19, title, "soft"))
        for index, (location, detail) in enumerate(memory):
            y = top + BOX_TITLE_HEIGHT + index * ROW
            self._memory[location] = y + CARD_HEIGHT / 2
            self._parts += [_card(left, y, MEMORY_WIDTH), _label(left + 12, y + 17, location, "name")]
            self._parts.append(_label(left + 12, y + 33, _fit(detail, MEMORY_WIDTH - 20), "soft"))
        for index, nic in enumerate(nics):
            y = top + BOX_TITLE_HEIGHT + index * ROW
            self._nics[nic.name] = y + CARD_HEIGHT / 2
            self._parts += _nic_card(nic, right, y)
        self.height += height + MARGIN

    def _lines(self, topology: Topology) -> None:
        begin, end = 2 * MARGIN + MEMORY_WIDTH, WIDTH - 2 * MARGIN - NIC_WIDTH
        middle = (begin + end) / 2
        for location, rails in topology.matrix.items():
            for name in rails.preferred:
                if location in self._memory:
                    y, to = self._memory[location], self._nics[name]
                    curve = f"M{begin} {y:g} C{middle:g} {y:g} {middle:g} {to:g} {end} {to:g}"
                    self._parts.append(f'<path class="{"gpu" if location.startswith("cuda") else "cpu"}" d="{curve}"/>\n')


def _nic_card(nic: Nic, x: float, y: float) -> Iterator[str]:
    yield _card(x, y, NIC_WIDTH, "" if nic.is_up else " down")
    kind = " off" if not nic.is_up else " rdma" if nic.kind in RDMA_KINDS else ""
    yield f'<rect class="kind{kind}" x="{x + 3:g}" y="{y + 6:g}" width="4" height="{CARD_HEIGHT - 12}" rx="2"/>\n'
    title = nic.name if nic.interface in ("", nic.name) else f"{nic.name} ({nic.interface})"
    yield _label(x + 14, y + 17, _fit(title, NIC_WIDTH - 110), "name")
    yield _label(x + NIC_WIDTH - 12, y + 17, speed(nic) if nic.is_up else "down", ("soft" if nic.is_up else "down") + " end")
    yield _label(x + 14, y + 33, _fit(", ".join((nic.kind, *nic.addresses)), NIC_WIDTH - 24), "soft")


def speed(nic: Nic) -> str:
    """Format the speed, such as "400 Gbit/s", or "speed unknown"."""
    return f"{nic.speed_gbit_s:g} Gbit/s" if nic.speed_gbit_s else "speed unknown"


def _card(x: float, y: float, width: float, state: str = "") -> str:
    return f'<rect class="card{state}" x="{x:g}" y="{y:g}" width="{width}" height="{CARD_HEIGHT}" rx="5"/>\n'


def _label(x: float, y: float, text: str, style: str) -> str:
    return f'<text class="{style}" x="{x:g}" y="{y:g}">{escape(text)}</text>\n'


def _fit(text: str, width: float) -> str:
    characters = int(width / CHARACTER_WIDTH)
    return text if len(text) <= characters else text[: characters - 1] + "…"


@click.command(short_help="Show NICs, GPUs and NUMA nodes of the nodes' hosts.")
@click.option("--node", metavar="NAME", help="Only this node.")
@click.option("--local", "is_local", is_flag=True, help="Show this machine, without contacting a master.")
@click.option("--svg", metavar="FILE", help="Write a drawing to FILE; - is standard output.")
@json_option
@client_options
def topology(node: str | None, is_local: bool, svg: str | None, as_json: bool, settings: ClientSettings) -> None:
    """Show the topology of the nodes' hosts, as last reported: NICs with speed and state, GPUs, preferred rails.

    With --local or --node, --json prints the form that the setting `topology` of [transfer] reads; otherwise a list of the nodes.
    """
    if is_local and node is not None:
        raise InvalidArgument("--local and --node exclude each other: give one of them")
    if svg == "-" and as_json:
        raise InvalidArgument("--svg - and --json both write to standard output: give --svg a file")
    subjects = [_this_machine()] if is_local else _of_cluster(settings, node)
    if svg is not None:
        _write(svg, draw(subjects))
    if as_json:
        echo_json(_only(subjects) if is_local or node is not None else [_entry(subject) for subject in subjects])
    elif svg is None:
        for subject in subjects:
            console().print(topology_view(subject))


def _this_machine() -> HostPanel:
    settings = load_settings(TransferSettings, SECTION, flags={})
    return HostPanel(socket.gethostname(), Discovery.configured(settings).read_topology())


def _of_cluster(settings: ClientSettings, node: str | None) -> list[HostPanel]:
    with Control.find(settings) as control:
        return [_subject(found) for found in sorted(control.topologies(node or ""), key=lambda found: found.name)]


def _subject(found: pb.NodeTopology) -> HostPanel:
    if not found.topology:
        return HostPanel(found.name, None, found.state, "it has not reported its topology")
    try:
        return HostPanel(found.name, parse_topology(found.topology), found.state)
    except ProtocolError as error:  # a node of another release must not hide the others
        return HostPanel(found.name, None, found.state, f"its topology cannot be read: {error}")


def _entry(subject: HostPanel) -> dict[str, Any]:
    whole = topology_as_json(subject.topology) if subject.topology is not None else None
    return {"node": subject.name, "state": subject.state, "topology": whole, "note": subject.note}


def _only(subjects: list[HostPanel]) -> dict[str, Any]:
    (subject,) = subjects
    if subject.topology is None:
        raise ProtocolError(f"{subject.name}: {subject.note}")
    return topology_as_json(subject.topology)


def _write(file: str, text: str) -> None:
    if file == "-":
        click.echo(text, nl=False)
        return
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the drawing to {file}: {error.strerror or error}") from None
