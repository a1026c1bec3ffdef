"""Both packages called mooncake, each with a cluster of its own, executing generated calls in a process of its own environment."""

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvstore.testing.transfer.awaited import eventually
from tests.client.processes import cluster
from tests.engines.live.environments import python_of
from tests.engines.live.mooncake.differential.material import Call
from tests.engines.live.mooncake.package import install
from tests.ports import free_ports

CHILD: Final = Path(__file__).with_name("child.py")
LEASE_S: Final = 10
SEGMENT_BYTES, BUFFER_BYTES = 64 << 20, 16 << 20
ONE_ATTEMPT: Final = {"MC_STORE_CLIENT_SETUP_RETRIES": "1"}
Groups = Sequence[tuple[str, list[Call]]]
Results = dict[str, list[Any]]
"""By group, for each call: its result, and the memory after it."""


def executed(python: Path, master: str, groups: Groups, environment: dict[str, str], log: Path) -> Results:
    """Execute the groups in one process. Raises AssertionError if it ends."""
    setup = ["localhost", "P2PHANDSHAKE", SEGMENT_BYTES, BUFFER_BYTES, "tcp", "", master]
    command = [str(python), str(CHILD), json.dumps({"setup": setup, "master": master})]
    with log.open("wb") as errors:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env={**os.environ, **environment})
    assert child.stdin is not None
    assert child.stdout is not None
    with child:
        assert child.stdout.readline() == b'"ready"\n', log.read_text()
        results: Results = {}
        for name, calls in groups:
            child.stdin.write(json.dumps(calls).encode() + b"\n")
            child.stdin.flush()
            lines = [(one, child.stdout.readline()) for one in calls]
            assert all(line for _, line in lines), f"{python} ended in {name}: {next(one for one, line in lines if not line)}"
            results[name] = [json.loads(line) for _, line in lines]
        child.stdin.close()
    return results


def of_kvstore(groups: Groups, folder: Path) -> Results:
    with cluster(folder) as started:
        started.start_node("--dram", "256MiB")
        environment = {"PYTHONPATH": install(folder), "KVSTORE_MOONCAKE_LEASE_S": str(LEASE_S), **ONE_ATTEMPT}
        return executed(python_of("mooncake"), started.address, groups, environment, folder / "kvstore.log")


def of_mooncake(groups: Groups, folder: Path) -> Results:
    python, log = python_of("mooncake-wheel"), folder / "master.log"
    port, metrics_port = free_ports(2)
    flags = ["-rpc_address", "127.0.0.1", "-rpc_port", str(port), "-metrics_port", str(metrics_port)]
    flags += ["-default_kv_lease_ttl", f"{LEASE_S}s"]
    with log.open("wb") as output:
        master = subprocess.Popen([str(python), "-m", "mooncake.cli", *flags], stdout=output, stderr=output)
    try:
        eventually(lambda: master.poll() is not None or _listens(port), "Mooncake's master serves")
        assert master.poll() is None, log.read_text()
        return executed(python, f"127.0.0.1:{port}", groups, ONE_ATTEMPT, folder / "mooncake.log")
    finally:
        master.terminate()
        master.wait(30)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
