"""Promises of plots.py: what is drawn, that it is named and labelled, and that equal numbers give equal files."""

import itertools
import sys
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

from kvstore.lab.plot_theme import COLOURS
from kvstore.lab.plots import NAME_GAP, Series, Weight, _apart, cdf, line_chart, save, stacked_bars
from kvstore.protocol.errors import ConfigError

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


# --- distributions ---


def test_a_distribution_is_the_share_at_or_below() -> None:
    ((x, y), _) = data_lines(cdf({"a": [3, 1, 2, 2], "b": [8]}, title="t", x_label="x (s)"))
    assert x == [1, 2, 2, 3, 8]
    assert y == [0.25, 0.5, 0.75, 1, 1]


# --- bars ---


def test_parts_lie_on_one_another_under_their_sum(tmp_path: Path) -> None:
    figure = stacked_bars(["a", "b"], {"low": [1, 1200], "high": [0.25, 300]}, **LABELS)
    drawn = [patch for patch in axes_of(figure).patches if isinstance(patch, Rectangle)]
    assert [(part.get_y(), part.get_height()) for part in drawn] == [(0, 1), (0, 1200), (1, 0.25), (1200, 300)]
    save(figure, tmp_path / "bars.svg")
    assert {"a", "b", "low", "high", "1.25", "1,500"} <= set(texts(tmp_path / "bars.svg"))


# --- names ---


@given(st.lists(st.floats(0, 1), min_size=1, max_size=15))
def test_names_are_kept_apart_in_the_order_of_what_they_name(wanted: list[float]) -> None:
    places = _apart(wanted)
    order = sorted(range(len(wanted)), key=lambda index: places[index])
    assert [wanted[index] for index in order] == sorted(wanted)
    assert all(places[after] - places[before] >= NAME_GAP - 1e-9 for before, after in itertools.pairwise(order))
    assert all(-1e-9 <= place <= 1 for place in places)


# --- files ---


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


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write the plot .*nowhere/chart\.svg: No such file"):
        save(line_chart(LINES, **LABELS), tmp_path / "nowhere" / "chart.svg")


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"\.\[plots\]"):
        line_chart(LINES, **LABELS)
