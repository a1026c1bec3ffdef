"""`make bench-master`: masters by themselves. Arguments name the parts to run; without them it is all. Rows go to
benchmarks/out/master.json."""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks.masters import catalog, failover, lookups, memory, standby
from kvstore.client.tools.bench_report import Row, table, write

OUT: Final = Path(__file__).parents[1] / "out" / "master.json"
PARTS: Final[dict[str, Callable[[], Iterable[Row]]]] = {
    "memory": memory.rows,
    "lookups": lookups.rows,
    "standby": standby.rows,
    "failover": failover.rows,
    "catalog": catalog.rows,
}


def main() -> int:
    rows: list[Row] = []
    for name in sys.argv[1:] or PARTS:
        for row in PARTS[name]():
            print(f"{row.name}: {row.value:.4g} {row.unit}", file=sys.stderr, flush=True)
            rows.append(row)
    Console().print(table(rows))
    write(rows, OUT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
