"""Promises of model.py, of a simulated cluster."""

from typing import Any

import pytest

from kvstore.console.model import KEPT, NODE_FIELDS, NODE_KEPT, ConsoleModel, Document, figures, node_figures
from kvstore.protocol import control_pb2 as pb
from tests.console.serving import Clock
from tests.console.simulated import Simulated


def looked(source: Simulated, clock: Clock, seconds: float = 10.0) -> Document:
    """The second of two looks."""
    model = ConsoleModel()
    model.document(source.status(), at_s=clock(), wall_s=1.0)
    clock.now_s += seconds
    return model.document(source.status(), at_s=clock(), wall_s=2.0)


def node(document: Document, name: str) -> dict[str, Any]:
    rows = {row[1]: dict(zip(NODE_FIELDS, row, strict=True)) for row in document["nodes"]["rows"]}
    return rows[name]


def test_totals_sum_nodes_and_rates_their_counters() -> None:
    clock = Clock()
    document = looked(Simulated(12, clock), clock)
    totals, rows = document["totals"], [dict(zip(NODE_FIELDS, row, strict=True)) for row in document["nodes"]["rows"]]
    for name in ("hits_per_s", "out_bytes_per_s", "in_bytes_per_s", "evictions_per_s"):
        assert totals[name] == pytest.approx(sum(row[name] for row in rows), rel=1e-3)
        assert totals[name] > 0
    assert totals["misses_per_s"] == pytest.approx(sum(row["misses_per_s"] for row in rows) + 600 * 12, rel=1e-3), "the master's too"
    assert totals["hit_ratio"] == pytest.approx(totals["hits_per_s"] / (totals["hits_per_s"] + totals["misses_per_s"]), abs=1e-3)
    assert totals["keys_per_s"] == pytest.approx(40_000)
    assert [tier["name"] for tier in document["tiers"]] == ["hbm", "dram", "nvme"]
    assert totals["used_bytes"] == sum(tier["used_bytes"] for tier in document["tiers"])
    assert totals["hits_per_s"] == pytest.approx(sum(tier["hits_per_s"] for tier in document["tiers"]), rel=1e-3)
    assert set(figures(document)) <= set(KEPT)
    assert node_figures(document)["node-3"] == {name: node(document, "node-3")[name] for name in NODE_KEPT}


def test_document_has_what_moved_and_what_leaves_next() -> None:
    clock = Clock()
    document = looked(Simulated(3, clock), clock)
    rows = {row["reason"]: row for row in document["moves"]["rows"]}
    assert {"copied_blocks_home", "demotions", "evicted_room", "evicted_secondary"} <= rows.keys()
    assert rows["copied_blocks_home"]["blocks_per_s"] > 0
    assert rows["copied_blocks_home"]["bytes"] > rows["copied_blocks_home"]["blocks"]
    assert rows["evicted_room"]["bytes"] is None
    assert document["moves"]["without_home_copy"] == {"had left the writer's node before": 1200}
    assert document["totals"]["local_ratio"] == pytest.approx(0.75)
    assert node(document, "node-1")["next_victims"] == [["dram", "", 101, 0.0215], ["nvme", "", 111, 0.0107]]
    assert node(document, "node-1")["home_copies_sent"] > 0


def test_a_status_that_is_told_again_is_of_when_it_was_told() -> None:
    """As of an owner that does not answer: a rate of nothing, and then a multiple, would never have been."""
    model = ConsoleModel()

    def rates(second: int, *, at_s: int) -> tuple[float, float]:
        nodes = [pb.NodeStatus(name="n", state="alive", counters={"misses": 1000 * second}, heartbeat_age_s=at_s - second)]
        status = pb.StatusReply(epoch=1, nodes=nodes, counters={"keys": 500 * second})
        totals = model.document(status, at_s=at_s, wall_s=1, age_s=at_s - second)["totals"]
        return totals["misses_per_s"], totals["keys_per_s"]

    rates(1, at_s=1)
    assert [rates(2, at_s=2), rates(2, at_s=4), rates(5, at_s=5)] == [(1000, 500)] * 3


