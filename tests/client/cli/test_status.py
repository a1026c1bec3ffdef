"""Promises of status.py, through the command line, against a real cluster."""

import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from kvstore.client.cli.main import kvstore
from tests.client.embedded import embedded


@pytest.fixture(scope="module")
def master() -> Iterator[str]:
    with embedded() as cluster:
        yield cluster.address


def output(master: str, *arguments: str) -> str:
    result = CliRunner().invoke(kvstore, [*arguments, "--master", master], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_status_shows_the_cluster_and_json_has_all_of_it(master: str) -> None:
    assert "1 of 1 alive" in output(master, "status")
    found = json.loads(output(master, "status", "--json"))
    assert (found["catalog"], found["blocks"], found["nodes"][0]["state"]) == ("memory:", 0, "alive")


def test_status_says_with_which_nodes_of_this_host_memory_is_shared(master: str) -> None:
    assert "node-0: yes" in output(master, "status")
    assert json.loads(output(master, "status", "--json"))["shared_memory"] == {"node-0": ""}


def test_a_table_in_a_pipe_is_as_wide_as_it_needs(master: str) -> None:
    (shown,) = [line for line in output(master, "nodes").splitlines() if line.startswith("node-0")]
    assert "dram 4 MiB" in shown
    assert "nvme 16 MiB" in shown
    assert "…" not in shown


def test_a_node_that_is_taken_for_a_master_says_what_it_is(master: str) -> None:
    (node,) = json.loads(output(master, "nodes", "--json"))
    result = CliRunner().invoke(kvstore, ["exists", "key", "--master", node["tcp"]])
    assert (result.exit_code, result.stderr) == (
        2,
        f"kvstore: error: no master can be reached: {node['tcp']} is 'node-0', which is no master\n",
    )


def test_nodes_shows_each_node(master: str) -> None:
    assert "node-0" in output(master, "nodes")
    assert json.loads(output(master, "nodes", "--json"))[0]["name"] == "node-0"


def test_tiers_shows_each_tier_of_each_node(master: str) -> None:
    assert "0 B" in output(master, "tiers")
    tiers = json.loads(output(master, "tiers", "--json"))
    assert [(tier["node"], tier["name"], tier["capacity_bytes"]) for tier in tiers] == [
        ("node-0", "dram", 4 << 20),
        ("node-0", "nvme", 16 << 20),
    ]
