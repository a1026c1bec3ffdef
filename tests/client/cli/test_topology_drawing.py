"""Promises of topology_drawing.py: the drawing is well-formed SVG that shows every device, its state, and a line to each preferred rail."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvstore.client.cli.topology_drawing import Subject, draw, speed
from kvstore.transfer.topology.model import Gpu, Nic, NumaNode, Rails, Topology
from tests.transfer.topology.machines import Machine, dgx, laptop, server

SVG = "{http://www.w3.org/2000/svg}"
EMPTY = Topology("h")


def elements(svg: str, tag: str, style: str = "") -> list[ElementTree.Element]:
    found = ElementTree.fromstring(svg).iter(SVG + tag)
    return [element for element in found if style in (element.get("class") or "").split() or not style]


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in elements(svg, "text")]


@pytest.mark.parametrize("machine", [dgx, server, laptop])
def test_every_device_is_there_and_a_line_leads_to_each_preferred_rail(machine: Callable[[Path], Machine], tmp_path: Path) -> None:
    topology = machine(tmp_path).topology()
    svg = draw([Subject("node-0", topology, "alive")])
    shown = texts(svg)
    assert shown[0] == "node-0"
    for nic in topology.nics:
        assert any(text in (nic.name, f"{nic.name} ({nic.interface})") for text in shown)
    assert {f"cuda:{gpu.index}" for gpu in topology.gpus} | {f"cpu:{node.number}" for node in topology.numa_nodes} <= set(shown)
    assert len(elements(svg, "path")) == sum(len(rails.preferred) for rails in topology.matrix.values())
    assert len(elements(svg, "path", "gpu")) == sum(len(topology.preferred(f"cuda:{gpu.index}").preferred) for gpu in topology.gpus)


def test_a_link_that_is_down_is_dashed_says_so_and_has_no_line() -> None:
    up, down = Nic("eth0", addresses=("10.0.0.1",), numa_node=0, speed_gbit_s=25), Nic("eth1", numa_node=0, is_up=False, speed_gbit_s=25)
    svg = draw([Subject("n", Topology("h", (NumaNode(0),), (up, down)))])
    assert len(elements(svg, "rect", "down")) == 1
    assert texts(svg).count("down") == texts(svg).count("25 Gbit/s") == 1
    assert len(elements(svg, "path")) == 1


def test_lines_end_at_the_cards_that_they_connect() -> None:
    svg = draw([Subject("n", Topology("h", (NumaNode(0), NumaNode(1)), (Nic("a", addresses=("10.0.0.1",), numa_node=1),)))])
    middles = [float(card.get("y", "")) + float(card.get("height", "")) / 2 for card in elements(svg, "rect", "card")]
    for line in elements(svg, "path"):
        begin, *_, end = (float(y) for _x, y in re.findall(r"(\S+) ([\d.]+)", (line.get("d") or "").replace("M", "").replace("C", "")))
        assert {begin, end} <= set(middles)


def test_a_node_without_a_topology_is_a_panel_with_the_reason() -> None:
    svg = draw([Subject("n", None, "dead", "it has not told its topology")])
    assert texts(svg)[:2] == ["n (dead)", "it has not told its topology"]


def test_devices_on_no_numa_node_have_a_box_of_their_own_and_unnamed_gpus_their_address() -> None:
    gpu = Gpu(3, pci_path="pci0000:00/0000:01:00.0")
    svg = draw([Subject("n", Topology("h", nics=(Nic("veth", addresses=("10.0.0.1",)),), gpus=(gpu,)))])
    assert {"on no NUMA node", "cuda:3", "0000:01:00.0", "veth"} <= set(texts(svg))
    assert len(elements(svg, "path", "gpu")) == 1


def test_a_location_of_an_override_without_a_device_has_no_line() -> None:
    topology = Topology("h", (NumaNode(0),), (Nic("a", addresses=("10.0.0.1",)),), override={"cuda:7": Rails(("a",), ())})
    assert len(elements(draw([Subject("n", topology)]), "path")) == 1


def test_names_of_any_characters_and_lengths_leave_the_document_whole() -> None:
    nic = Nic('<&">' + "x" * 200, addresses=tuple(f"10.0.0.{n}" for n in range(50)), numa_node=0)
    svg = draw([Subject("<script>" + "y" * 300, Topology("h", (NumaNode(0),), (nic,)))])
    assert any(text.startswith("<script>yyy") and text.endswith("…") for text in texts(svg))
    assert any(text.startswith('<&">xxx') and text.endswith("…") for text in texts(svg))


def test_a_cluster_is_drawn_in_columns_within_the_page() -> None:
    for count, columns in ((0, 1), (1, 1), (2, 2), (4, 2), (7, 3), (30, 3)):
        svg = draw([Subject(f"n{index}", EMPTY if index % 2 else None) for index in range(count)])
        root = ElementTree.fromstring(svg)
        width, height = float(root.get("width", "")), float(root.get("height", ""))
        places = [re.findall(r"[\d.]+", group.get("transform") or "") for group in elements(svg, "g")]
        assert len({x for x, _y in places}) == min(columns, count)
        assert len(set(map(tuple, places))) == count
        assert all(float(x) < width and float(y) < height for x, y in places)


def test_it_has_colours_for_dark_ground() -> None:
    assert "prefers-color-scheme: dark" in draw([])


def test_a_speed_is_said_if_it_is_known() -> None:
    assert speed(Nic("a", speed_gbit_s=2.5)) == "2.5 Gbit/s"
    assert speed(replace(Nic("a"), speed_gbit_s=0)) == "speed unknown"
