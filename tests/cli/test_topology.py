"""Promises of topology.py, through the command line, against a real cluster."""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from kvstore.cli.main import kvstore
from kvstore.cli.topology import HostPanel, draw, topology_view
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.control_pb2_grpc import ControlStub
from kvstore.transfer.topology.discovery import Discovery
from kvstore.transfer.topology.json_form import as_json, parse_topology
from kvstore.transfer.topology.model import Nic, NumaNode, Topology
from tests.master.running import TIMEOUT_S, Places, master_in_thread
from tests.transfer.topology.machines import Machine, dgx, laptop, server

SVG = "{http://www.w3.org/2000/svg}"


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
    here = as_json(Discovery().read_topology())
    assert entry["topology"]["nics"] == here["nics"]
    assert json.loads(output("--master", master, "--node", "node-0", "--json")) == entry["topology"]


def test_this_machine_is_shown_without_a_master(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "lo " in output("--local")
    found = output("--local", "--json")
    assert parse_topology(found.encode()).nics == Discovery().read_topology().nics
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


def test_topology_of_unknown_node_names_the_known_ones(master: str) -> None:
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


def test_topology_unreadable_nodes_do_not_hide_others(strange: Places) -> None:
    text = output("--master", strange.listen)
    assert "mlx5_1" in text
    assert "it has not reported its topology" in text
    entries = json.loads(output("--master", strange.listen, "--json"))
    assert [(entry["node"], entry["topology"] is None) for entry in entries] == [("a", False), ("b", True), ("c", True)]
    assert entries[2]["note"] == "its topology cannot be read: version: this topology has form 9, this release reads 1"
    assert "b: it has not reported its topology" in refusal("--master", strange.listen, "--node", "b", "--json")


def shown(subject: HostPanel, width: int = 200) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(topology_view(subject))
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_nics_gpus_and_rails_of_a_host_are_listed(tmp_path: Path) -> None:
    lines = shown(HostPanel("node-0", dgx(tmp_path).topology(), "alive"))
    assert lines[0] == "node-0 2 NUMA nodes, 10 NICs, 8 GPUs"
    assert "mlx5_0 ibp24s0 infiniband up 400 Gbit/s 0 0000:18:00.0" in lines
    assert "lo lo loopback up - - - 127.0.0.1, ::1" in lines
    assert "cuda:5 NVIDIA 0x2330 1 0000:ab:00.0" in lines, "no part of an address is taken for an emoji"
    assert "cuda:7 mlx5_7 mlx5_4, mlx5_5, mlx5_6, eno1, mlx5_0, mlx5_1, mlx5_2, mlx5_3" in lines


def elements(svg: str, tag: str, style: str = "") -> list[ElementTree.Element]:
    found = ElementTree.fromstring(svg).iter(SVG + tag)
    return [element for element in found if style in (element.get("class") or "").split() or not style]


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in elements(svg, "text")]


@pytest.mark.parametrize("machine", [dgx, server, laptop])
def test_drawing_has_each_device_and_preferred_rail(machine: Callable[[Path], Machine], tmp_path: Path) -> None:
    topology = machine(tmp_path).topology()
    svg = draw([HostPanel("node-0", topology, "alive")])
    shown = texts(svg)
    assert shown[0] == "node-0"
    for nic in topology.nics:
        assert any(text in (nic.name, f"{nic.name} ({nic.interface})") for text in shown)
    assert {f"cuda:{gpu.index}" for gpu in topology.gpus} | {f"cpu:{node.number}" for node in topology.numa_nodes} <= set(shown)
    assert len(elements(svg, "path")) == sum(len(rails.preferred) for rails in topology.matrix.values())
    assert len(elements(svg, "path", "gpu")) == sum(len(topology.preferred(f"cuda:{gpu.index}").preferred) for gpu in topology.gpus)


def test_a_link_that_is_down_is_dashed_says_so_and_has_no_line() -> None:
    up, down = Nic("eth0", addresses=("10.0.0.1",), numa_node=0, speed_gbit_s=25), Nic("eth1", numa_node=0, is_up=False, speed_gbit_s=25)
    svg = draw([HostPanel("n", Topology("h", (NumaNode(0),), (up, down)))])
    assert len(elements(svg, "rect", "down")) == 1
    assert texts(svg).count("down") == texts(svg).count("25 Gbit/s") == 1
    assert len(elements(svg, "path")) == 1


def test_drawing_is_valid_for_names_of_any_characters() -> None:
    nic = Nic('<&">' + "x" * 200, addresses=tuple(f"10.0.0.{n}" for n in range(50)), numa_node=0)
    svg = draw([HostPanel("<script>" + "y" * 300, Topology("h", (NumaNode(0),), (nic,)))])
    assert any(text.startswith("<script>yyy") and text.endswith("…") for text in texts(svg))
    assert any(text.startswith('<&">xxx') and text.endswith("…") for text in texts(svg))
