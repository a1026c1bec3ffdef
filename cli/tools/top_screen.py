"""Screen of `kvstore top` for a terminal of any size. Pure functions from the console's document to rich renderables."""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvstore.cli.tools.tables import BAR_WIDTH, bar, duration, new_table, percent, seconds
from kvstore.cli.tools.top_nodes import SORTS, count_text, heading_of, nodes_of, nodes_table, spark_lines
from kvstore.console.model import NODE_FIELDS, Document
from kvstore.protocol.settings import format_size

CELL_WIDTH: Final = 26
MAX_PROBLEMS: Final = 3
TRENDS_FROM_LINES: Final = 20
"""Terminals with fewer lines show no trends."""
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
"""Heading, and the least width of the terminal at which it is shown."""
MAX_TREND_LINES: Final = 8
OPERATION_COLUMNS: Final = ("operation", "at", "requests/s", "mean", "slowest", "slowest at")


@dataclass(slots=True)
class ScreenView:
    """State of the screen: the last document, the sort order of nodes and the scroll position."""

    document: Document | None = None
    failure: str = ""
    sort: str = "name"
    first: int = 0
    trends: dict[str, deque[float]] = field(default_factory=lambda: {name: deque(maxlen=KEPT) for name in TRENDS})

    def take(self, document: Document) -> None:
        """Take the document of the next poll."""
        self.document, self.failure = document, ""
        for name, values in self.trends.items():
            values.append(document["totals"][name])

    def press(self, key: str, page: int) -> bool:
        """Handle a key press, with `page` nodes on the screen; False to quit."""
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


