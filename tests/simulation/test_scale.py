"""Promises of scale.py."""

import pytest

from tests.simulation.run import collecting_only_now
from tests.simulation.scale import SECONDS, Scale


@pytest.mark.slow  # `make bench-scale` is made of it, and no promise
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
