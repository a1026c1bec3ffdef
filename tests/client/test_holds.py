"""Holds of a client: plain values, their targets, and the bound on those that are never released."""

from typing import Any

import pytest

from kvstore.client import holds, new_hold
from kvstore.client.holds import HoldTable

NODE: Any = object()
"""Stands for a LocalNode: the table only keeps it."""


def test_hold_table_purges_expired_holds_only(monkeypatch: pytest.MonkeyPatch) -> None:
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
