"""Charts from plain numbers: lines, distributions and stacked bars, saved as SVG or PNG.

Lines and parts are labelled directly, without a legend. Needs matplotlib (the extra `plots`), which is imported when a chart is drawn. The
same numbers give the same bytes.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvstore.lab.plot_theme import SETTINGS, adapt, colour, marker, series_colour, series_index
from kvstore.protocol.errors import ConfigError
from kvstore.protocol.extras import install_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE_INCHES: Final = (8.4, 4.7)
PNG_DOTS_PER_INCH: Final = 160
CDF_POINTS: Final = 400
"""Points drawn of a distribution: more are indistinguishable."""
MAX_MARKERS: Final = 9
"""Most markers on one line."""
MAX_NAMED_TICKS: Final = 8
"""Up to this many values on a logarithmic axis each has a tick."""
DASHES: Final = (0, (4, 2))
BAR_WIDTH: Final = 0.62
NAME_GAP: Final = 0.052
"""Least distance of two labels beside the chart, as a share of its height."""
AXES: Final = (0.09, 0.125, 0.72, 0.765)
"""Left, bottom, width and height of the axes, as shares of the figure. `save` extends the figure to fit all labels."""
MARGIN_INCHES: Final = 0.15
MAX_UPRIGHT: Final = 70
"""Most characters of all bar names together that fit horizontally; longer ones are slanted."""


class Weight(Enum):
    """Emphasis of a line."""

    NORMAL = "normal"
    MAIN = "main"
    """Subject of the chart: a thicker line."""
    BOUND = "bound"
    """Upper bound: dashed grey."""


@dataclass(frozen=True, slots=True)
class _SeriesLabel:
    """Label beside the chart, and the data point that it belongs to."""

    name: str
    x: float
    y: float
    colour: str
    marker: str
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Series:
    """One line: `y` over `x`, of equal length, in ascending order of `x`."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    weight: Weight = Weight.NORMAL


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
) -> "Figure":
    """Draw a line per series, each with its own colour, marker and label at its right end. Axis labels should have the units.

    The vertical axis begins at 0 unless it is logarithmic. Raises ConfigError without matplotlib.
    """
    figure, axes = _chart(title, x_label, y_label)
    keys = []
    coloured = 0
    for line in series:
        is_bound = line.weight is Weight.BOUND
        style = _bound_style() if is_bound else _line_style(line, coloured)
        coloured += not is_bound
        axes.plot(line.x, line.y, **style)
        keys.append(_SeriesLabel(line.name, line.x[-1], line.y[-1], style["color"], style["marker"], is_bound))
    if log_x:
        _logarithmic(axes, sorted({x for line in series for x in line.x}))
    else:
        axes.xaxis.set_major_formatter(_number)
    if log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(_number)
    _name(axes, keys)
    return figure


def cdf(
    samples: Mapping[str, Sequence[float] | np.ndarray],
    *,
    title: str,
    x_label: str,
    y_label: str = "share at or below",
    log_x: bool = False,
) -> "Figure":
    """Draw the cumulative distribution of each list of samples. Infinite samples count in the total only.

    On a logarithmic axis samples of 0 are drawn at the least positive sample. Raises as `line_chart`.
    """
    ordered = {name: np.sort(np.asarray(values, dtype=float)) for name, values in samples.items()}
    finite = {name: values[np.isfinite(values)] for name, values in ordered.items()}
    end = max((float(values[-1]) for values in finite.values()), default=0.0)
    return line_chart(
        [_distribution(name, values, ordered[name].size, end, log_x) for name, values in finite.items()],
        title=title,
        x_label=x_label,
        y_label=y_label,
        log_x=log_x,
    )


def stacked_bars(
    bars: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    *,
    title: str,
    x_label: str,
    y_label: str,
) -> "Figure":
    """Draw a bar for each of `bars`, with the parts stacked in order: `parts` has each part's value in every bar.

    Axis labels should have the units. Raises ConfigError without matplotlib.
    """
    figure, axes = _chart(title, x_label, y_label)
    below = np.zeros(len(bars))
    keys = []
    for index, (name, values) in enumerate(parts.items()):
        heights = np.asarray(values, dtype=float)
        filled = series_colour(series_index(name, index))
        style: dict[str, Any] = {"width": BAR_WIDTH, "color": filled, "edgecolor": colour("ground"), "linewidth": 1.2}
        axes.bar(range(len(bars)), heights, bottom=below, **style)
        keys.append(_SeriesLabel(name, len(bars) - 1 + BAR_WIDTH / 2, float(below[-1] + heights[-1] / 2), filled, "s"))
        below += heights
    slanted: dict[str, Any] = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if sum(map(len, bars)) > MAX_UPRIGHT else {}
    axes.set_xticks(range(len(bars)), bars, **slanted)
    axes.set_xlim(-0.6, len(bars) - 0.4)
    axes.set_ylim(0, float(below.max()) * 1.12 or 1)
    axes.yaxis.set_major_formatter(_number)
    axes.grid(visible=False, axis="x")
    for index, total in enumerate(below):
        axes.annotate(_figure(total), (index, total), (0, 4), textcoords="offset points", ha="center", color=colour("text"))
    _name(axes, keys)
    return figure


