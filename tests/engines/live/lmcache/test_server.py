"""LMCache's server with our L2 adapter, started as docs/engines.md prints it."""

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvstore.cli.tools.cluster import ClusterPlan
from tests.client.embedded import embedded
from tests.engines.live import process_group
from tests.engines.live.environments import python_of
from tests.engines.live.pages import MASTER, command
from tests.ports import free_ports

POLL_S = 0.2
STOP_S = 30


@contextmanager
def server(master: str, log: Path) -> Iterator[tuple[str, int]]:
    """Its HTTP address, and the port for engines."""
    port, http_port = free_ports(2)
    program, *arguments = command("lmcache", "server", changes={MASTER: master, "6555": str(port), "6556": str(http_port)})
    with log.open("wb") as output:
        process = process_group.start(
            [python_of("lmcache").with_name(program), *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        address = f"http://127.0.0.1:{http_port}"
        while not is_up(address):
            assert process.poll() is None, log.read_text(errors="replace")
            time.sleep(POLL_S)  # nothing tells of it but its port
        yield address, port
    finally:
        process.terminate()
        process_group.end(process, STOP_S)


def is_up(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/healthcheck", timeout=60) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


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
