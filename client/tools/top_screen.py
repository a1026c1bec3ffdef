"""What `kvstore top` shows: a screenful of the cluster for a terminal of any size. Pure: a console's document becomes what rich prints."""

import re
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvstore.client.tools.status_tables import bar, duration, percent
from kvstore.console.model import NODE_FIELDS, Document
from kvstore.protocol.settings import format_size

STYLES: Final = {"alive": "green", "syncing": "yellow", "dead": "red"}
CELL_WIDTH: Final = 26
MAX_TROUBLES: Final = 3
TRENDS_FROM_LINES: Final = 20
"""A lower terminal has no room for the two lines of trends."""
SPARKS: Final = "▁▂▃▄▅▆▇█"
KEPT: Final = 512
TRENDS: Final = ("hits_per_s", "out_bytes_per_s")
TIER_COLUMNS: Final = (
    ("tier", 0),
    ("full", 0),
    ("", 0),
    ("used", 50),
    ("of", 50),
    ("read/s", 62),
    ("evicted/s", 74),
    ("up/s", 100),
    ("down/s", 100),
)
"""Heading, and from how many columns of the terminal on it is shown."""
NAME_WIDTH: Final = 20
_Column = tuple[str, str, int]
COLUMNS: Final[tuple[_Column, ...]] = (
    ("name", "node", 0),
    ("state", "state", 0),
    ("share", "full", 0),
    ("hits_per_s", "read/s", 56),
    ("misses_per_s", "missed/s", 68),
    ("out_bytes_per_s", "out/s", 80),
    ("in_bytes_per_s", "in/s", 92),
    ("evictions_per_s", "evicted/s", 104),
    ("blocks", "blocks", 116),
    ("address", "address", 140),
)
"""Field, heading, and from how many columns of the terminal on it is shown."""
SORTS: Final = ("name", "state", "share", "hits_per_s", "misses_per_s", "out_bytes_per_s", "in_bytes_per_s", "evictions_per_s", "blocks")


@dataclass(slots=True)
class View:
    """What is looked at: how nodes are sorted, and the first that is shown."""

    document: Document | None = None
    failure: str = ""
    sort: str = "name"
    first: int = 0
    trends: dict[str, deque[float]] = field(default_factory=lambda: {name: deque(maxlen=KEPT) for name in TRENDS})

    def take(self, document: Document) -> None:
        """The next look."""
        self.document, self.failure = document, ""
        for name, values in self.trends.items():
            values.append(document["totals"][name])

    def press(self, key: str, page: int) -> bool:
        """Do as the key says, `page` nodes being shown; False to quit."""
        steps = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -page, "b": -page, "page down": page, " ": page}
        if key in ("q", "Q", "\x03", "\x04"):
            return False
        if key == "s":
            self.sort, self.first = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)], 0
        elif key in ("home", "g"):
            self.first = 0
        elif key in ("end", "G"):
            self.first = 1 << 30
        else:
            self.first += steps.get(key, 0)
        return True


def screen(view: View, width: int, height: int) -> tuple[RenderableType, int]:
    """A screen of exactly this size or less, and how many nodes it shows."""
    if view.document is None:
        return Text(view.failure or "asking the cluster…", no_wrap=True, overflow="ellipsis"), 1
    is_low = height < TRENDS_FROM_LINES
    parts: list[RenderableType] = [_line(view.document, width), *_troubles(view, width, 1 if is_low else MAX_TROUBLES)]
    used = len(parts)
    figures, lines = _figures(view.document["totals"], width, 2 if is_low else 5)
    parts.append(figures)
    used += lines
    if not is_low:
        parts += [_trend(view, "hits_per_s", "read", width), _trend(view, "out_bytes_per_s", "out", width)]
        used += 2
        if latencies := _latencies(view.document["operations"], width):
            parts.append(latencies)
            used += 1
    tiers = view.document["tiers"]
    if tiers and height >= used + len(tiers) + 6:
        parts += [Text(), _tiers(tiers, width)]
        used += len(tiers) + 2
    page = max(1, height - used - 3)
    table, shown = _nodes(view, width, page)
    return Group(*parts, Text(), table, _keys(view, shown, width)), page


def _line(document: Document, width: int) -> Text:
    master, totals, health = document["master"], document["totals"], document["catalog"]["health"]
    text = Text.assemble(
        ("kvstore", "bold"),
        f"  {master['name'] or 'master'}, {master['role'] or 'owner'}  ",
        (f"{totals['alive']} of {totals['nodes']} nodes alive", "green" if totals["alive"] == totals["nodes"] else "yellow"),
        "  catalog ",
        (health or "unknown", "green" if health == "ok" else "red"),
        (f"  up {duration(master['uptime_s'])}", "dim"),
    )
    text.truncate(width, overflow="ellipsis")
    return text


def _troubles(view: View, width: int, limit: int) -> list[Text]:
    assert view.document is not None
    told = [{"level": "error", "text": view.failure}] if view.failure else []
    told += view.document["troubles"]
    found = [Text(one["text"].replace("\n", " "), style="red" if one["level"] == "error" else "yellow") for one in told[:limit]]
    for text in found:
        text.truncate(width, overflow="ellipsis")
    return found


