"""`make bench-master`: masters by themselves. Arguments name the parts to run; without them it is all but `large` and `large-failover`.
Rows go to benchmarks/out/master.json."""

import sys
from pathlib import Path

from benchmarks.harness import run
from benchmarks.masters import catalog, failover, inventory, large, lookups, memory, owners, removes, standby

PARTS = {
    "memory": memory.rows,
    "lookups": lookups.rows,
    "owners": owners.rows,
    "standby": standby.rows,
    "failover": failover.rows,
    "catalog": catalog.rows,
    "inventory": inventory.rows,
    "removes": removes.rows,
}

BY_NAME = {"large": large.rows, "large-failover": failover.large_rows}

if __name__ == "__main__":
    sys.exit(run(PARTS | BY_NAME if sys.argv[1:] else PARTS, Path(__file__).parents[1] / "out" / "master.json"))
