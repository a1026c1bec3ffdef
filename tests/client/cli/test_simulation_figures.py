"""Promises of simulation_figures.py."""

from pathlib import Path

import pytest

from kvstore.client.cli.simulation_figures import CURVE_POINTS, draw, thinned
from kvstore.protocol.errors import ConfigError, InvalidArgument
from kvstore.scheduler.request import Slo
from kvstore.scheduler.simulator.plan import Plan
from kvstore.scheduler.simulator.report import Report
from kvstore.scheduler.simulator.simulation import Scenario
from tests.scheduler.simulator.parts import asked


def simulate(*, ttft_s: float = 30.0, output: int = 20) -> Report:
    trace = [asked(100 * number, [0, number + 1], output=output) for number in range(10)]
    return Scenario(plan=Plan(prefill=1, decode=1, slo=Slo(ttft_s, 0.1))).run(trace)


def test_one_report_gives_four_charts_with_labelled_axes(tmp_path: Path) -> None:
    paths = draw({"one": simulate()}, Slo(30.0, 0.1), tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["ttft.svg", "tbt.svg", "stages.svg", "load.svg"]
    labels = ["TTFT (s)", "TBT (s)", "mean time a request (s)", "load (1 = the SLO)"]
    for path, label in zip(paths, labels, strict=True):
        assert label in path.read_text(), path


def test_several_have_a_load_chart_each_and_share_the_others(tmp_path: Path) -> None:
    paths = draw({"one": simulate(), "none": simulate(ttft_s=1e-6), "two": simulate()}, Slo(30.0, 0.1), tmp_path)
    assert [path.name for path in paths] == ["ttft.svg", "tbt.svg", "stages.svg", "load-one.svg", "load-two.svg"]
    assert ">two<" in (tmp_path / "ttft.svg").read_text()


def test_without_a_second_token_there_is_no_time_between_tokens(tmp_path: Path) -> None:
    assert "tbt.svg" not in [path.name for path in draw({"one": simulate(output=1)}, Slo(30.0, 0.1), tmp_path)]


def test_nothing_finished_is_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no request was finished"):
        draw({"one": simulate(ttft_s=1e-6)}, Slo(), tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"cannot make the folder {tmp_path}/file/plots"):
        draw({"one": simulate()}, Slo(), tmp_path / "file" / "plots")


def test_a_long_curve_keeps_its_ends() -> None:
    curve = [(float(number), number / 9999) for number in range(10_000)]
    times, shares = thinned(curve)
    assert (times[0], times[-1], shares[-1]) == (25.0, 9999.0, 1.0)
    assert CURVE_POINTS <= len(times) <= CURVE_POINTS + 1
