"""Promises of scale.py."""

import itertools

import pytest

from tests.simulation.run import collecting_only_now
from tests.simulation.scale import SECONDS, Scale, Trouble


@pytest.mark.parametrize(("partitions", "more"), [(1, 0), (3, 30_000)])
def test_each_phase_is_measured_and_what_cannot_be_counted_twice_is_right(partitions: int, more: int) -> None:
    nodes, blocks, requests = 60, 600, 40
    with collecting_only_now():
        found = list(Scale(nodes, 60, blocks, requests, partitions=partitions, directory_blocks=more).rows())
    rows = {(row.name, row.unit): row.value for row in found}
    assert len(rows) == len(found)
    assert rows["nobody asks: a second of a node, sent", "messages"] >= partitions * (SECONDS - 1) / SECONDS, "its heartbeats"
    assert rows["a block that is put and published: clients, sent", "messages"] >= nodes / blocks
    assert rows["blocks that left with them", "blocks"] >= blocks * 50 / nodes, "and what requests put"
    assert rows["an owner is killed: until others own what it did", "s"] < 10
    if more:
        assert rows["blocks that the owners know of", "blocks"] == blocks + more
        assert rows["rows of forgotten nodes' blocks given back in a second", "blocks"] > 0
    timed = [row for row in found if row.unit == "us"]
    assert timed
    assert all(row.value > 0 for row in timed if "request" not in row.name and "that: an owner" not in row.name), (
        "less what an idle second costs, a request or a sweep may be nothing"
    )


def test_what_does_not_come_about_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.simulation.scale.UNTIL_NS", 0)
    with collecting_only_now(), pytest.raises(Trouble, match="it does not become so"):
        list(Scale(2, 2, 2, 1, partitions=1).rows())


def test_a_request_that_misses_what_was_put_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = itertools.count()
    monkeypatch.setattr("tests.simulation.scale.HIT_BLOCKS", 3)
    monkeypatch.setattr("tests.simulation.scale._key", lambda owner, number: b"%d %d %d" % (owner, number, next(counted)))
    with collecting_only_now(), pytest.raises(Trouble, match="blocks of request 0 are there"):
        list(Scale(2, 2, 20, 1, partitions=1).rows())
