"""Branch coverage by package, from the report of `coverage json`. Exit status 1: one is below its floor.

Sans-I/O packages need no process or socket to be covered, so their floor is higher.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Final

SANS_IO: Final = ("kvcache", "master/directory", "protocol", "scheduler", "tiers")
FLOORS: Final = {**dict.fromkeys(SANS_IO, 95), "all": 90}
"""Percent."""


def percents(report: dict[str, Any]) -> dict[str, float]:
    """Percent of branches that ran: by top-level folder, of each of SANS_IO, and of all together."""
    ran: Counter[str] = Counter()
    there: Counter[str] = Counter()
    for path, file in report["files"].items():
        for name in {path.partition("/")[0], *(name for name in SANS_IO if path.startswith(f"{name}/")), "all"}:
            ran[name] += file["summary"]["covered_branches"]
            there[name] += file["summary"]["num_branches"]
    return {name: 100 * ran[name] / count for name, count in there.items() if count}


def main() -> int:
    found = percents(json.loads(Path(sys.argv[1]).read_text()))
    below = 0
    for name, percent in sorted(found.items()):
        floor = FLOORS.get(name, 0)
        below += percent < floor
        print(f"{name:16} {percent:5.1f} %{f', less than {floor} %' if percent < floor else ''}")
    return 1 if below else 0


if __name__ == "__main__":
    sys.exit(main())
