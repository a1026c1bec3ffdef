"""Promises of topology_tables.py."""

import io
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from kvstore.client.cli.topology_drawing import Subject
from kvstore.client.cli.topology_tables import topology_view
from kvstore.transfer.topology.model import Nic, NumaNode, Topology
from tests.transfer.topology.machines import dgx, server


def shown(subject: Subject, width: int = 200) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(topology_view(subject))
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_nics_gpus_and_rails_of_a_host_are_listed(tmp_path: Path) -> None:
    lines = shown(Subject("node-0", dgx(tmp_path).topology(), "alive"))
    assert lines[0] == "node-0 2 NUMA nodes, 10 NICs, 8 GPUs"
    assert "mlx5_0 ibp24s0 infiniband up 400 Gbit/s 0 0000:18:00.0" in lines
    assert "lo lo loopback up - - - 127.0.0.1, ::1" in lines
    assert "cuda:5 NVIDIA 0x2330 1 0000:ab:00.0" in lines, "no part of an address is taken for an emoji"
    assert "cuda:7 mlx5_7 mlx5_4, mlx5_5, mlx5_6, eno1, mlx5_0, mlx5_1, mlx5_2, mlx5_3" in lines


def test_a_host_without_gpus_has_no_table_of_them(tmp_path: Path) -> None:
    lines = shown(Subject("node-0", server(tmp_path).topology()))
    assert not [line for line in lines if line.startswith("GPU")]
    assert "cpu:0 mlx5_0 mlx5_1" in lines


def test_a_link_that_is_down_and_a_nic_without_an_interface_are_said_so() -> None:
    topology = Topology("h", (NumaNode(0),), (Nic("mlx5_0", "roce", is_up=False, numa_node=0),))
    lines = shown(Subject("n", topology))
    assert lines[0] == "n 1 NUMA node, 1 NIC, 0 GPUs"
    assert "mlx5_0 - roce down - 0 -" in lines
    assert "cpu:0 - -" in lines


def test_a_node_without_a_topology_says_why() -> None:
    assert shown(Subject("n", None, "dead", "it has not told its topology"))[:2] == ["n (dead)", "it has not told its topology"]


def test_markup_in_names_is_text() -> None:
    topology = replace(Topology("h"), nics=(Nic("[red]a"),))
    assert any(line.startswith("[red]a - ethernet") for line in shown(Subject("[bold]n", topology)))
