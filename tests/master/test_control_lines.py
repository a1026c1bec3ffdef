"""Promises of control_lines.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.master.control_lines import MAX_WAITING, Line, Lines, line_of
from kvstore.protocol.errors import Full
from kvstore.security.identity import EVERYBODY, STRANGER, Identity, Kind, Role

RED, BLUE, GREEN = (Line(Kind.TENANT, name) for name in ("red", "blue", "green"))
STRANGERS, NODES = Line(Kind.STRANGER), Line(Kind.NODE, "n1")


def served(lines: Lines[str]) -> list[str]:
    """All that get a place now, in order."""
    found = []
    while (one := lines.next()) is not None:
        found.append(one[1])
    return found


def add(lines: Lines[str], line: Line, *calls: str) -> None:
    for call in calls:
        lines.add(line, call)


def test_whose_line_a_call_waits_in() -> None:
    assert line_of(STRANGER, joins=True) == STRANGERS
    assert (
        line_of(Identity(Kind.TENANT, Role.READ, "red"), joins=False)
        == line_of(Identity(Kind.TENANT, Role.ADMIN, "red"), joins=False)
        == RED
    )
    assert line_of(Identity(Kind.NODE, name="n1"), joins=False) == NODES
    assert line_of(EVERYBODY, joins=True) == Line(Kind.NODE)
    assert line_of(EVERYBODY, joins=False) == Line(Kind.EVERYBODY)


def test_lines_are_served_in_turn_and_each_in_its_order() -> None:
    lines = Lines[str](8)
    add(lines, RED, "r1", "r2", "r3")
    add(lines, BLUE, "b1")
    add(lines, NODES, "n1")
    assert served(lines) == ["r1", "b1", "n1", "r2", "r3"]


def test_one_caller_has_half_of_the_places_all_but_nodes_three_quarters_and_strangers_one() -> None:
    lines = Lines[str](8)
    for line in (RED, BLUE, STRANGERS, NODES):
        add(lines, line, *(f"{line.name}{number}" for number in range(9)))
    add(lines, GREEN, "green")
    first = served(lines)
    assert len(first) == 8
    assert sum(not name or name[0] != "n" for name in first) <= 6
    lines = Lines[str](8)
    add(lines, RED, *(f"r{number}" for number in range(9)))
    assert served(lines) == ["r0", "r1", "r2", "r3"]
    add(lines, STRANGERS, "s0", "s1")
    assert served(lines) == ["s0", "s1"]
    add(lines, BLUE, "b0")
    assert served(lines) == [], "two are kept for nodes"
    add(lines, NODES, "n0", "n1", "n2")
    assert served(lines) == ["n0", "n1"]
    lines.done(STRANGERS)
    assert served(lines) == ["b0"], "the one that nodes took of theirs does not count"
    lines.done(NODES)
    assert served(lines) == ["n2"]
    lines.done(RED)
    assert served(lines) == ["r4"]
    add(lines, GREEN, "g0", "g1")
    lines.done(RED)
    assert served(lines) == ["r5"], "it has been here for longer"
    lines.done(RED)
    assert served(lines) == ["g0"], "whose turn it is now"


def test_where_everybody_is_let_in_all_places_but_those_of_nodes_are_for_all() -> None:
    lines = Lines[str](8)
    add(lines, Line(Kind.EVERYBODY), *"abcdefghi")
    assert served(lines) == list("abcdef")


def test_a_master_of_one_thread_serves_all_one_after_the_other() -> None:
    lines = Lines[str](1)
    add(lines, STRANGERS, "s")
    add(lines, RED, "r")
    assert served(lines) == ["s"]
    lines.done(STRANGERS)
    assert served(lines) == ["r"]


def test_of_one_line_so_many_wait() -> None:
    lines = Lines[str](1)
    add(lines, RED, *("r" for _ in range(MAX_WAITING)))
    with pytest.raises(Full, match="1024 control calls of yours wait already: wait for an answer"):
        lines.add(RED, "one more")
    lines.add(BLUE, "b")


@given(st.integers(1, 9), st.lists(st.sampled_from([RED, BLUE, STRANGERS, NODES, None]), max_size=60))
def test_whatever_comes_and_goes_all_are_served_once_and_no_place_is_given_twice(places: int, steps: list[Line | None]) -> None:
    lines, under_way, begun, added = Lines[int](places), list[Line](), list[int](), 0
    for step in [*steps, *[None] * 200]:
        if step is not None:
            lines.add(step, added)
            added += 1
        elif under_way:
            lines.done(under_way.pop(0))
        while (one := lines.next()) is not None:
            under_way.append(one[0])
            begun.append(one[1])
        assert lines.served == len(under_way) <= places
    assert sorted(begun) == list(range(added))
    assert not lines._lines
