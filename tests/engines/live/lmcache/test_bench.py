"""LMCache's own benchmark of L2 adapters on ours, as docs/engines.md prints it: it verifies what it loads, and finds all that it stored."""

import json
import subprocess
from pathlib import Path

from kvstore.cli.tools.cluster import ClusterPlan
from tests.client.embedded import embedded
from tests.engines.live.environments import python_of
from tests.engines.live.pages import MASTER, command


def test_lmcache_bench_l2_verifies_what_it_stored(tmp_path: Path) -> None:
    with embedded(ClusterPlan(dram="256MiB", is_private=True)) as cluster:
        program, *arguments = command("lmcache", "bench", "l2", changes={MASTER: cluster.address})
        saved = tmp_path / "metrics.json"
        done = subprocess.run(
            [python_of("lmcache").with_name(program), *arguments, "--format", "json", "--output", saved],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout
    assert "All 32 keys data verified OK" in done.stdout
    metrics = json.loads(saved.read_text())["metrics"]
    measured = {
        each["operation"]: (each["total_success"], each["total_keys"], each["rounds_timed_out"])
        for section, each in metrics.items()
        if section != "config"
    }
    assert measured == dict.fromkeys(("Store", "Lookup", "Load"), (96, 96, 0))
