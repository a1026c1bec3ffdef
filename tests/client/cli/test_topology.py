"""Promises of topology.py, through the command line, against a real cluster."""

import json
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from kvstore.client.cli.main import kvstore
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.control_pb2_grpc import ControlStub
from kvstore.transfer.topology.discovery import Discovery
from kvstore.transfer.topology.json_form import as_json, parse_topology
from tests.client.embedded import embedded
from tests.master.running import TIMEOUT_S, Places, master_in_thread
from tests.transfer.topology.machines import server


@pytest.fixture(scope="module")
def master() -> Iterator[str]:
    with embedded() as cluster:
        yield cluster.address


def run(*arguments: str) -> Result:
    return CliRunner().invoke(kvstore, ["topology", *arguments], catch_exceptions=False)


def output(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def refusal(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 2
    return result.stderr


def test_the_nodes_topologies_are_shown_as_the_master_has_them(master: str) -> None:
    assert "node-0" in output("--master", master)
    (entry,) = json.loads(output("--master", master, "--json"))
    assert (entry["node"], entry["state"], entry["note"]) == ("node-0", "alive", "")
    here = as_json(Discovery().look())
    assert entry["topology"]["nics"] == here["nics"]
    assert json.loads(output("--master", master, "--node", "node-0", "--json")) == entry["topology"]


def test_this_machine_is_shown_without_a_master(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "lo " in output("--local")
    found = output("--local", "--json")
    assert parse_topology(found.encode()).nics == Discovery().look().nics
    (tmp_path / "topology.json").write_text(found.replace('"host": "', '"host": "not '))
    monkeypatch.setenv("KVSTORE_TRANSFER_TOPOLOGY", str(tmp_path / "topology.json"))
    assert json.loads(output("--local", "--json"))["host"].startswith("not "), "what is printed can be edited and read"


def test_a_drawing_is_written_to_a_file_or_standard_output(master: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.svg"
    assert output("--master", master, "--svg", str(path)) == ""
    assert ElementTree.fromstring(path.read_text()).tag.endswith("svg")
    assert ElementTree.fromstring(output("--local", "--svg", "-")).tag.endswith("svg")
    assert json.loads(output("--local", "--svg", str(path), "--json"))["version"] == 1
    assert "cannot write the drawing to /proc/nowhere/x: No such file" in refusal("--local", "--svg", "/proc/nowhere/x")


def test_what_does_not_go_together_is_refused() -> None:
    assert "give one of them" in refusal("--local", "--node", "a")
    assert "give --svg a file" in refusal("--local", "--svg", "-", "--json")


def test_a_node_that_there_is_not_is_refused_with_those_there_are(master: str) -> None:
    assert "there is no node 'node-9'; there are: node-0" in refusal("--master", master, "--node", "node-9")


@pytest.fixture
def strange(tmp_path: Path) -> Iterator[Places]:
    """A master of nodes that told a machine's topology, none, and one that is none."""
    told = {"a": json.dumps(as_json(server(tmp_path / "machine").topology())).encode(), "b": b"", "c": b'{"version": 9}'}
    with master_in_thread(tmp_path / "run", node_ttl_s=60.0) as places, places.stub() as stub:
        register(stub, told)
        yield places


def register(stub: ControlStub, told: dict[str, bytes]) -> None:
    for name, topology in told.items():
        stub.Register(pb.RegisterRequest(name=name, instance=1, tcp="t:1", topology=topology), timeout=TIMEOUT_S)


def test_nodes_whose_topology_cannot_be_had_do_not_hide_the_others(strange: Places) -> None:
    text = output("--master", strange.listen)
    assert "mlx5_1" in text
    assert "it has not told its topology" in text
    entries = json.loads(output("--master", strange.listen, "--json"))
    assert [(entry["node"], entry["topology"] is None) for entry in entries] == [("a", False), ("b", True), ("c", True)]
    assert entries[2]["note"] == "its topology cannot be read: version: this topology has form 9, this release reads 1"
    assert "b: it has not told its topology" in refusal("--master", strange.listen, "--node", "b", "--json")
