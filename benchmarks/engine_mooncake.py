"""Mooncake's stress test on kvstore and on Mooncake itself, in turns: rows of `make bench-engines`.

One process with 8 threads on one host, objects of 1 MiB; Mooncake keeps them in that process, kvstore in its node. Both sides of a ratio
are the best of all rounds.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks.mooncake_stress_child import OBJECT_BYTES, OBJECTS, THREADS
from benchmarks.transfer_peers import MOONCAKE_FOLDER, mooncake_python, serving, tool
from kvstore.client.tools.bench_report import Row, at_least
from kvstore.client.tools.cluster import Cluster, ClusterPlan
from tests.ports import free_ports

TURNS: Final = 2
AIM: Final = 2
ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGE: Final = ROOT / "engines" / "mooncake" / "distribution"
DEADLINE_S: Final = 300
STEPS: Final = ("put", "get")


def rows() -> Iterator[Row]:
    """Raises Trouble, where Mooncake cannot be run here."""
    python = mooncake_python()
    rates: dict[str, list[float]] = {"kvstore": [0.0, 0.0], "Mooncake": [0.0, 0.0]}
    with kvstore_master() as ours, mooncake_master() as theirs:
        for _ in range(TURNS):
            note(rates["kvstore"], stress(sys.executable, ours, {"PYTHONPATH": f"{PACKAGE}:{ROOT}"}))
            note(rates["Mooncake"], stress(python, theirs, {"PYTHONPATH": str(ROOT)}))
    for name, found in rates.items():
        for step, rate in zip(STEPS, found, strict=True):
            yield Row(f"{name}: stress test of Mooncake's API, {step} 1 MiB by {THREADS} threads", rate, "GB/s")
    for step, ours_gb_s, theirs_gb_s in zip(STEPS, *rates.values(), strict=True):
        yield at_least(f"kvstore / Mooncake: its stress test, {step}", ours_gb_s / theirs_gb_s, "ratio", AIM)


def stress(python: str, master: str, environment: dict[str, str]) -> list[list[float]]:
    """Seconds of puts and gets of each round."""
    said = tool([python, "-m", "benchmarks.mooncake_stress_child", master], environment, deadline_s=DEADLINE_S)
    rounds: list[list[float]] = json.loads(said.strip().splitlines()[-1])
    return rounds


def note(best: list[float], rounds: list[list[float]]) -> None:
    """Keep the best rates, in GB/s."""
    moved = THREADS * OBJECTS * OBJECT_BYTES / 1e9
    best[:] = [max(rate, *(moved / seconds[step] for seconds in rounds)) for step, rate in enumerate(best)]


@contextmanager
def kvstore_master() -> Iterator[str]:
    plan = ClusterPlan(dram="3200MiB", is_private=True)
    with Cluster(plan, on_log=lambda name, line: print(name, line, file=sys.stderr)) as cluster:
        cluster.wait_ready()
        yield cluster.address


@contextmanager
def mooncake_master() -> Iterator[str]:
    port, metrics = free_ports(2)
    program = str(MOONCAKE_FOLDER / "bin" / "mooncake_master")
    with serving([program, "--rpc_port", str(port), "--metrics_port", str(metrics)], port, {}):
        yield f"127.0.0.1:{port}"


if __name__ == "__main__":
    try:
        for row in rows():
            print(f"{row.name}: {row.value:.3g} {row.unit} {row.aim}")
    except subprocess.TimeoutExpired as error:
        sys.exit(str(error))
