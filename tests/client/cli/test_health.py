"""Promises of the command `health`, with real processes."""

import json
import re
from pathlib import Path

from click.testing import CliRunner, Result

from kvstore.client.cli.main import kvstore
from tests.ports import free_ports
from tests.system.running import System, stopped, until


def run(address: str, *arguments: str) -> Result:
    return CliRunner().invoke(kvstore, ["health", "--master", address, "--deadline-s", "20", *arguments])


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
