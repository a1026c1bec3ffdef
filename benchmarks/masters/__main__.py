"""`make bench-master`: masters by themselves. Arguments name the parts to run; without them it is all. Rows go to
benchmarks/out/master.json."""

import sys
from pathlib import Path

from benchmarks.masters import catalog, failover, lookups, memory, owners, standby
from benchmarks.parts import run

PARTS = {
    "memory": memory.rows,
    "lookups": lookups.rows,
    "owners": owners.rows,
    "standby": standby.rows,
    "failover": failover.rows,
    "catalog": catalog.rows,
}

if __name__ == "__main__":
    sys.exit(run(PARTS, Path(__file__).parents[1] / "out" / "master.json"))
