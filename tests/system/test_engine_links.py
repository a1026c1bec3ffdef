"""A node and a client on two hosts (network namespaces) while the network between their engines changes: values are right all the time,
by the engine where there is a way for it, else by message."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.client.config import ClientSettings
from tests.forked import said
from tests.namespaces import TwoHosts, two_hosts
from tests.store.daemons import running
from tests.system.far_client import FarClient
from tests.system.hosts import MASTER, master_flags, node_flags
from tests.system.running import MIB, PROCESS_POLL_S, until

ENGINE_PORT = 7450
KEYS = [f"k{number}" for number in range(8)]
WHOLE = 8 * MIB
STORED, RIGHT = [True] * 8, [True] * 8
DROP = f"table inet engine {{ chain input {{ type filter hook input priority 0; tcp dport {ENGINE_PORT} drop; }}; }}"
DEADLINE_S = ClientSettings().deadline_s


def await_links(hosts: TwoHosts, *devices: str) -> None:
    """The kernel takes up to a second to say that a link is up."""
    for host in (0, 1):
        for device in devices:
            command = ["ip", "-br", "link", "show", device]
            until(lambda host=host, command=command: " UP " in hosts.run(host, command), f"{device} up", every_s=PROCESS_POLL_S)  # type: ignore[misc]


@contextmanager
def a_node(hosts: TwoHosts, folder: Path, *, rails: str) -> Iterator[str]:
    """A master and a node on host 0, whose engine uses these rails: the master's address. Both are reached by the first rail."""
    await_links(hosts, "rail0")
    config = folder / "node.toml"
    config.write_text(f'[transfer]\nrails = "{rails}"\nlisten_port = {ENGINE_PORT}\n')
    here, address = hosts.names[0], hosts.rails[0].addresses[0]
    node = node_flags(f"{address}:{MASTER}", address, "n0", folder / "n")
    with (
        running("master", *master_flags(address, folder / "m"), log=folder / "master.log", host=here),
        running("node", *node, "--dram", "64MiB", "--config", str(config), log=folder / "node.log", host=here) as daemon,
    ):
        assert daemon.line()["event"] == "ready"
        yield f"{address}:{MASTER}"


@pytest.mark.promise("dead-node")
def test_engine_behind_firewall_is_bypassed_then_reused(tmp_path: Path) -> None:
    with two_hosts(0) as hosts, a_node(hosts, tmp_path, rails="rail0") as master, FarClient(hosts, 1, master) as client:
        assert client.put(KEYS, MIB)["done"] == STORED
        first = client.get(KEYS, MIB)
        assert (first["done"], first["engine_bytes"]) == (RIGHT, WHOLE)
        hosts.run(0, ["nft", DROP])
        cut = client.get(KEYS, MIB)
        assert (cut["done"], cut["engine_bytes"]) == (RIGHT, 0)
        assert cut["seconds"] < DEADLINE_S, "packets vanish and nobody is told: found out in time all the same"
        again = client.get(KEYS, MIB)
        assert (again["done"], again["engine_bytes"]) == (RIGHT, 0)
        assert again["seconds"] < cut["seconds"], "it is not tried again at once"
        others = [key + " too" for key in KEYS]
        assert client.put(others, MIB)["done"] == STORED
        assert client.get(others, MIB)["done"] == RIGHT
        hosts.run(0, ["nft", "delete", "table", "inet", "engine"])
        client.rest()
        until(lambda: client.get(KEYS, MIB)["engine_bytes"] == WHOLE, "the engine is used again")


@pytest.mark.promise("dead-node")
def test_a_node_whose_link_gets_another_address_is_reached_there(tmp_path: Path) -> None:
    with two_hosts(0, 0) as hosts:
        await_links(hosts, "rail1")
        with a_node(hosts, tmp_path, rails="rail1") as master, FarClient(hosts, 1, master) as client:
            assert client.put(KEYS, MIB)["done"] == STORED
            assert client.get(KEYS, MIB)["engine_bytes"] == WHOLE
            hosts.run(0, ["ip", "address", "flush", "dev", "rail1"])
            hosts.run(0, ["ip", "address", "add", "10.77.1.9/24", "dev", "rail1"])
            moved = client.get(KEYS, MIB)
            assert moved["done"] == RIGHT, "by the old way's failure, and the new one or a message"
            until(
                lambda: client.get(KEYS, MIB) | {"seconds": 0} == {"done": RIGHT, "engine_bytes": WHOLE, "seconds": 0},
                "the new way is used",
            )


def test_engine_with_late_link_is_used_from_first_failure(tmp_path: Path) -> None:
    with two_hosts(0, 0) as hosts:
        hosts.run(1, ["ip", "link", "set", "rail1", "down"])
        with a_node(hosts, tmp_path, rails="rail1") as master, FarClient(hosts, 1, master) as client:
            client.put(["small"], 100)  # now it knows how the node described itself
            hosts.run(1, ["ip", "link", "set", "rail1", "up"])
            await_links(hosts, "rail1")
            until(lambda: "tcp rail1" in status(hosts, master), "the master knows of the link", every_s=PROCESS_POLL_S)
            assert client.put(KEYS, MIB) | {"seconds": 0} == {"done": STORED, "engine_bytes": 0, "seconds": 0}
            assert client.get(KEYS, MIB) | {"seconds": 0} == {"done": RIGHT, "engine_bytes": WHOLE, "seconds": 0}


def status(hosts: TwoHosts, master: str) -> str:
    return said("kvstore.cli.main", "status", "--master", master, "--json", host=hosts.names[0])
