"""Promises of simulation_tables.py: what a person reads is what the report says."""

import pytest
from rich.console import Console, RenderableType

from kvstore.client.cli.simulation_tables import modes_table, report_table, seconds
from kvstore.scheduler.request import Slo
from kvstore.scheduler.simulator.plan import Mode, Plan
from kvstore.scheduler.simulator.report import Report
from kvstore.scheduler.simulator.simulation import Scenario
from tests.scheduler.simulator.parts import asked

TRACE = [asked(100 * number, [0, number + 1], output=20) for number in range(10)]


def simulate(slo: Slo, mode: Mode = Mode.DISAGGREGATED) -> Report:
    return Scenario(plan=Plan(mode=mode, prefill=1, decode=1, slo=slo)).run(TRACE)


def printed(table: RenderableType) -> str:
    console = Console(width=140)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_a_report_fits_on_a_screen() -> None:
    text = printed(report_table(simulate(Slo())))
    assert "10 requests in" in text
    assert "10 (100.0 %)" in text
    assert "rejected          0 (0.0 %)\n" in "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    assert "of prefixes between instances" in text
    assert all(stage in text for stage in ("schedule", "queue", "transfer", "load cache", "prefill", "decode"))
    assert len(text.splitlines()) < 25


def test_reasons_of_rejections_are_named() -> None:
    assert "10 (100.0 %): 10 by ttft" in printed(report_table(simulate(Slo(ttft_s=1e-6))))


def test_modes_stand_side_by_side_in_the_order_of_the_published_table() -> None:
    text = printed(modes_table({mode: simulate(Slo(), mode) for mode in Mode}))
    assert text.splitlines()[0].split("  ")[-1].strip() == "P/D disaggregation"
    rows = [line[:22].strip() for line in text.splitlines()[1:]]
    assert rows == ["TTFT, mean", "TTFT, p90", "TBT, mean", "TBT, p99", "TBT of a request, p99", "prefill MFU", "decode MFU", "goodput"]


@pytest.mark.parametrize(
    ("value_s", "text"), [(0.0, "0 us"), (0.00025, "250 us"), (0.0123, "12.3 ms"), (1.266, "1.27 s"), (19.65, "19.65 s"), (105.4, "105 s")]
)
def test_times_are_written_in_the_unit_they_are_read_in(value_s: float, text: str) -> None:
    assert seconds(value_s) == text
