"""A benchmark's figures: rows of name, value, unit and aim, as a table for people and as JSON for scripts. It measures nothing."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `met` is None where there is no aim to meet."""

    name: str
    value: float
    unit: str
    aim: str = ""
    met: bool | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def at_least(name: str, value: float, unit: str, aim: float) -> Row:
    return Row(name, value, unit, f">= {aim:g}", value >= aim)


def at_most(name: str, value: float, unit: str, aim: float) -> Row:
    return Row(name, value, unit, f"<= {aim:g}", value <= aim)


def table(rows: Sequence[Row]) -> Table:
    """One line a row; whether its aim was met in words and colour."""
    found = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("figure", "value", "unit", "aim", ""):
        found.add_column(title, justify="right" if title == "value" else "left")
    for row in rows:
        verdict = Text("") if row.met is None else Text("met", "green") if row.met else Text("missed", "red")
        found.add_row(row.name, f"{row.value:,.0f}" if row.value >= 1000 else f"{row.value:.3g}", row.unit, row.aim, verdict)
    return found


def write(rows: Sequence[Row], path: Path) -> None:
    """The rows as JSON, in a folder that is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([row.as_json() for row in rows], indent=1) + "\n")
