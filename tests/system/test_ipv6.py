"""Every interface of both families, and a host that has no IPv4 at all, with `kvstore up` and the commands as programs."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.client import Client
from tests.forked import COMMAND, Forked, said
from tests.namespaces import run, two_hosts
from tests.ports import free_ports

OPEN = {"KVSTORE_MASTER_ALLOW_UNAUTHENTICATED": "true", "KVSTORE_NODE_ALLOW_UNAUTHENTICATED": "true"}


@contextmanager
def started(folder: Path, *arguments: str, host: str = "") -> Iterator[dict[str, str]]:
    """`kvstore up`, and where it says that it is ready."""
    with (folder / "up.log").open("w+") as log:
        up = Forked(COMMAND, ["up", "--json", "--dram", "8MiB", *arguments], environment={**os.environ, **OPEN}, stderr=log, host=host)
        assert up.stdout is not None
        with up.stdout:
            told = (json.loads(line) for line in up.stdout)
            places = next((places for places in told if places["event"] == "ready"), None)
            try:
                assert places is not None, (folder / "up.log").read_text()
                yield places
            finally:
                up.terminate()
                assert up.wait(60) == 0


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6, or not beside IPv4")
def test_all_interfaces_of_ipv6_are_those_of_ipv4_too(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with started(tmp_path, "--listen", f"[::]:{port}"):
        for host in ("127.0.0.1", "[::1]"):
            with Client(f"{host}:{port}") as client:
                assert client.put(host.encode(), b"value") is True
                assert client.get(host.encode()) == b"value"


def test_a_host_without_ipv4_has_nodes_http_console_and_doctor(tmp_path: Path) -> None:
    with two_hosts(0) as hosts:
        host = hosts.names[0]
        for device in ("lo", hosts.rails[0].device):
            run(["ip", "-n", host, "-4", "address", "flush", "dev", device])
        with started(tmp_path, "--listen", "[::]:7440", "--nodes", "2", host=host) as places:
            assert places["master"] == "[::1]:7440"
            assert places["console"].startswith("http://[::1]:")
            assert "kvstore" in hosts.run(0, ["curl", "-g", "-s", "-L", places["console"]])
            status = json.loads(said(COMMAND, "status", "--json", "--master", places["master"], host=host))
            assert [node["state"] for node in status["nodes"]] == ["alive", "alive"]
            for node in status["nodes"]:
                assert "kvstore_node" in hosts.run(0, ["curl", "-g", "-s", f"http://{node['http']}/metrics"])
            assert "2 alive" in said(COMMAND, "doctor", "--master", places["master"], host=host)
