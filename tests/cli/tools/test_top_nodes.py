"""Promises of top_nodes.py."""

import io

import pytest
from rich.console import Console

from kvstore.cli.tools.top_nodes import LARGE, count_text, nodes_of, nodes_table, spark_lines
from kvstore.console.model import ConsoleModel, Document
from tests.console.serving import Clock
from tests.console.simulated import Simulated


def document_of(full: dict[str, float], dead: tuple[int, ...] = ()) -> Document:
    clock = Clock()
    source = Simulated(4, clock, dead=dead)
    source.full = full
    return ConsoleModel().document(source.status(), at_s=clock(), wall_s=1.0)


def drawn(document: Document, width: int, sort: str = "name", first: int = 0, page: int = 10) -> list[str]:
    console = Console(width=width, file=io.StringIO(), color_system=None, force_terminal=True)
    table, _first = nodes_table(nodes_of(document), sort, first, page, width)
    with console.capture() as found:
        console.print(table)
    return found.get().splitlines()


def test_a_node_is_as_full_as_its_fullest_tier() -> None:
    nodes = nodes_of(document_of({"hbm": 0.1, "dram": 0.9, "nvme": 0.01}))
    assert [(node["fullest"], round(node["share"], 2)) for node in nodes] == [("dram", 0.9)] * 4
    assert [node["hbm_share"] is None for node in nodes] == [False, True, True, False]


def test_a_wider_terminal_has_more_columns() -> None:
    document = document_of({}, dead=(1,))
    heads = [drawn(document, width)[0] for width in (50, 100, 160, 250)]
    assert [len(head.split()) for head in heads] == sorted(len(head.split()) for head in heads)
    assert "nvme" not in heads[1]
    assert all(name in heads[3] for name in ("hbm", "dram", "nvme", "version", "transports", "clients"))
    assert "tcp eth0" in drawn(document, 250)[1]
    assert " - " in drawn(document, 250)[2], "a dead node's last heartbeat"
    assert any("█" * 5 in line for line in drawn(document, LARGE))


def test_the_last_page_is_full() -> None:
    document = document_of({})
    assert nodes_table(nodes_of(document), "name", 99, 3, 100)[1] == 1
    assert [line.split()[0] for line in drawn(document, 100, first=99, page=3)[1:]] == ["node-1", "node-2", "node-3"]


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (9999, "9,999"), (12_345, "12.3 k"), (2_500_000, "2.5 M"), (3e9, "3.0 G")])
def test_counts_are_short(value: float, text: str) -> None:
    assert count_text(value) == text


def test_the_highest_bar_fills_all_lines_and_nothing_is_a_level() -> None:
    assert spark_lines([0, 2, 4], 1) == ["▁▄█"]
    assert spark_lines([0, 2, 3, 4], 2) == ["  ▄█", "▁███"]
    assert spark_lines([], 2) == ["", ""]
    assert spark_lines([0, 0], 1) == ["▁▁"]
