"""LMCache's own benchmark of L2 adapters on ours and on its own one for file systems: rows of `make bench-engines`.

`lmcache bench l2`, 32 objects of 1 MiB a task, in turns, verified: what was loaded is compared with what was stored. Both sides of a ratio
are the medians of all turns. LMCache's files are in a folder of the machine's disk, whose pages the kernel keeps in memory; nothing waits
for the disk.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kvstore.cli.tools.bench import BenchRow, at_least
from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from tests.engines.live.environments import python_of
from tests.engines.live.pages import MASTER, command

TURNS: Final = 3
AIM: Final = 1
STEPS: Final = ("Store", "Load")
DEADLINE_S: Final = 300
OURS: Final = "kvstore"
THEIRS: Final = "LMCache's files"


def rows() -> Iterator[BenchRow]:
    """Raises FileNotFoundError without the environment, and CalledProcessError where a benchmark fails or loads other bytes."""
    found: dict[str, dict[str, list[float]]] = {name: {step: [] for step in STEPS} for name in (OURS, THEIRS)}
    for _ in range(TURNS):
        with (
            tempfile.TemporaryDirectory() as folder,
            LocalCluster(
                ClusterPlan(dram="512MiB", is_private=True), on_log=lambda name, line: print(name, line, file=sys.stderr)
            ) as cluster,
        ):
            cluster.wait_warm()
            words = command("lmcache", "bench", "l2", changes={MASTER: cluster.address})
            note(found[OURS], words)
            adapter = words.index("--l2-adapter") + 1
            note(found[THEIRS], [*words[:adapter], json.dumps({"type": "fs", "base_path": folder}), *words[adapter + 1 :]])
    rates = {name: {step: statistics.median(found[name][step]) for step in STEPS} for name in found}
    for name, steps in rates.items():
        for step, rate in steps.items():
            yield BenchRow(f"{name}: lmcache bench l2, {step.lower()}", rate, "GB/s")
    for step in STEPS:
        yield at_least(
            f"kvstore / LMCache's files: lmcache bench l2, {step.lower()}", rates[OURS][step] / rates[THEIRS][step], "ratio", AIM
        )


def note(found: dict[str, list[float]], words: list[str]) -> None:
    """Run the benchmark once, and keep what it measured in GB/s."""
    program, *arguments = words
    with tempfile.NamedTemporaryFile(suffix=".json") as saved:
        subprocess.run(
            [python_of("lmcache").with_name(program), *arguments, "--format", "json", "--output", saved.name],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
            timeout=DEADLINE_S,
        )
        metrics: dict[str, dict[str, Any]] = json.loads(Path(saved.name).read_text())["metrics"]
    for section in metrics.values():
        if section.get("operation") in found:
            found[section["operation"]].append(section["throughput_avg_mbps"] * (1 << 20) / 1e9)


if __name__ == "__main__":
    for row in rows():
        print(f"{row.name}: {row.value:.3g} {row.unit} {row.aim}")
