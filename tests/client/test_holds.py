"""Holds as a client knows them: plain values, and where each is to be released; bounded, whatever is never released."""

import pickle
from dataclasses import astuple
from typing import Any

import pytest

from kvstore.client import Hold, holds, new_hold
from kvstore.client.arguments import MAX_HOLD_S
from kvstore.client.holds import HoldTable, require_hold
from kvstore.protocol.errors import InvalidArgument

NODE: Any = object()
"""Stands for a LocalNode: the table only keeps it."""


def test_a_hold_travels_as_two_numbers() -> None:
    hold = new_hold(1.5)
    assert pickle.loads(pickle.dumps(hold)) == Hold(*astuple(hold)) == hold
    assert (hold.duration_ms, hold.number % 2, hold.number < 1 << 63) == (1500, 0, True)
    assert new_hold(1.5).number != hold.number
    assert new_hold(0.0001).duration_ms == 1


@pytest.mark.parametrize("hold_s", [0, -1, MAX_HOLD_S + 1, "1", None, float("nan")])
def test_a_time_that_cannot_be_is_refused(hold_s: Any) -> None:
    with pytest.raises(InvalidArgument, match="hold_s"):
        new_hold(hold_s)


def test_only_a_hold_serves_as_one() -> None:
    require_hold(None)
    require_hold(new_hold(1), is_optional=False)
    for wrong in (7, "hold"):
        with pytest.raises(InvalidArgument, match="new_hold"):
            require_hold(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="new_hold"):
        require_hold(None, is_optional=False)


def test_a_hold_is_taken_once_with_all_places_where_it_was() -> None:
    table, hold = HoldTable(), new_hold(1)
    assert table.extend(hold, 0) == 10**9
    assert table.extend(hold, 5) == 10**9 + 5
    table.add_local(hold, NODE)
    table.add_nodes(hold, [1, 2])
    table.add_nodes(hold, [2, 3])
    kept = table.take(hold)
    assert kept is not None
    assert (kept.local, kept.nodes) == ({NODE}, {1, 2, 3})
    assert (table.take(hold), len(table)) == (None, 0)
    table.add_local(hold, NODE)
    table.add_nodes(hold, [1])
    assert len(table) == 0


def test_holds_that_are_over_make_room_and_those_that_are_not_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds, "MAX_HOLDS", 3)
    table = HoldTable()
    long = new_hold(100)
    assert table.extend(long, 0) is not None
    short = [new_hold(1) for _ in range(2)]
    assert all(table.extend(one, 0) is not None for one in short)
    assert table.extend(new_hold(1), 0) is None
    assert table.extend(short[0], 0) is not None
    assert table.extend(new_hold(1), 10**9) is not None
    assert len(table) == 2


def test_100_000_holds_that_nobody_releases_cost_no_memory() -> None:
    table = HoldTable()
    now_ns = 0
    for _ in range(100_000):
        now_ns += 1_000_000
        assert table.extend(new_hold(1), now_ns) is not None
    assert len(table) <= 1200, "as many as are not over, and those that are looked at next"
