"""Each role is killed at every one of its fail points, under load, and comes back: no byte is wrong, nothing acknowledged lost."""

from collections.abc import Iterator
from typing import Final

import pytest

from tests.faults.points import POINTS
from tests.faults.walking import NODES, Walk

TRIGGERS: Final = {
    "node.get.MapSlabs": "come",
    "node.get.OpenIndex": "come",
    "node.get.ReleaseLeases": "ask",
    "node.drain": "drain",
    "node.publish.register": "start",
    "node.publish.inventory": "start",
    "master.put.Nodes": "come",
    "master.register": "start",
    "master.takeover": "start",
    "master.drain": "drain",
}
"""By the beginning of a point's name; the others are passed by what the clients do."""


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    with Walk(tmp_path_factory.mktemp("walk")) as started:
        yield started
        started.end_load()
        assert started.judged().violations == {}
        for name in NODES:
            assert started.system.await_settled(name).counters["corrupt_reads"] == 0
            started.system.await_counters(name, open_puts=0, leases=0)


def test_every_point_names_a_function_of_the_product() -> None:
    for point in POINTS.values():
        owner, attribute = point.owner()
        assert owner.__module__.startswith("kvstore.")
        assert callable(getattr(owner, attribute))


def is_slow(point: str) -> bool:
    """A client that only reads changes nothing but its reader slot."""
    return ".get." in point and not point.startswith(("client.get.look", "client.get.copy"))


# After a step, a change has not been reported yet. Before it, the process is in the state that the previous step left.
AFTER: Final = [point for point in POINTS if point.endswith(".after")]


@pytest.mark.promise("get-exact-bytes")
@pytest.mark.parametrize("point", [pytest.param(point, marks=[pytest.mark.slow] * is_slow(point)) for point in AFTER])
def test_death_at_fail_point_costs_no_acknowledged_byte(walk: Walk, point: str) -> None:
    trigger = next((trigger for start, trigger in TRIGGERS.items() if point.startswith(start)), "load")
    verdict = walk.strike(point, trigger)
    assert verdict.violations == {}, "\n".join([*verdict.examples, *walk.system.logs[-50:]])
