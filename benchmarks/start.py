"""`make bench-start`: what a program waits for before it works. Rows go to benchmarks/out/start.json.

`imports`: the client's import beside bare Python's start and `import numpy`, which it needs, with modules compiled, as an installation
has them, in turn. `cluster`: a master and a node with 8 GiB, from the start of the first process on. `first`: first writes of new clients.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks import first_writes
from benchmarks.harness import run
from kvstore.cli.replay import show_warning
from kvstore.cli.tools.bench import BenchRow, at_most, copy_all, put_all, seconds
from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from kvstore.client import Client

OUT: Final = Path(__file__).parent / "out" / "start.json"
PROGRAMS: Final = {
    "bare Python": "pass",
    "import numpy": "import numpy",
    "from kvstore.client import Client": "from kvstore.client import Client",
    "from kvstore.client import AsyncClient": "from kvstore.client import AsyncClient",
}
IMPORT_ROUNDS: Final = 15
DRAM_BYTES: Final = 8 << 30
START_ROUNDS: Final = 3
EARLY_BYTES: Final = 4 << 20
EARLY_COUNT: Final = 32
"""128 MiB that are put while DRAM is being touched."""


def main() -> int:
    return run({"imports": import_rows, "cluster": cluster_rows, "first": first_writes.rows}, OUT)


def import_rows() -> Iterator[BenchRow]:
    """The quickest of several: what else runs on the machine only adds."""
    taken_ms: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        environment = compiled(folder)
        for number in range(1 + IMPORT_ROUNDS):
            for name, program in PROGRAMS.items():
                took_s = seconds(lambda program=program: subprocess.run([sys.executable, "-c", program], env=environment, check=True))  # type: ignore[misc]
                if number:  # before that modules are compiled
                    taken_ms[name].append(1000 * took_s)
    best_ms = {name: min(found) for name, found in taken_ms.items()}
    yield BenchRow("bare Python, start to end", best_ms["bare Python"], "ms")
    yield BenchRow("import numpy, likewise", best_ms["import numpy"], "ms")
    for name in list(PROGRAMS)[2:]:
        row = at_most if name.endswith(" Client") else lambda name, value, unit, _: BenchRow(name, value, unit)
        yield row(f"{name}, likewise", best_ms[name], "ms", 100)
        yield BenchRow(f"{name} beyond numpy's", best_ms[name] - best_ms["import numpy"], "ms")


def cluster_rows() -> Iterator[BenchRow]:
    """Medians; the last round waits until DRAM is touched, too."""
    cold: dict[str, list[float]] = defaultdict(list)
    found: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        before = dict(os.environ)
        os.environ.update(compiled(folder))
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        try:
            for number in range(1 + START_ROUNDS):
                start(found if number else cold, waits=number == START_ROUNDS)
        finally:
            os.environ.clear()
            os.environ.update(before)
    gibibytes = DRAM_BYTES >> 30
    yield at_most(f"master and node with {gibibytes} GiB, ready", statistics.median(found["ready"]), "s", 1)
    yield BenchRow("the same, its modules being compiled", cold["ready"][0], "s")
    yield at_most(f"master and node with {gibibytes} GiB, first put answered", statistics.median(found["put"]), "s", 1)
    yield BenchRow("128 MiB put right after that, DRAM being touched / memcpy", statistics.median(found["puts"]), "ratio")
    yield BenchRow(f"the same node, {gibibytes} GiB touched", found["warm"][0], "s")


def start(found: dict[str, list[float]], *, waits: bool) -> None:
    """One cluster: when it is ready, when a put is answered, how fast the next ones are, and, with `waits`, when all is touched."""
    begun_s = time.perf_counter()
    with LocalCluster(ClusterPlan(is_private=True, dram=str(DRAM_BYTES)), on_log=show_warning) as running:
        running.wait_ready()
        found["ready"].append(time.perf_counter() - begun_s)
        with Client(running.address) as client:
            client.put(os.urandom(16), bytes(4096))
            found["put"].append(time.perf_counter() - begun_s)
            sources = [np.ones(EARLY_BYTES, np.uint8) for _ in range(EARLY_COUNT)]
            arena = [np.ones(EARLY_BYTES, np.uint8) for _ in range(EARLY_COUNT)]
            put_s = seconds(lambda: put_all(client, [os.urandom(16) for _ in sources], sources))
            found["puts"].append(seconds(lambda: copy_all(arena, sources)) / put_s)
        if waits:
            running.wait_warm()
            found["warm"].append(time.perf_counter() - begun_s)


def compiled(folder: str) -> dict[str, str]:
    """An environment in which modules are compiled once, into that folder."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPYCACHEPREFIX": folder}


if __name__ == "__main__":
    sys.exit(main())
