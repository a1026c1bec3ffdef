"""A benchmark in parts: arguments name those to run, without them it is all. Each row is printed as it is had, and the table at the end."""

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from rich.console import Console

from kvstore.client.tools.bench import Row, table, write


def run(parts: Mapping[str, Callable[[], Iterable[Row]]], out: Path, *, may_lack: tuple[type[Exception], ...] = ()) -> int:
    """The exit status. `out` gets the rows; a part that raises one of `may_lack` is left out from there on."""
    rows: list[Row] = []
    for name in sys.argv[1:] or parts:
        try:
            for row in parts[name]():
                print(f"{row.name}: {row.value:.4g} {row.unit}", file=sys.stderr, flush=True)
                rows.append(row)
        except may_lack as trouble:
            print(f"{name}: left out, {trouble}", file=sys.stderr)
    Console().print(table(rows))
    write(rows, out)
    return 0
