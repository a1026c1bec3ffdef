"""Promises of simulate.py, through the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console, RenderableType

from kvstore.cli.command_group import CommandGroup
from kvstore.cli.simulate import draw, modes_table, simulate
from kvstore.lab.simulator.plan import Mode, SimulationPlan
from kvstore.lab.simulator.report import SimulationReport
from kvstore.lab.simulator.simulation import Scenario
from kvstore.protocol.errors import InvalidArgument
from kvstore.scheduler.request import Slo
from tests.lab.simulator.parts import asked

SMALL = ("--prefill", "2", "--decode", "2")

TRACE = [asked(100 * number, [0, number + 1], output=20) for number in range(10)]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(line(200 * number, [0, number // 2 + 1]) for number in range(20)))
    return path


def line(at_ms: int, ids: list[int]) -> str:
    return json.dumps({"timestamp": at_ms, "input_length": 512 * len(ids), "output_length": 20, "hash_ids": ids}) + "\n"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(CommandGroup(commands=[simulate]), ["simulate", *map(str, arguments)], catch_exceptions=False)


def report(*arguments: object) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_people_get_a_table(trace: Path) -> None:
    result = run(trace, *SMALL)
    assert result.exit_code == 0
    assert "20 requests in" in result.stdout
    assert result.stderr == ""


def test_scripts_get_every_figure_and_equal_runs_the_same(trace: Path) -> None:
    first, second = report(trace, *SMALL), report(trace, *SMALL)
    assert first == second
    assert (first["requests"], first["finished"], first["rejected"]) == (20, 20, {})
    assert 0 < first["ttft"]["p50_s"] <= first["ttft"]["p99_s"]
    assert first["hit_ratio_blocks"] > 0.5
    assert first["streamed_bytes"] > 0


def test_options_reach_the_simulation(trace: Path) -> None:
    plain = report(trace, *SMALL)
    assert report(trace, *SMALL, "--limit", 5)["requests"] == 5
    assert report(trace, *SMALL, "--cache-blocks", 0)["hit_ratio_blocks"] == 0
    assert report(trace, *SMALL, "--rate", 4)["duration_s"] < plain["duration_s"] / 2
    assert report(trace, *SMALL, "--gpu", "h100")["ttft"]["mean_s"] < plain["ttft"]["mean_s"]
    assert report(trace, *SMALL, "--bandwidth", "1GB", "--no-overlap")["stages_s"]["transfer"] > 0.1 > plain["stages_s"]["transfer"]
    assert report(trace, *SMALL, "--mode", "chunked")["streamed_bytes"] == 0
    assert report(trace, *SMALL, "--ttft-slo-s", "0.000001")["rejected"] == {"ttft": 20}
    unlimited = report(trace, *SMALL, "--ttft-slo-s", "0.000001", "--admission", "all")
    assert (unlimited["rejected"], unlimited["in_time"]) == ({}, 0)


def test_modes_are_compared_side_by_side(trace: Path) -> None:
    assert "disaggregation" in run(trace, *SMALL, "--compare-modes").stdout
    assert set(report(trace, *SMALL, "--compare-modes")) == {"disaggregated", "prefill-first", "decode-first", "chunked"}


def test_charts_are_named_where_they_are(trace: Path, tmp_path: Path) -> None:
    result = run(trace, *SMALL, "--plots", tmp_path / "plots")
    assert result.stderr == "".join(f"wrote {tmp_path}/plots/{name}.svg\n" for name in ("ttft", "tbt", "stages", "load"))
    assert (tmp_path / "plots" / "load.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "none"), "none"),
        (("--dispatcher", "none"), "none"),
        (("--admission", "none"), "none"),
        (("--ttft-slo-s", "0"), "the SLO ttft_s is 0: it must be above 0 seconds"),
        (("--prefill", "0"), "prefill is 0: it must be from 1 to 4,096"),
        (("--bandwidth", "fast"), "'fast' is not a size"),
    ],
)
def test_what_cannot_be_is_one_clear_line(trace: Path, arguments: tuple[str, ...], message: str) -> None:
    result = run(trace, *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("kvstore: error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_broken_trace_is_named_with_its_line(trace: Path) -> None:
    with trace.open("a") as file:
        file.write("{\n")
    result = run(trace)
    assert result.exit_code == 2
    assert f"kvstore: error: {trace}, line 21: not JSON" in result.stderr


def test_a_trace_must_be_there_and_not_empty(tmp_path: Path) -> None:
    missing = run(tmp_path / "none")
    assert (missing.exit_code, missing.stderr.count("\n")) == (2, 1)
    assert "cannot read the trace" in missing.stderr
    (tmp_path / "empty").touch()
    empty = run(tmp_path / "empty")
    assert (empty.exit_code, empty.stderr) == (2, f"kvstore: error: {tmp_path}/empty has no requests\n")


def simulated(slo: Slo, mode: Mode = Mode.DISAGGREGATED) -> SimulationReport:
    return Scenario(plan=SimulationPlan(mode=mode, prefill=1, decode=1, slo=slo)).run(TRACE)


def printed(table: RenderableType) -> str:
    console = Console(width=140)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_modes_table_has_the_order_of_the_paper() -> None:
    text = printed(modes_table({mode: simulated(Slo(), mode) for mode in Mode}))
    assert text.splitlines()[0].split("  ")[-1].strip() == "P/D disaggregation"
    rows = [line[:22].strip() for line in text.splitlines()[1:]]
    assert rows == ["TTFT, mean", "TTFT, p90", "TBT, mean", "TBT, p99", "TBT of a request, p99", "prefill MFU", "decode MFU", "goodput"]


def finished(*, ttft_s: float = 30.0, output: int = 20) -> SimulationReport:
    trace = [asked(100 * number, [0, number + 1], output=output) for number in range(10)]
    return Scenario(plan=SimulationPlan(prefill=1, decode=1, slo=Slo(ttft_s, 0.1))).run(trace)


def test_one_report_gives_four_charts_with_labelled_axes(tmp_path: Path) -> None:
    paths = draw({"one": finished()}, Slo(30.0, 0.1), tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["ttft.svg", "tbt.svg", "stages.svg", "load.svg"]
    labels = ["TTFT (s)", "TBT (s)", "mean time a request (s)", "load (1 = the SLO)"]
    for path, label in zip(paths, labels, strict=True):
        assert label in path.read_text(), path


def test_several_have_a_load_chart_each_and_share_the_others(tmp_path: Path) -> None:
    paths = draw(
        {"one": finished(), "none": finished(ttft_s=1e-6), "two": finished()},
        Slo(30.0, 0.1),
        tmp_path,
    )
    assert [path.name for path in paths] == ["ttft.svg", "tbt.svg", "stages.svg", "load-one.svg", "load-two.svg"]
    assert ">two<" in (tmp_path / "ttft.svg").read_text()


def test_nothing_finished_is_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no request was finished"):
        draw({"one": finished(ttft_s=1e-6)}, Slo(), tmp_path)
