"""Branch coverage by package, from the report of `coverage json`. Exit status 1: one is below its floor.

Lines and branches count alike, as in coverage's own totals. Sans-I/O packages need no process or socket to be covered, so their floor
is higher.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Final

FLOORS: Final = {"kvcache": 95, "protocol": 95, "scheduler": 95, "tiers": 95, "all": 90}
"""Percent."""


def percents(report: dict[str, Any]) -> dict[str, float]:
    """Percent of lines and branches that ran, by top-level folder, and of all together."""
    ran: Counter[str] = Counter()
    there: Counter[str] = Counter()
    for path, file in report["files"].items():
        summary = file["summary"]
        for name in (path.partition("/")[0], "all"):
            ran[name] += summary["covered_lines"] + summary["covered_branches"]
            there[name] += summary["num_statements"] + summary["num_branches"]
    return {name: 100 * ran[name] / count for name, count in there.items() if count}


def main() -> int:
    found = percents(json.loads(Path(sys.argv[1]).read_text()))
    below = 0
    for name, percent in sorted(found.items()):
        floor = FLOORS.get(name, 0)
        below += percent < floor
        print(f"{name:10} {percent:5.1f} %{f', less than {floor} %' if percent < floor else ''}")
    return 1 if below else 0


if __name__ == "__main__":
    sys.exit(main())
