"""Promises of top_screen.py: of any cluster on a terminal of any size."""

import io
from functools import cache

import pytest
from rich.console import Console

from kvstore.cli.tools.top_nodes import SORTS
from kvstore.cli.tools.top_screen import ScreenView, screen
from kvstore.console.model import ConsoleModel, Document
from tests.console.serving import Clock
from tests.console.simulated import Simulated


@cache
def documents(count: int, dead: tuple[int, ...]) -> list[Document]:
    """Return the documents of three polls of a cluster, cached for all screens of it."""
    clock, model = Clock(), ConsoleModel()
    source = Simulated(count, clock, dead=dead)
    found = []
    for _ in range(3):
        found.append(model.document(source.status(), at_s=clock(), wall_s=1.0))
        clock.now_s += 1
    return found


def view_of(count: int, dead: tuple[int, ...] = ()) -> ScreenView:
    view = ScreenView()
    for document in documents(count, dead):
        view.take(document)
    return view


def lines(view: ScreenView, width: int = 120, height: int = 40) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO(), force_terminal=True, color_system=None, legacy_windows=False)
    picture, _page = screen(view, width, height)
    return ["".join(segment.text for segment in line).rstrip() for line in console.render_lines(picture, pad=False)]


@pytest.mark.parametrize("count", [0, 1, 1000])
@pytest.mark.parametrize("size", [(30, 10), (40, 12), (80, 24), (120, 40), (250, 60), (1, 1)])
def test_any_cluster_fits_any_terminal(count: int, size: tuple[int, int]) -> None:
    width, height = size
    shown = lines(view_of(count, dead=(0,)), width, height)
    assert all(len(line) <= width for line in shown)
    if height >= 12 and width >= 40:
        assert len(shown) <= height
        assert "quit" in shown[-1]


def test_it_scrolls_to_the_end_and_back() -> None:
    view = view_of(1000)
    page = screen(view, 120, 40)[1]
    assert f"1 to {page} of 1000" in lines(view)[-1]
    for key in ("down", "page down", "j", "k", "up"):
        assert view.press(key, page)
    assert f"{page + 1} to" in lines(view)[-1]
    view.press("end", page)
    assert "to 1000 of 1000" in lines(view)[-1]
    view.press("page up", page)
    view.press("home", page)
    assert "1 to" in lines(view)[-1]
    view.press("x", page)
    assert "1 to" in lines(view)[-1]


def test_it_is_sorted_by_each_column_in_turn() -> None:
    view = view_of(30, dead=(7,))
    firsts = {}
    for _ in SORTS:
        firsts[view.sort] = lines(view, 200)
        view.press("s", 5)
    assert view.sort == "name"

    def first(sort: str) -> str:
        at = next(number for number, line in enumerate(firsts[sort]) if line.startswith("node "))
        return firsts[sort][at + 1]

    assert first("name").startswith("node-0")
    assert first("state").startswith("node-7")
    assert len({first(sort) for sort in SORTS}) > 3


def test_a_large_screen_has_all_operations_and_taller_trends() -> None:
    small, large = (lines(view_of(3), 200, height) for height in (24, 70))
    assert not any(line.startswith("operation ") for line in small)
    assert any(line.startswith("match prefix") and "master-1:7440" in line for line in large)
    assert sum("█" * 2 in line and line.startswith("          ") for line in large) > 4


def test_what_is_full_is_the_fullest_tier() -> None:
    view, clock = ScreenView(), Clock()
    source = Simulated(2, clock)
    source.full = {"hbm": 0.2, "dram": 0.9, "nvme": 0.01}
    view.take(ConsoleModel().document(source.status(), at_s=clock(), wall_s=1.0))
    shown = lines(view)
    assert any("full" in line and "dram 90.0 %" in line for line in shown)
    assert any(line.startswith("node-0") and "90% dram" in line for line in shown)


def test_what_is_wrong_is_shown_first_and_q_ends_it() -> None:
    view = view_of(3, dead=(1,))
    assert lines(view)[1].startswith("node-1 is dead  Its last replicas are misses.")
    view.failure = "no master answers"
    assert "no master answers" in lines(view)[1]
    assert [view.press(key, 1) for key in ("q", "Q", "\x03")] == [False] * 3
