"""Promises of bench_report.py."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from kvstore.client.tools.bench_report import Row, at_least, at_most, table, write


@pytest.mark.parametrize(("value", "met"), [(1.9, False), (2.0, True), (2.1, True)])
def test_an_aim_at_least_is_met_from_its_value_on(value: float, met: bool) -> None:
    assert at_least("speed", value, "GB/s", 2) == Row("speed", value, "GB/s", ">= 2", met)


@pytest.mark.parametrize(("value", "met"), [(59.9, True), (60.0, True), (60.1, False)])
def test_an_aim_at_most_is_met_up_to_its_value(value: float, met: bool) -> None:
    assert at_most("time", value, "us", 60) == Row("time", value, "us", "<= 60", met)


def test_the_table_says_what_was_met_missed_or_had_no_aim() -> None:
    console = Console(width=100)
    with console.capture() as captured:
        console.print(table([at_least("fast", 3, "x", 2), at_least("slow", 1, "x", 2), Row("plain", 41_234.5, "blocks/s")]))
    _title, fast, slow, plain = captured.get().splitlines()
    assert fast.rstrip().endswith("met")
    assert slow.rstrip().endswith("missed")
    assert "41,23" in plain
    assert plain.rstrip().endswith("blocks/s")


def test_rows_are_written_as_json_into_a_new_folder(tmp_path: Path) -> None:
    write([at_most("time", 1, "us", 2), Row("plain", 3, "x")], tmp_path / "out" / "name.json")
    assert json.loads((tmp_path / "out" / "name.json").read_text()) == [
        {"name": "time", "value": 1, "unit": "us", "aim": "<= 2", "met": True},
        {"name": "plain", "value": 3, "unit": "x", "aim": "", "met": None},
    ]