def _figures(totals: Document, width: int, max_lines: int) -> tuple[RenderableType, int]:
    """Labels and figures, the most telling first, in as many columns as there is room for; the lines it takes."""
    cells = [
        ("hit ratio", percent(totals["hits_per_s"], totals["hits_per_s"] + totals["misses_per_s"])),
        ("read", f"{_count(totals['hits_per_s'])}/s"),
        ("full", percent(totals["used_bytes"], totals["capacity_bytes"])),
        ("out", f"{format_size(int(totals['out_bytes_per_s']))}/s"),
        ("blocks", _count(totals["blocks"])),
        ("missed", f"{_count(totals['misses_per_s'])}/s"),
        ("in", f"{format_size(int(totals['in_bytes_per_s']))}/s"),
        ("used", f"{format_size(totals['used_bytes'])}"),
        ("evicted", f"{_count(totals['evictions_per_s'])}/s"),
    ]
    columns = max(1, min(len(cells), width // CELL_WIDTH))
    table = Table.grid(padding=(0, 3))
    lines = 0
    for begin in range(0, min(len(cells), columns * max_lines), columns):
        row = cells[begin : begin + columns]
        table.add_row(*(Text.assemble((f"{name:<9} ", "dim"), f"{figure:>{CELL_WIDTH - 13}}") for name, figure in row))
        lines += 1
    return table, lines


def _trend(view: View, name: str, label: str, width: int) -> Text:
    """The newest values as a line of bars; the rightmost is now."""
    room = max(1, width - 10)
    values = list(view.trends[name])[-room:]
    most = max(values, default=0) or 1
    sparks = "".join(SPARKS[min(7, int(8 * value / most))] for value in values)
    return Text.assemble((f"{label:<9} ", "dim"), (sparks, "cyan"))


def _latencies(operations: list[Document], width: int) -> Text | None:
    """Means of what is asked for most, and the slowest of the last minute; None where nothing is."""
    asked = sorted((one for one in operations if one["mean_s"] is not None), key=lambda one: -one["per_s"])
    if not asked:
        return None
    told = (f"{one['operation'].replace('_', ' ')} {_latency(one['mean_s'])} ({_latency(one['slowest_s'])})" for one in asked)
    text = Text.assemble((f"{'mean':<9} ", "dim"), "   ".join(told), ("   in brackets the slowest of the last minute", "dim"))
    text.truncate(width, overflow="ellipsis")
    return text


def _latency(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} us"


def _tiers(tiers: list[Document], width: int) -> Table:
    table = _table(width)
    for name, least in TIER_COLUMNS:
        if width >= least:
            table.add_column(name, justify="left" if name in ("tier", "full") else "right", no_wrap=True)
    for tier in tiers:
        cells: tuple[str | Text, ...] = (
            tier["name"],
            bar(tier["used_bytes"] / tier["capacity_bytes"] if tier["capacity_bytes"] else 0.0),
            percent(tier["used_bytes"], tier["capacity_bytes"]),
            format_size(tier["used_bytes"]),
            format_size(tier["capacity_bytes"]),
            _count(tier["hits_per_s"]),
            _count(tier["evictions_per_s"]),
            _count(tier["promotions_per_s"]),
            _count(tier["demotions_per_s"]),
        )
        table.add_row(*(cell for cell, (_name, least) in zip(cells, TIER_COLUMNS, strict=True) if width >= least))
    return table


def _nodes(view: View, width: int, page: int) -> tuple[Table, tuple[int, int, int]]:
    """As many nodes as there is room for; the first, the one after the last, and how many there are."""
    assert view.document is not None
    nodes = [dict(zip(NODE_FIELDS, row, strict=True)) for row in view.document["nodes"]["rows"]]
    for node in nodes:
        node["share"] = node["used_bytes"] / node["capacity_bytes"] if node["capacity_bytes"] else 0.0
    nodes.sort(key=lambda node: _natural(node["name"]))
    if view.sort == "state":
        nodes.sort(key=lambda node: (("dead", "syncing", "alive").index(node["state"]), not node["drain"]))
    elif view.sort != "name":
        nodes.sort(key=lambda node: -node[view.sort])
    view.first = max(0, min(view.first, len(nodes) - page))
    shown = nodes[view.first : view.first + page]
    table = _table(width)
    columns = [column for column in COLUMNS if width >= column[2]]
    for name, heading, _least in columns:
        table.add_column(
            Text(heading, style="reverse" if name == view.sort else ""),
            justify="left" if name in ("name", "state", "address", "share") else "right",
            no_wrap=True,
            max_width=max(8, min(NAME_WIDTH, width // 3)) if name == "name" else None,
            overflow="ellipsis",
        )
    for node in shown:
        table.add_row(*(_cell(node, name) for name, _heading, _least in columns))
    return table, (view.first, view.first + len(shown), len(nodes))


def _cell(node: dict[str, Any], name: str) -> str | Text:
    if name == "state":
        return Text(node["drain"] or node["state"], style=STYLES.get(node["state"], "red"))
    if name == "share":
        return Text.assemble(bar(node["share"], 8), f" {node['share']:4.0%}")
    value = node[name]
    if isinstance(value, str):
        return value
    return format_size(int(value)) if "bytes" in name else _count(value)


def _keys(view: View, shown: tuple[int, int, int], width: int) -> Text:
    first, end, count = shown
    where = f"{first + 1} to {end} of {count}" if count else "no node has come yet"
    text = Text(f"{where}   q quit   ↑ ↓ PgUp PgDn   s sort: {_heading(view.sort)}", style="dim")
    text.truncate(width, overflow="ellipsis")
    return text


def _heading(name: str) -> str:
    return next(heading for field_name, heading, _least in COLUMNS if field_name == name)


def _natural(name: str) -> list[tuple[int, str]]:
    """node-2 comes before node-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _table(width: int) -> Table:
    return Table(box=None, header_style="bold", pad_edge=False, width=width if width < 120 else None)


def _count(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.1f} {unit}"
    return f"{value:,.0f}"