def screen(view: ScreenView, width: int, height: int) -> tuple[RenderableType, int]:
    """Return a screen of at most this size, and the number of nodes that it shows."""
    if view.document is None:
        return Text(view.failure or "connecting…", no_wrap=True, overflow="ellipsis"), 1
    is_low, nodes = height < TRENDS_FROM_LINES, nodes_of(view.document)
    tiers, operations = view.document["tiers"], view.document["operations"]
    parts: list[RenderableType] = [_line(view.document, width), *_problems(view, width, 1 if is_low else MAX_PROBLEMS)]
    used = len(parts)
    figures, lines = _figures(view.document, width, 2 if is_low else 5)
    parts.append(figures)
    used += lines
    if not is_low:
        tiers_lines = len(tiers) + 2 if tiers else 0
        spare = height - used - tiers_lines - len(nodes) - TRENDS_FROM_LINES // 2
        trend_lines = max(1, min(MAX_TREND_LINES, spare // 2))
        parts += [*_trend(view, "hits_per_s", "read", width, trend_lines), *_trend(view, "out_bytes_per_s", "out", width, trend_lines)]
        used += 2 * trend_lines
        if moved := _moved(view.document, width):
            parts.append(moved)
            used += 1
        if operations and spare - 2 * trend_lines >= len(operations):
            parts += [Text(), _operations(operations, width)]
            used += len(operations) + 2
        elif latencies := _latencies(operations, width):
            parts.append(latencies)
            used += 1
    if tiers and height >= used + len(tiers) + 6:
        parts += [Text(), _tiers(tiers, width)]
        used += len(tiers) + 2
    page = max(1, height - used - 3)
    table, view.first = nodes_table(nodes, view.sort, view.first, page, width)
    shown = view.first, min(view.first + page, len(nodes)), len(nodes)
    return Group(*parts, Text(), table, _keys(view, shown, width)), page


def _line(document: Document, width: int) -> Text:
    master, totals, health = document["master"], document["totals"], document["catalog"]["health"]
    state_at = NODE_FIELDS.index("state")
    dead = any(row[state_at] == "dead" for row in document["nodes"]["rows"])
    style = "green" if totals["alive"] == totals["nodes"] else "red" if dead else "yellow"
    text = Text.assemble(
        ("kvstore", "bold"),
        f"  {master['name'] or 'master'}, {master['role'] or 'owner'}  ",
        (f"{totals['alive']} of {totals['nodes']} nodes alive", style),
        "  catalog ",
        (health or "unknown", "green" if health == "ok" else "red"),
        (f"  up {duration(master['uptime_s'])}", "dim"),
    )
    text.truncate(width, overflow="ellipsis")
    return text


def _problems(view: ScreenView, width: int, limit: int) -> list[Text]:
    assert view.document is not None
    problems = [{"level": "error", "text": view.failure, "todo": ""}] if view.failure else []
    problems += view.document["problems"]
    found = [
        Text.assemble((one["text"].replace("\n", " "), "red" if one["level"] == "error" else "yellow"), (f"  {one['todo']}", "dim"))
        for one in problems[:limit]
    ]
    for text in found:
        text.truncate(width, overflow="ellipsis")
    return found


def _figures(document: Document, width: int, max_lines: int) -> tuple[RenderableType, int]:
    """Return labels and figures in as many columns as fit, the most important first, and the number of lines.

    `full` is that of the fullest tier: an average would hide a small full tier behind a large empty one.
    """
    totals = document["totals"]
    tiers = [tier for tier in document["tiers"] if tier["capacity_bytes"]]
    fullest = max(tiers, key=lambda tier: tier["used_bytes"] / tier["capacity_bytes"], default=None)
    full = f"{fullest['name']} {percent(fullest['used_bytes'], fullest['capacity_bytes'])}" if fullest else "-"
    cells = [
        ("hit ratio", percent(totals["hits_per_s"], totals["hits_per_s"] + totals["misses_per_s"])),
        ("read", f"{count_text(totals['hits_per_s'])}/s"),
        ("full", full),
        ("out", f"{format_size(int(totals['out_bytes_per_s']))}/s"),
        ("blocks", count_text(totals["blocks"])),
        ("missed", f"{count_text(totals['misses_per_s'])}/s"),
        ("in", f"{format_size(int(totals['in_bytes_per_s']))}/s"),
        ("used", f"{format_size(totals['used_bytes'])}"),
        ("evicted", f"{count_text(totals['evictions_per_s'])}/s"),
    ]
    columns = max(1, min(len(cells), width // CELL_WIDTH))
    table = Table.grid(padding=(0, 3))
    lines = 0
    for begin in range(0, min(len(cells), columns * max_lines), columns):
        row = cells[begin : begin + columns]
        table.add_row(*(Text.assemble((f"{name:<9} ", "dim"), f"{figure:>{CELL_WIDTH - 13}}") for name, figure in row))
        lines += 1
    return table, lines


def _trend(view: ScreenView, name: str, label: str, width: int, lines: int) -> list[Text]:
    """The newest values as a sparkline of `lines` lines; the rightmost is the last poll."""
    values = list(view.trends[name])[-max(1, width - 10) :]
    drawn = spark_lines(values, lines)
    return [Text.assemble((f"{label if not line else '':<9} ", "dim"), (bars, "cyan")) for line, bars in enumerate(drawn)]


def _operations(operations: list[Document], width: int) -> Table:
    """Table of all operations, as on the console's page."""
    table = new_table(*OPERATION_COLUMNS, right=OPERATION_COLUMNS[2:5], no_wrap=OPERATION_COLUMNS, width=width)
    for one in operations:
        mean = seconds(one["mean_s"]) if one["mean_s"] is not None else "-"
        slowest = seconds(one["slowest_s"])
        name = one["operation"].replace("_", " ")
        table.add_row(name, one["where"], count_text(one["per_s"]), mean, slowest, one["slowest_at"])
    return table


def _latencies(operations: list[Document], width: int) -> Text | None:
    """Mean and slowest latency of the operations, most frequent first, in one line; None without requests."""
    busiest = sorted((one for one in operations if one["mean_s"] is not None), key=lambda one: -one["per_s"])
    if not busiest:
        return None
    cells = (f"{one['operation'].replace('_', ' ')} {seconds(one['mean_s'])} ({seconds(one['slowest_s'])})" for one in busiest)
    text = Text.assemble((f"{'mean':<9} ", "dim"), "   ".join(cells), ("   in brackets the slowest of the last minute", "dim"))
    text.truncate(width, overflow="ellipsis")
    return text


def _moved(document: Document, width: int) -> Text | None:
    """Blocks that moved or left a second, by reason, the most frequent first, in one line; None without any."""
    rows = sorted((one for one in document["moves"]["rows"] if one["blocks_per_s"]), key=lambda one: -one["blocks_per_s"])
    if not rows:
        return None
    cells = (f"{count_text(one['blocks_per_s'])}/s {one['text']}" for one in rows)
    text = Text.assemble((f"{'moved':<9} ", "dim"), "   ".join(cells))
    text.truncate(width, overflow="ellipsis")
    return text


def _tiers(tiers: list[Document], width: int) -> Table:
    names = [name for name, least in TIER_COLUMNS if width >= least]
    table = new_table(*names, right=names[2:], no_wrap=names, width=width)
    for tier in tiers:
        cells: tuple[str | Text, ...] = (
            tier["name"],
            bar(tier["used_bytes"] / tier["capacity_bytes"] if tier["capacity_bytes"] else 0.0, max(BAR_WIDTH, width // 6)),
            percent(tier["used_bytes"], tier["capacity_bytes"]),
            format_size(tier["used_bytes"]),
            format_size(tier["capacity_bytes"]),
            count_text(tier["hits_per_s"]),
            count_text(tier["evictions_per_s"]),
            count_text(tier["promotions_per_s"]),
            count_text(tier["demotions_per_s"]),
        )
        table.add_row(*(cell for cell, (_name, least) in zip(cells, TIER_COLUMNS, strict=True) if width >= least))
    return table


def _keys(view: ScreenView, shown: tuple[int, int, int], width: int) -> Text:
    first, end, count = shown
    where = f"{first + 1} to {end} of {count}" if count else "no node has joined yet"
    text = Text(f"{where}   q quit   ↑ ↓ PgUp PgDn   s sort: {heading_of(view.sort)}", style="dim")
    text.truncate(width, overflow="ellipsis")
    return text
