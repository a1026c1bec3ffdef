"""Promises of json_form.py: what is written is read, an operator's file overrides what was found, and errors name the place."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.errors import ConfigError, ProtocolError
from kvstore.transfer.topology.json_form import (
    MAX_ENTRIES,
    as_json,
    dump_topology,
    override_from_file,
    parse_topology,
)
from kvstore.transfer.topology.model import Nic, NumaNode, RailPreference, Topology
from tests.transfer.topology.machines import dgx, laptop, server

FOUND = Topology(
    "h",
    (NumaNode(0, (10, 21)), NumaNode(1, (21, 10))),
    (Nic("a", addresses=("10.0.0.1",), numa_node=0), Nic("b", addresses=("10.0.1.1",), numa_node=1)),
)


@pytest.mark.parametrize("machine", [dgx, server, laptop])
def test_a_topology_comes_back_with_its_matrix(machine: Any, tmp_path: Path) -> None:
    topology = machine(tmp_path).topology()
    data = dump_topology(topology)
    assert len(data) < 8 << 10
    again = parse_topology(data)
    assert (again.host, again.numa_nodes, again.nics, again.gpus) == (topology.host, topology.numa_nodes, topology.nics, topology.gpus)
    assert again.matrix == topology.matrix
    assert dump_topology(again) == data


def document(**changed: Any) -> dict[str, Any]:
    return as_json(FOUND) | changed


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"version": 2}, r"^version: this topology has form 2, this release reads 1"),
        ({"version": True}, r"^version: expected a whole number"),
        ({"host": 7}, r"^host: expected a printable text of 0 to 255 bytes, not 7"),
        ({"host": "line\nbreak"}, r"^host: expected a printable"),
        ({"host": "\ud800"}, r"^host: expected a printable"),
        ({"host": "x" * 256}, r'^host: expected a printable .* not "x{39}\.\.\.$'),
        ({"nics": {}}, r"^nics: expected a list of at most 1024, not \{\}"),
        ({"nics": [{}] * (MAX_ENTRIES + 1)}, r"^nics: expected a list of at most 1024"),
        ({"nics": [7]}, r"^nics\[0\]: expected an object"),
        ({"nics": [{}]}, r"^nics\[0\]: there is no 'name'"),
        ({"nics": [{"name": ""}]}, r"^nics\[0\]\.name: expected a printable text of 1"),
        ({"nics": [{"name": "a"}, {"name": "a"}]}, r"^nics: two of them have the same name"),
        ({"nics": [{"name": "a", "kind": "token ring"}]}, r"^nics\[0\]\.kind: expected one of infiniband, roce, ethernet, loopback"),
        ({"nics": [{"name": "a", "speed_gbit_s": "fast"}]}, r'^nics\[0\]\.speed_gbit_s: expected a number .* not "fast"'),
        ({"nics": [{"name": "a", "speed_gbit_s": float("nan")}]}, r"^nics\[0\]\.speed_gbit_s: expected a number .* not NaN"),
        ({"nics": [{"name": "a", "speed_gbit_s": -1}]}, r"^nics\[0\]\.speed_gbit_s"),
        ({"nics": [{"name": "a", "speed_gbit_s": True}]}, r"^nics\[0\]\.speed_gbit_s"),
        ({"nics": [{"name": "a", "is_up": 1}]}, r"^nics\[0\]\.is_up: expected true or false, not 1"),
        ({"nics": [{"name": "a", "numa_node": -2}]}, r"^nics\[0\]\.numa_node: expected a whole number from -1"),
        ({"nics": [{"name": "a", "addresses": ["10.0.0.1", 2]}]}, r"^nics\[0\]\.addresses\[1\]"),
        ({"numa_nodes": [{"number": 0, "distances": ["x"]}]}, r"^numa_nodes\[0\]\.distances\[0\]"),
        ({"gpus": [{"index": 0}, {"index": 0}]}, r"^gpus: two of them"),
        ({"matrix": []}, r"^matrix: expected an object"),
        ({"matrix": {"cpu": [[], []]}}, r"^matrix\.cpu: expected a location: cpu:N or cuda:N"),
        ({"matrix": {"cpu:0": [["a"]]}}, r"^matrix\.cpu:0: expected two lists of NICs"),
        ({"matrix": {"cpu:0": [["a"], "b"]}}, r"^matrix\.cpu:0\[1\]: expected a list"),
        ({"matrix": {"cpu:0": [["a"], ["x"]]}}, r"^matrix\.cpu:0, available: there is no NIC 'x'; there are: a, b"),
    ],
)
def test_an_error_names_the_place(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        parse_topology(json.dumps(document(**changed)).encode())


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000, b"1" * 5000])
def test_what_is_not_json_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"^a topology is JSON|^the document"):
        parse_topology(data)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_any_json_gives_a_topology_or_a_protocol_error(value: Any) -> None:
    for data in (json.dumps(value), json.dumps(document(nics=value)), json.dumps(document(matrix=value))):
        try:
            parse_topology(data.encode())
        except ProtocolError:
            continue


def written(folder: Path, value: Any) -> Path:
    path = folder / "topology.json"
    path.write_text(json.dumps(value))
    return path


def test_a_file_with_the_matrix_alone_replaces_its_locations(tmp_path: Path) -> None:
    override = override_from_file(written(tmp_path, {"cpu:0": [["b"], ["a"]], "cuda:0": [["a"], []]}))
    override.check(FOUND)
    topology = override.apply(FOUND)
    assert topology.matrix == {
        "cpu:0": RailPreference(("b",), ("a",)),
        "cpu:1": RailPreference(("b",), ("a",)),
        "cuda:0": RailPreference(("a",), ()),
    }
    assert topology.nics == FOUND.nics


def test_a_file_with_a_matrix_of_other_nics_is_refused(tmp_path: Path) -> None:
    override = override_from_file(written(tmp_path, {"cpu:0": [["mlx5_0"], []]}))
    with pytest.raises(ConfigError, match=r"topology\.json: cpu:0, preferred: there is no NIC 'mlx5_0'; there are: a, b"):
        override.check(FOUND)
    with pytest.raises(ConfigError, match="there are: none"):
        override.check(Topology("h"))
    assert override.apply(FOUND).matrix == FOUND.matrix, "one that is unplugged later is only left out"


def test_a_whole_topology_overrides_all_but_link_state(tmp_path: Path) -> None:
    nics = [
        {"name": "a", "numa_node": 1, "speed_gbit_s": 25},
        {"name": "b", "addresses": ["10.5.0.1"]},
        {"name": "elsewhere", "addresses": ["10.6.0.1"]},
    ]
    override = override_from_file(written(tmp_path, {"version": 1, "host": "other", "nics": nics}))
    down = Topology("h", (), (FOUND.nics[0], Nic("b", is_up=False)))
    topology = override.apply(down)
    assert topology.host == "other"
    assert topology.nics == (
        Nic("a", addresses=("10.0.0.1",), numa_node=1, speed_gbit_s=25.0),
        Nic("b", addresses=("10.5.0.1",), is_up=False),
        Nic("elsewhere", addresses=("10.6.0.1",)),
    )


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the topology .*nowhere: No such file"):
        override_from_file(tmp_path / "nowhere")
    path = written(tmp_path, {"version": 1, "host": "h", "nics": [{"name": "a", "is_up": "no"}]})
    with pytest.raises(ConfigError, match=r'topology\.json: nics\[0\]\.is_up: expected true or false, not "no"'):
        override_from_file(path)
    with pytest.raises(ConfigError, match=r"topology\.json: the document: expected an object"):
        override_from_file(written(tmp_path, []))
