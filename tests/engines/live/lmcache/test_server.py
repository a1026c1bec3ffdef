"""LMCache's server with our L2 adapter, and LMCache's own benchmark of L2 adapters on ours.

Both start as docs/engines.md prints them. The benchmark verifies the values that it loads, and finds all that it stored.
"""

import contextlib
import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvstore.cli.tools.cluster import ClusterPlan
from tests.client.embedded import embedded
from tests.engines.live.environments import python_of
from tests.engines.live.http_engine import HttpEngine
from tests.engines.live.pages import MASTER, command
from tests.ports import free_ports


@contextlib.contextmanager
def server(master: str, log: Path) -> Iterator[tuple[str, int]]:
    """Its HTTP address, and the port for engines."""
    port, http_port = free_ports(2)
    program, *arguments = command("lmcache", "server", changes={MASTER: master, "6555": str(port), "6556": str(http_port)})
    command_line = [python_of("lmcache").with_name(program), *arguments]
    with contextlib.closing(HttpEngine(http_port, command_line, log)) as running:
        yield running.wait("/healthcheck").url, port


def mappings(value: Any) -> Iterator[dict[str, Any]]:
    """All that are anywhere in a JSON value."""
    if isinstance(value, dict):
        yield value
        for each in value.values():
            yield from mappings(each)
    elif isinstance(value, list):
        for each in value:
            yield from mappings(each)


def test_the_server_starts_and_tells_of_the_adapter(tmp_path: Path) -> None:
    with embedded(ClusterPlan(dram="64MiB", is_private=True)) as cluster, server(cluster.address, tmp_path / "log") as (address, _):
        with urllib.request.urlopen(f"{address}/status", timeout=60) as answer:
            status = json.load(answer)
        (adapter,) = [found for found in mappings(status) if found.get("type") == "KVStoreL2Adapter"]
        assert adapter["is_healthy"] is True
        assert adapter["master"] == cluster.address


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
