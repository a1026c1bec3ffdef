"""Table of nodes of `kvstore top`, and its number and sparkline formats. Pure functions from the console's document."""

import re
from collections.abc import Sequence
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from kvstore.cli.tools.tables import bar, duration
from kvstore.console.model import NODE_FIELDS, TIERS, Document
from kvstore.protocol.settings import format_size

SPARKS: Final = " ▁▂▃▄▅▆▇█"
LEVELS: Final = 8
"""Levels of one sparkline character."""

STYLES: Final = {"alive": "green", "syncing": "yellow", "stopped": "dim", "dead": "red"}
_Column = tuple[str, str, int]
COLUMNS: Final[tuple[_Column, ...]] = (
    ("name", "node", 0),
    ("state", "state", 0),
    ("share", "fullest tier", 0),
    ("hits_per_s", "read/s", 60),
    ("misses_per_s", "missed/s", 72),
    ("out_bytes_per_s", "out/s", 84),
    ("in_bytes_per_s", "in/s", 96),
    ("evictions_per_s", "evicted/s", 108),
    ("blocks", "blocks", 120),
    ("address", "address", 144),
    ("next", "victim unread", 168),
    ("connections", "clients", 180),
    ("heartbeat_age_s", "heartbeat", 192),
    ("hbm_share", "hbm", 200),
    ("dram_share", "dram", 208),
    ("nvme_share", "nvme", 216),
    ("version", "version", 228),
    ("transports", "transports", 246),
)
"""Field, heading, and the least width of the terminal at which it is shown."""
SORTS: Final = ("name", "state", "share", "hits_per_s", "misses_per_s", "out_bytes_per_s", "in_bytes_per_s", "evictions_per_s", "blocks")
STATES: Final = ("dead", "syncing", "stopped", "alive")
NAME_WIDTH: Final = 20
LARGE: Final = 160
"""Width of a terminal from which names are not truncated and bars are twice as long."""


def count_text(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.1f} {unit}"
    return f"{value:,.0f}"


def spark_lines(values: Sequence[float], lines: int) -> list[str]:
    """Return a sparkline of `lines` rows, top row first, scaled to the highest value.

    A value of 0 has one level, to distinguish it from a missing value.
    """
    most = max(values, default=0) or 1
    heights = [max(1, min(LEVELS * lines, int(LEVELS * lines * value / most))) for value in values]
    floors = [LEVELS * (lines - 1 - line) for line in range(lines)]
    return ["".join(SPARKS[min(LEVELS, max(0, height - floor))] for height in heights) for floor in floors]


def nodes_of(document: Document) -> list[dict[str, Any]]:
    """Return the document's nodes as dicts, with the occupancy of each tier and of the fullest."""
    nodes = [dict(zip(NODE_FIELDS, row, strict=True)) for row in document["nodes"]["rows"]]
    for node in nodes:
        shares = {tier: _share(node, tier) for tier in TIERS}
        node |= {f"{tier}_share": share for tier, share in shares.items()}
        known = {tier: share for tier, share in shares.items() if share is not None}
        node["fullest"] = max(known, key=lambda tier: known[tier], default="")
        node["next"] = node["next_victims"][-1] if node["next_victims"] else None
        node["share"] = known.get(node["fullest"], 0.0)
    return nodes


def nodes_table(nodes: list[dict[str, Any]], sort: str, first: int, page: int, width: int) -> tuple[Table, int]:
    """Return a table of `page` nodes from index `first`, sorted by `sort`, and the index shown first, clamped to the last page."""
    nodes.sort(key=lambda node: _natural(node["name"]))
    if sort == "state":
        nodes.sort(key=lambda node: (STATES.index(node["state"]) if node["state"] in STATES else 0, not node["drain"]))
    elif sort != "name":
        nodes.sort(key=lambda node: -node[sort])
    first = max(0, min(first, len(nodes) - page))
    table = Table(box=None, header_style="bold", pad_edge=False, width=width)
    columns = [column for column in COLUMNS if width >= column[2] and _is_known(column[0], nodes)]
    for name, heading, _least in columns:
        table.add_column(
            Text(heading, style="reverse" if name == sort else ""),
            justify="left" if name in ("name", "state", "address", "share", "transports", "version") else "right",
            no_wrap=True,
            max_width=max(8, min(NAME_WIDTH, width // 3)) if name == "name" and width < LARGE else None,
            overflow="ellipsis",
        )
    for node in nodes[first : first + page]:
        table.add_row(*(_cell(node, name, width) for name, _heading, _least in columns))
    return table, first


def heading_of(name: str) -> str:
    return next(heading for field_name, heading, _least in COLUMNS if field_name == name)


def _is_known(name: str, nodes: list[dict[str, Any]]) -> bool:
    """Return whether a column has a value: columns of tiers that no node has are left out."""
    return not name.endswith("_share") or any(node[name] is not None for node in nodes)


def _share(node: dict[str, Any], tier: str) -> float | None:
    capacity = node[f"{tier}_capacity_bytes"]
    return node[f"{tier}_used_bytes"] / capacity if capacity else None


def _cell(node: dict[str, Any], name: str, width: int) -> str | Text:
    value = node[name]
    if name == "state":
        return Text(node["drain"] or node["state"], style=STYLES.get(node["state"], "red"))
    if name == "share":
        return Text.assemble(bar(value, 16 if width >= LARGE else 8), f" {value:4.0%} {node['fullest']}")
    if name.endswith("_share"):
        return "-" if value is None else f"{value:.0%}"
    if name == "next":
        return duration(value[2]) if value is not None else "-"
    if name == "heartbeat_age_s":
        return "-" if node["state"] in ("dead", "stopped") else f"{value:.1f} s"
    if name == "transports":
        return ", ".join(value)
    if isinstance(value, str):
        return value
    return format_size(int(value)) if "bytes" in name else count_text(value)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that orders node-2 before node-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