def save(figure: "Figure", path: str | Path) -> None:
    """Write the chart as .svg, for light and dark background, or .png, on white, by the file's suffix.

    Raises ConfigError if the file cannot be written.
    """
    path = Path(path)
    import matplotlib

    drawn = io.BytesIO()
    with matplotlib.rc_context(SETTINGS):
        # No date or library version, so that equal numbers give equal files.
        metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else {"Software": None}
        frame: dict[str, Any] = {"facecolor": colour("ground"), "bbox_inches": "tight", "pad_inches": MARGIN_INCHES}
        figure.savefig(drawn, format=path.suffix[1:], dpi=PNG_DOTS_PER_INCH, metadata=metadata, **frame)
    content = drawn.getvalue()
    try:
        path.write_bytes(adapt(content.decode()).encode() if path.suffix == ".svg" else content)
    except OSError as error:
        raise ConfigError(f"cannot write the plot {path}: {error.strerror or error}") from None


def save_all(figures: Mapping[str, "Figure"], folder: str | Path) -> list[Path]:
    """Write charts by file name into a folder, which is created if needed, and return the paths. Raises as `save`."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create the folder {folder} for plots: {error.strerror or error}") from None
    for name, figure in figures.items():
        save(figure, folder / name)
    return [folder / name for name in figures]


def _chart(title: str, x_label: str, y_label: str) -> tuple["Figure", "Axes"]:
    """Create an empty chart."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(f"plots need matplotlib: {install_line('plots')}") from None
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=SIZE_INCHES, facecolor=colour("ground"))
        axes = figure.add_axes(AXES, facecolor=colour("ground"))
        axes.set_title(title, loc="left", color=colour("text"), fontsize=12, fontweight="bold", pad=11)
        axes.set_xlabel(x_label, color=colour("text"), labelpad=6)
        axes.set_ylabel(y_label, color=colour("text"), labelpad=6)
    axes.grid(visible=True, color=colour("grid"), linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=colour("soft"), which="both", length=3)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(colour("edge"))
    return figure, axes


def _bound_style() -> dict[str, Any]:
    return {"color": colour("soft"), "linestyle": DASHES, "linewidth": 1.5, "marker": ""}


def _line_style(line: Series, index: int) -> dict[str, Any]:
    is_main = line.weight is Weight.MAIN
    every = max(1, -(-len(line.x) // MAX_MARKERS))
    look = series_index(line.name, index)
    return {
        "color": series_colour(look),
        "linewidth": 2.8 if is_main else 1.5,
        "marker": marker(look),
        "markersize": 7 if is_main else 5.5,
        # Markers start at different points, so that those of overlapping lines stay visible.
        "markevery": (index % every, every),
        "markeredgecolor": colour("ground"),
        "markeredgewidth": 0.8,
        "zorder": 3 if is_main else 2,
    }


def _distribution(name: str, values: np.ndarray, count: int, end: float, log_x: bool) -> Series:
    """Line of one distribution, extended to `end`, the end of the longest one."""
    picked = np.unique(np.linspace(0, values.size - 1, min(values.size, CDF_POINTS)).round().astype(int))
    x = [*values[picked], end]
    y = [*((picked + 1) / count), values.size / count]
    if log_x:
        positive = values[values > 0]
        least = float(positive[0]) if positive.size else 1.0
        x = [max(value, least) for value in x]
    return Series(name, [float(value) for value in x], [float(share) for share in y])


def _logarithmic(axes: "Axes", values: Sequence[float]) -> None:
    axes.set_xscale("log")
    if len(values) <= MAX_NAMED_TICKS:
        axes.set_xticks(values)
        axes.set_xticks([], minor=True)
    axes.xaxis.set_minor_formatter("")
    axes.xaxis.set_major_formatter(_number)


def _number(value: float, position: float = 0) -> str:
    """Tick label; matplotlib passes a position, which is not used."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def _figure(value: float) -> str:
    """Label of a bar, to three digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _name(axes: "Axes", keys: Sequence[_SeriesLabel]) -> None:
    """Draw labels beside the chart, each close to its data point, with a leader line and the marker."""
    ends = [_share_of(axes, key.x, key.y) for key in keys]
    for key, (x, y), place in zip(keys, ends, _apart([y for _, y in ends]), strict=True):
        drawn: dict[str, Any] = {"transform": axes.transAxes, "color": key.colour, "clip_on": False}
        axes.plot([x, 1.03], [y, place], linewidth=0.7, **drawn)
        axes.plot([1.03, 1.075], [place, place], linewidth=1.5, linestyle=DASHES if key.is_dashed else "-", **drawn)
        axes.plot([1.0525], [place], marker=key.marker, markersize=5.5, linestyle="", **drawn)
        axes.text(1.09, place, key.name, transform=axes.transAxes, va="center", color=colour("text"))


def _share_of(axes: "Axes", x: float, y: float) -> tuple[float, float]:
    """Convert a data point to shares of the chart's width and height."""
    point = axes.transAxes.inverted().transform(axes.transData.transform((x, y)))
    return float(point[0]), float(point[1])


def _apart(targets: Sequence[float]) -> list[float]:
    """Return heights close to `targets`, at least NAME_GAP apart, within the chart as far as they fit."""
    order = sorted(range(len(targets)), key=targets.__getitem__)
    heights = [0.0] * len(targets)
    floor = 0.0
    for index in order:
        heights[index] = max(targets[index], floor)
        floor = heights[index] + NAME_GAP
    ceiling = 1.0
    for index in reversed(order):
        heights[index] = min(heights[index], ceiling)
        ceiling = heights[index] - NAME_GAP
    return heights