def test_model_has_no_rates_for_one_poll_after_owner_change() -> None:
    """The counters of its new owner begin at 0, and those of the process of one that owned none were never seen."""
    model = ConsoleModel()

    def keys_per_s(second: int, *owners: tuple[str, int, int]) -> float:
        counters, at = {"keys": sum(count for _name, _epoch, count in owners)}, float(second)
        told = [pb.CatalogOwner(name=name, epoch=epoch) for name, epoch, _count in owners]
        status = pb.StatusReply(role="owner", epoch=owners[0][1], partitions=2, owners=told, counters=counters)
        found: float = model.document(status, at_s=at, wall_s=at)["totals"]["keys_per_s"]
        return found

    looks = [(("m1", 7, 50_000), ("m2", 9, 40_000)), (("m1", 7, 50_500), ("m2", 9, 40_500)), (("m1", 7, 51_000), ("m1", 12, 0))]
    looks += [(("m1", 7, 51_500), ("m1", 12, 500)), (("m1", 7, 52_000), ("m3", 13, 90_000)), (("m1", 7, 52_500), ("m3", 13, 90_500))]
    assert [keys_per_s(second, *owners) for second, owners in enumerate(looks)] == [0, 1000, 0, 1000, 0, 1000]


def test_a_dead_node_moves_nothing_and_its_tiers_are_nobodys() -> None:
    clock = Clock()
    document = looked(Simulated(3, clock, dead=[1]), clock)
    assert node(document, "node-1")["hits_per_s"] == 0
    assert (document["totals"]["alive"], document["totals"]["nodes"]) == (2, 3)
    assert [tier["nodes"] for tier in document["tiers"]] == [1, 2, 2]


def test_model_idle_has_no_hit_ratio_and_empty_no_tiers() -> None:
    document = ConsoleModel().document(pb.StatusReply(role="owner"), at_s=1, wall_s=1)
    assert (document["totals"]["hit_ratio"], document["tiers"], document["nodes"]["rows"]) == (None, [], [])
    assert [trouble["text"] for trouble in document["problems"]] == ["No node has joined yet"]


def test_operations_are_slowest_first_with_mean_and_daemon() -> None:
    clock = Clock()
    document = looked(Simulated(12, clock, dead=[6]), clock)
    found = document["operations"]
    assert [(one["where"], one["operation"], one["slowest_s"], one["slowest_at"]) for one in found] == [
        ("nodes", "put", 0.013, "node-5"),
        ("nodes", "read", 0.007, "node-10"),
        ("master", "match_prefix", 0.0061, "master-1:7440"),
        ("master", "lookup", 0.0024, "master-1:7440"),
    ]
    assert [one["mean_s"] for one in found] == pytest.approx([240e-6, 85e-6, 310e-6, 130e-6], rel=1e-3)
    assert found[3]["per_s"] == pytest.approx(800)


def test_model_has_partition_shares_and_unowned_problems() -> None:
    clock = Clock()
    source = Simulated(3, clock)
    assert ConsoleModel().document(source.status(), at_s=1, wall_s=1)["catalog"]["shares"] == {}
    source.owners = ["master-2", "master-1", "master-1", "master-2", "master-1"]
    document = ConsoleModel().document(source.status(), at_s=1, wall_s=1)
    assert (document["catalog"]["partitions"], document["catalog"]["shares"]) == (5, {"master-1": 3, "master-2": 2})
    well = document["problems"]
    source.owners = ["master-1", "", "", "master-1", "master-1"]
    document = ConsoleModel().document(source.status(), at_s=1, wall_s=1)
    assert [one["text"] for one in document["problems"]] == ["No master owns 2 of the 5 partitions", *(one["text"] for one in well)]
    untold = ConsoleModel().document(pb.StatusReply(partitions=4, nodes=[pb.NodeStatus(name="n", state="alive")]), at_s=1, wall_s=1)
    assert (untold["catalog"]["shares"], untold["problems"]) == ({}, []), "of a master of the release before"
