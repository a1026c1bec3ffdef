"""Connections without a Hello, to real daemons: they are closed, and those of clients and nodes stay open."""

import socket
from pathlib import Path

import pytest

from kvstore.rpc.address import connect, parse_address
from tests.system.running import DEADLINE_S, System

FLAGS = ("--hello-timeout-s", "0.5", "--max-unauthenticated", "3")


@pytest.mark.promise("peers-vanish")
def test_unauthenticated_connections_do_not_displace_clients(tmp_path: Path) -> None:
    with System(tmp_path) as system:
        master = system.start_master(0, *FLAGS)
        node = system.start_node("n0", "--dram", "8MiB", *FLAGS)
        with system.client() as client:
            client.put(b"k", b"value")
            before = system.node_status().registration_epoch
            facts = [daemon.facts("ready", deadline_s=DEADLINE_S) for daemon in (master, node)]
            addresses = [address for told in facts for address in (told["listen"], f"unix:{told['unix']}")]
            unauthenticated = [connect(parse_address(address), timeout_s=DEADLINE_S) for address in addresses for _ in range(3)]
            for sock in unauthenticated:
                sock.settimeout(DEADLINE_S)
                assert is_closed(sock)
            assert client.get(b"k") == b"value"
            assert system.node_status().registration_epoch == before


def is_closed(sock: socket.socket) -> bool:
    """At once or after the reason."""
    with sock:
        return not sock.recv(4096) or not sock.recv(1)
