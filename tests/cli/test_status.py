"""Promises of status.py, through the command line, against a real cluster."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvstore.cli.main import kvstore
from kvstore.client.config import ClientSettings
from kvstore.client.control import find_control
from tests.ports import free_ports
from tests.system.running import System, stopped, until


def output(master: str, *arguments: str) -> str:
    result = CliRunner().invoke(kvstore, [*arguments, "--master", master], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_status_shows_the_cluster_and_json_has_all_of_it(master: str) -> None:
    assert "1 of 1 alive" in output(master, "status")
    found = json.loads(output(master, "status", "--json"))
    assert (found["catalog"], found["blocks"], found["nodes"][0]["state"]) == ("memory:", 0, "alive")


def test_status_shows_shared_memory_of_local_nodes(master: str) -> None:
    assert "node-0: yes" in output(master, "status")
    assert json.loads(output(master, "status", "--json"))["shared_memory"] == {"node-0": ""}


def test_a_table_in_a_pipe_is_as_wide_as_it_needs(master: str) -> None:
    (shown,) = [line for line in output(master, "nodes").splitlines() if line.startswith("node-0")]
    assert "dram 4 MiB" in shown
    assert "nvme 16 MiB" in shown
    assert "…" not in shown


def test_node_taken_for_a_master_is_named(master: str) -> None:
    (node,) = json.loads(output(master, "nodes", "--json"))
    line = f"kvstore: error: no master can be reached: {node['tcp']} is 'node-0', not a master\n"
    result = CliRunner().invoke(kvstore, ["exists", "key", "--master", node["tcp"]])
    assert (result.exit_code, result.stderr) == (2, line)
    # In a child process: gRPC writes messages on invalid addresses directly to file descriptor 2.
    command = [sys.executable, "-m", "kvstore.cli.main", "status", "--master", node["tcp"]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


def test_a_port_of_the_master_that_is_not_for_clients_is_named(master: str) -> None:
    places = {
        json.loads(output(master, "status", "--json"))["http"]: "but HTTP: that is the port of health, metrics and the console",
        find_control(ClientSettings(master=master)): "but gRPC: that is the port of the control plane",
    }
    for place, said in places.items():
        result = CliRunner().invoke(kvstore, ["status", "--master", place])
        assert result.exit_code == 2
        assert said in result.stderr


def test_tiers_shows_each_tier_of_each_node(master: str) -> None:
    assert "0 B" in output(master, "tiers")
    tiers = json.loads(output(master, "tiers", "--json"))
    assert [(tier["node"], tier["name"], tier["capacity_bytes"]) for tier in tiers] == [
        ("node-0", "dram", 4 << 20),
        ("node-0", "nvme", 16 << 20),
    ]
    assert [tier["next_victim"] for tier in tiers] == [None, None]


@pytest.mark.promise("observable")
def test_trouble_comes_first_and_is_the_exit_status(tmp_path: Path) -> None:
    with System(tmp_path) as system:
        system.start_master()
        for name in ("n1", "n2"):
            system.start_node(name, "--dram", "16MiB")
        system.await_alive("n1", "n2")
        for victim, line in (("n2", "1 of 2 alive; dead: n2"), ("n1", "0 of 2 alive; dead: n1, n2")):
            system.nodes[victim].kill()
            until(lambda victim=victim: system.node_status(victim).state == "dead", f"{victim} is dead")  # type: ignore[misc]
            result = CliRunner().invoke(kvstore, ["status", "--master", system.address])
            assert result.exit_code == 1
            assert line in result.stdout
            assert result.stdout.splitlines()[0].startswith(("warning: ", "error: "))
            troubles = json.loads(CliRunner().invoke(kvstore, ["status", "--master", system.address, "--json"]).stdout)["problems"]
            assert len(troubles) == 1


def run(address: str, *arguments: str) -> Result:
    return CliRunner().invoke(kvstore, ["health", "--master", address, "--deadline-s", "20", *arguments])


@pytest.mark.promise("observable")
def test_each_daemon_has_a_line_and_one_that_died_is_status_1(tmp_path: Path) -> None:
    with System(tmp_path) as system:
        system.start_master()
        for name in ("n1", "n2"):
            system.start_node(name, "--dram", "16MiB")
        system.await_alive("n1", "n2")
        result = run(system.address)
        assert result.exit_code == 0
        master, *nodes = result.stdout.splitlines()
        assert master.startswith(f"master {system.address} is healthy: owner, took ")
        assert nodes == ["node n1 is healthy: alive", "node n2 is healthy: alive"]
        system.nodes["n2"].kill()
        until(lambda: system.node_status("n2").state == "dead", "n2 is dead")
        result = run(system.address)
        assert (result.exit_code, result.stdout.splitlines()[1:]) == (1, ["node n1 is healthy: alive", "node n2 is unhealthy: dead"])
        found = json.loads(run(system.address, "--json").stdout)
        assert [(one["daemon"], one["name"], one["is_healthy"]) for one in found[1:]] == [("node", "n1", True), ("node", "n2", False)]


def test_without_a_master_it_is_status_2_and_says_why() -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    result = run(address)
    assert result.exit_code == 2
    assert result.stdout.startswith(f"master {address} is unhealthy: cannot connect to {address}")
    assert result.stderr.startswith("kvstore: error: no master can be reached: ")


def test_a_node_that_hangs_is_named_with_the_whole_deadline(tmp_path: Path) -> None:
    told = re.compile(r"kvstore: error: .*(n0|127\.0\.0\.1).*: no answer within the deadline of 3 s\n")
    with System(tmp_path) as system:
        system.start_master()
        node = system.start_node("n0", "--dram", "16MiB")
        system.await_alive("n0")

        def is_named() -> bool:
            command = ["put", "key", "-", "--master", system.address, "--deadline-s", "3"]
            result = CliRunner().invoke(kvstore, command, input=b"value")
            return result.exit_code == 2 and told.fullmatch(result.stderr) is not None

        with stopped(node.pid):
            until(is_named, "the node is named")
