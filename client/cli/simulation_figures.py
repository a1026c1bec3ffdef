"""A simulation's charts: distributions of TTFT and TBT, where the time goes, the load of both pools over time. It measures nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore.lab.plots import Series, line_chart, save, stacked_bars
from kvstore.protocol.errors import ConfigError, InvalidArgument
from kvstore.scheduler.request import Slo
from kvstore.scheduler.simulator.report import STAGES, Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CURVE_POINTS: Final = 400
"""Of a distribution that are drawn: more cannot be told apart."""


def draw(reports: Mapping[str, Report], slo: Slo, folder: str | Path) -> list[Path]:
    """Writes ttft.svg, tbt.svg, stages.svg and load.svg and says where. There is a load-NAME.svg for each of several reports, and no
    tbt.svg where nothing has a second token.

    `reports` by the name each is drawn under. Raises InvalidArgument where none finished a request, ConfigError for a folder that cannot
    be made or written, or without matplotlib.
    """
    folder = Path(folder)
    drawn = {name: report for name, report in reports.items() if report.finished}
    if not drawn:
        raise InvalidArgument("no request was finished: there is nothing to draw")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder} for plots: {error.strerror or error}") from None
    figures = {"ttft.svg": _curves({name: report.ttft_points for name, report in drawn.items()}, "Time to first token", "TTFT", "requests")}
    if any(report.tbt_points for report in drawn.values()):
        gaps = {name: report.tbt_points for name, report in drawn.items()}
        figures["tbt.svg"] = _curves(gaps, "Time between tokens", "TBT", "tokens")
    figures["stages.svg"] = stacked_bars(
        list(drawn),
        {stage: [report.stages_s[stage] for report in drawn.values()] for stage in STAGES},
        title="Where a request's time goes",
        x_label="simulation",
        y_label="mean time a request (s)",
    )
    for name, report in drawn.items():
        figures["load.svg" if len(drawn) == 1 else f"load-{name}.svg"] = _load(report, slo)
    for name, figure in figures.items():
        save(figure, folder / name)
    return [folder / name for name in figures]


def _curves(points: Mapping[str, Sequence[tuple[float, float]]], title: str, what: str, things: str) -> "Figure":
    """Distributions; the times on a logarithmic axis, since a few are a hundred times the others."""
    lines = [Series(name, *thinned(curve)) for name, curve in points.items() if curve]
    return line_chart(lines, title=title, x_label=f"{what} (s)", y_label=f"share of {things} at or below", log_x=True)


def thinned(curve: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Times and shares of about CURVE_POINTS of its points, the last among them; none at 0, which has no logarithm."""
    step = max(1, len(curve) // CURVE_POINTS)
    kept = [point for number, point in enumerate(curve) if (number % step == 0 or number == len(curve) - 1) and point[0] > 0]
    return [gap_s for gap_s, _ in kept], [share for _, share in kept]


def _load(report: Report, slo: Slo) -> "Figure":
    """Both pools over time, each as a share of what its SLO allows."""
    at_s = [sample.at_s for sample in report.samples]
    lines = [
        Series("prefill", at_s, [sample.prefill_queue_s / slo.ttft_s for sample in report.samples]),
        Series("decode", at_s, [sample.decode_tbt_s / slo.tbt_s for sample in report.samples]),
    ]
    return line_chart(lines, title="Load of the pools", x_label="time (s)", y_label="load (1 = the SLO)")
