"""Choice of replicas, and requests to the master for locations. Against a scripted cluster."""

import pytest

from kvstore.protocol.master_messages import Lookup
from tests.client.oracle import Oracle, Pair
from tests.client.reads.gets import get


@pytest.mark.parametrize(
    ("local", "tiers", "own", "chosen"),
    [
        ((True, False), (4, 2), 1, 1),
        ((False, True), (2, 4), 2, 2),
        ((False, False), (4, 2), 0, 2),
        ((True, True), (4, 2), 1, 2),
        ((True, True), (2, 2), 1, 1),
        ((True, True), (2, 2), 2, 2),
        ((False, False), (2, 2), 0, 2),
    ],
    ids=["this host", "this host again", "faster tier", "faster tier of this host", "own node", "own node again", "any"],
)
def test_best_replica_is_local_then_by_tier_then_preferred(
    nodes: Pair, local: tuple[bool, bool], tiers: tuple[int, int], own: int, chosen: int
) -> None:
    for node, is_local, tier in zip(nodes, local, tiers, strict=True):
        node.local, node.tier = is_local, tier
    oracle = Oracle(*nodes, spread=own - 1 if all(local) else 0)
    oracle.store(b"k", b"v", 1, 2)
    get(oracle, b"k")
    assert oracle.resources.daemons.nodes.local_id == own
    assert [hint and hint.node_id for hint in oracle.resources.hints.find([b"k"])] == [chosen], "from the first question on"


@pytest.mark.promise("last-replica-last")
def test_clients_spread_over_equal_replicas(nodes: Pair) -> None:
    nodes[0].local = False
    chosen = set()
    for spread in range(16):
        oracle = Oracle(*nodes, spread=spread)
        for key in (b"k", b"other"):
            oracle.store(key, b"v", 1, 2)
        assert get(oracle, b"k", b"other") == [b"v"] * 2
        [node_id] = {hint.node_id for hint in oracle.resources.hints.find([b"k", b"other"]) if hint is not None}
        chosen.add(node_id)
    assert chosen == {1, 2}


def test_stale_remote_hint_finds_a_local_copy(nodes: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = Oracle(*nodes)
    for key in (b"k", b"other", b"near"):
        oracle.store(key, b"v", 1 if key == b"near" else 2)
    assert get(oracle, b"k", b"other", b"near") == [b"v"] * 3
    nodes[0].blocks[b"k"] = nodes[1].blocks[b"k"]
    oracle.replicas[b"k"] = [1, 2]
    before = len(oracle.sent(Lookup))
    assert get(oracle, b"k", b"near") == [b"v"] * 2
    assert len(oracle.sent(Lookup)) == before, "not so soon"
    monkeypatch.setattr("kvstore.client.reads.replica_lookup.REMOTE_HINT_TTL_NS", 0)
    assert get(oracle, b"near", b"k", b"other") == [b"v"] * 3
    assert [message.keys for message in oracle.sent(Lookup)[before:]] == [[b"k", b"other"]], "what is near is not asked for"
    assert [hint and hint.node_id for hint in oracle.resources.hints.find([b"k", b"other", b"near"])] == [1, 2, 1]
    assert get(oracle, b"k") == [b"v"]
    assert len(oracle.sent(Lookup)) == before + 1


@pytest.mark.parametrize("makes_hot_copies", [False, True])
def test_hints_are_refreshed_only_with_hot_copies(nodes: Pair, monkeypatch: pytest.MonkeyPatch, makes_hot_copies: bool) -> None:
    monkeypatch.setattr("kvstore.client.reads.replica_lookup.REMOTE_HINT_TTL_NS", 0)
    nodes[0].local = False
    oracle = Oracle(*nodes)
    oracle.makes_hot_copies = makes_hot_copies
    oracle.store(b"k", b"v", 1)
    get(oracle, b"k")
    nodes[1].blocks[b"k"] = nodes[0].blocks[b"k"]
    oracle.replicas[b"k"] = [1, 2]
    asked = len(oracle.sent(Lookup))
    assert get(oracle, b"k") == [b"v"]
    assert len(oracle.sent(Lookup)) == asked + makes_hot_copies
    assert [hint and hint.node_id for hint in oracle.resources.hints.find([b"k"])] == [2 if makes_hot_copies else 1]
