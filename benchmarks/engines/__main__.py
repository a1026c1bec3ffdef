"""`make bench-engines`: real engines with the store, against the same engines without it and against other stores.

Engines run in environments of their own (`make engines`), one at a time. Ratios are of one run. Arguments name the parts to run; without
them it is all. Rows go to benchmarks/out/engines.json.
"""

import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks.engines import lmcache, mooncake, offload, router, vllm
from benchmarks.transfer_peers import Trouble
from kvstore.client.tools.bench_report import Row, table, write

OUT: Final = Path(__file__).parents[1] / "out" / "engines.json"
PARTS: Final[dict[str, Callable[[], Iterable[Row]]]] = {
    "vllm": vllm.rows,
    "offload": offload.rows,
    "lmcache": lmcache.rows,
    "mooncake": mooncake.rows,
    "router": router.rows,
}


def main() -> int:
    rows: list[Row] = []
    for name in sys.argv[1:] or PARTS:
        try:
            for row in PARTS[name]():
                print(f"{row.name}: {row.value:.4g} {row.unit}", file=sys.stderr, flush=True)
                rows.append(row)
        except (Trouble, subprocess.TimeoutExpired) as trouble:
            print(f"{name}: left out, {trouble}", file=sys.stderr)
    Console().print(table(rows))
    write(rows, OUT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
