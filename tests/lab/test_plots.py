"""Promises of plots.py: what is drawn, that it is named and labelled, and that equal numbers give equal files."""

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from kvstore.lab.plot_theme import COLOURS, colour
from kvstore.lab.plots import NAME_GAP, Series, Weight, _apart, cdf, line_chart, save, stacked_bars
from kvstore.protocol.errors import ConfigError, InvalidArgument

LABELS: dict[str, Any] = {"title": "A title", "x_label": "time (s)", "y_label": "rate (1/s)"}
LINES = [Series("one", [1, 10, 100], [0.1, 0.4, 0.2]), Series("two", [1, 10, 100], [0.3, 0.4, 0.9], Weight.MAIN)]
BOUND = Series("most", [1, 100], [1, 1], Weight.BOUND)


def axes_of(figure: Figure) -> Axes:
    (axes,) = figure.axes
    return axes


def texts(path: Path) -> list[str]:
    return ["".join(element.itertext()) for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


def data_lines(figure: Figure) -> list[tuple[list[float], list[float]]]:
    """Those in units of the data; lines that lead to names are in units of the chart."""
    axes = axes_of(figure)
    lines = [line for line in axes.lines if line.get_transform() == axes.transData]
    return [(list(np.asarray(line.get_xdata(), float)), list(np.asarray(line.get_ydata(), float))) for line in lines]


def test_title_labels_and_names_are_text_in_the_svg(tmp_path: Path) -> None:
    path = tmp_path / "chart.svg"
    save(line_chart([*LINES, BOUND], **LABELS), path)
    assert {"A title", "time (s)", "rate (1/s)", "one", "two", "most"} <= set(texts(path))


def test_lines_are_drawn_as_given_from_0_upward() -> None:
    figure = line_chart(LINES, **LABELS)
    assert data_lines(figure) == [([1, 10, 100], [0.1, 0.4, 0.2]), ([1, 10, 100], [0.3, 0.4, 0.9])]
    assert axes_of(figure).get_ylim()[0] == 0


def test_the_main_line_is_thicker_and_a_bound_dashed_and_without_colour() -> None:
    one, two, most = axes_of(line_chart([*LINES, BOUND], **LABELS)).lines[:3]
    assert two.get_linewidth() > one.get_linewidth()
    assert one.get_color() != two.get_color()
    assert (one.get_linestyle(), most.get_linestyle(), most.get_color()) == ("-", "--", colour("soft"))


def test_a_logarithmic_axis_names_each_of_a_few_places() -> None:
    axes = axes_of(line_chart(LINES, **LABELS, log_x=True))
    assert axes.get_xscale() == "log"
    assert axes.get_xticks().tolist() == [1, 10, 100]
    assert axes.get_xticks(minor=True).tolist() == []


def test_many_places_have_ticks_of_matplotlibs_choice_and_markers_apart() -> None:
    many = [Series(name, range(1, 101), range(1, 101)) for name in ("one", "two")]
    axes = axes_of(line_chart(many, **LABELS, log_x=True, log_y=True))
    assert axes.get_yscale() == "log"
    assert len(axes.get_xticks()) < 10
    assert [line.get_markevery() for line in axes.lines[:2]] == [(0, 12), (1, 12)]


@pytest.mark.parametrize("lines", [[], [Series("none", [], [])], [Series("unequal", [1, 2], [1])]])
def test_a_line_has_points(lines: list[Series]) -> None:
    with pytest.raises(InvalidArgument, match="line chart"):
        line_chart(lines, **LABELS)


# --- distributions ---


def test_a_distribution_is_the_share_at_or_below() -> None:
    ((x, y), _) = data_lines(cdf({"a": [3, 1, 2, 2], "b": [8]}, title="t", x_label="x (s)"))
    assert x == [1, 2, 2, 3, 8]
    assert y == [0.25, 0.5, 0.75, 1, 1]


def test_infinite_samples_count_and_are_not_reached() -> None:
    ((x, y),) = data_lines(cdf({"a": np.array([1, np.inf, 2, np.inf])}, title="t", x_label="x (s)"))
    assert (x, y) == ([1, 2, 2], [0.25, 0.5, 0.5])


def test_a_logarithmic_distribution_begins_at_the_least_positive_sample() -> None:
    ((x, _),) = data_lines(cdf({"a": [0, 0, 0.5, 4]}, title="t", x_label="x (s)", log_x=True))
    assert x == [0.5, 0.5, 0.5, 4, 4]
    ((x, _),) = data_lines(cdf({"a": [0, 0]}, title="t", x_label="x (s)", log_x=True))
    assert x == [1, 1, 1]


def test_of_many_samples_points_enough_are_drawn() -> None:
    ((x, y),) = data_lines(cdf({"a": np.arange(100_000)}, title="t", x_label="x (s)"))
    assert len(x) == 401
    assert y == pytest.approx([(place + 1) / 100_000 for place in x])


@pytest.mark.parametrize("samples", [{}, {"a": []}, {"a": [1], "b": [float("inf")]}])
def test_a_distribution_has_samples(samples: dict[str, list[float]]) -> None:
    with pytest.raises(InvalidArgument, match="needs one"):
        cdf(samples, title="t", x_label="x (s)")


# --- bars ---


def test_parts_lie_on_one_another_under_their_sum(tmp_path: Path) -> None:
    figure = stacked_bars(["a", "b"], {"low": [1, 1200], "high": [0.25, 300]}, **LABELS)
    drawn = [patch for patch in axes_of(figure).patches if isinstance(patch, Rectangle)]
    assert [(part.get_y(), part.get_height()) for part in drawn] == [(0, 1), (0, 1200), (1, 0.25), (1200, 300)]
    save(figure, tmp_path / "bars.svg")
    assert {"a", "b", "low", "high", "1.25", "1,500"} <= set(texts(tmp_path / "bars.svg"))


def test_long_names_of_bars_are_slanted() -> None:
    names = [f"a bar's long name, {number}" for number in range(5)]
    few, many = (axes_of(stacked_bars(bars, {"p": [0] * len(bars)}, **LABELS)) for bars in (names[:1], names))
    assert [axes.get_xticklabels()[0].get_rotation() for axes in (few, many)] == [0, 30]


@pytest.mark.parametrize(("bars", "parts"), [([], {"a": []}), (["a"], {}), (["a"], {"p": [1, 2]})])
def test_every_part_has_a_value_for_every_bar(bars: list[str], parts: dict[str, list[float]]) -> None:
    with pytest.raises(InvalidArgument, match="stacked bars"):
        stacked_bars(bars, parts, **LABELS)


# --- names ---


@given(st.lists(st.floats(0, 1), min_size=1, max_size=15))
def test_names_are_kept_apart_in_the_order_of_what_they_name(wanted: list[float]) -> None:
    places = _apart(wanted)
    order = sorted(range(len(wanted)), key=lambda index: places[index])
    assert [wanted[index] for index in order] == sorted(wanted)
    assert all(places[after] - places[before] >= NAME_GAP - 1e-9 for before, after in itertools.pairwise(order))
    assert all(-1e-9 <= place <= 1 for place in places)


def test_names_with_room_stay_beside_what_they_name() -> None:
    assert _apart([0.9, 0.1, 0.5]) == [0.9, 0.1, 0.5]


# --- files ---


@pytest.mark.no_cover
@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_equal_numbers_give_equal_files(tmp_path: Path, suffix: str) -> None:
    for name in ("one", "two"):
        save(line_chart([*LINES, BOUND], **LABELS, log_x=True), tmp_path / f"{name}{suffix}")
    assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()


def test_an_svg_has_no_colour_but_variables(tmp_path: Path) -> None:
    save(stacked_bars(["a"], {"p": [1], "q": [2]}, **LABELS), tmp_path / "bars.svg")
    text = (tmp_path / "bars.svg").read_text()
    drawing = text.split("</style>", 1)[1]
    assert not [light for light, _ in COLOURS.values() if light in drawing]
    assert "#000000" not in drawing
    assert "prefers-color-scheme: dark" in text


def test_a_png_is_on_white(tmp_path: Path) -> None:
    from matplotlib.image import imread

    save(line_chart(LINES, **LABELS), tmp_path / "chart.png")
    image = imread(tmp_path / "chart.png")
    assert image[0, 0].tolist() == [1, 1, 1, 1]
    assert image.shape[1] > 1000


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"chart\.pdf: name a file that ends in \.svg or \.png"):
        save(line_chart(LINES, **LABELS), tmp_path / "chart.pdf")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write the plot .*nowhere/chart\.svg: No such file"):
        save(line_chart(LINES, **LABELS), tmp_path / "nowhere" / "chart.svg")


@pytest.mark.parametrize(
    "draw",
    [
        lambda: line_chart(LINES, **LABELS),
        lambda: cdf({"a": [1]}, title="t", x_label="x (s)"),
        lambda: stacked_bars(["a"], {"p": [1]}, **LABELS),
    ],
)
def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, draw: Callable[[], object]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"\.\[plots\]"):
        draw()
