"""Check of the invariants of a model of the `prefix` policies. For tests; O(blocks)."""

from collections import Counter

from kvstore.tiers.policies.interface import K
from kvstore.tiers.policies.prefix.expected_reads import ExpectedRead
from kvstore.tiers.policies.prefix.model import PrefixModel
from kvstore.tiers.policies.prefix.nodes import PrefixNode, has_cycle
from kvstore.tiers.policies.prefix.visits import VisitRun


def check_model(model: PrefixModel[K]) -> None:
    """Assert that nodes, runs, orders, links, ghosts and hints agree."""
    nodes = {key: node for key, node in model.nodes.items() if isinstance(node, PrefixNode)}
    runs = {key: run for key, run in model.nodes.items() if isinstance(run, VisitRun)}
    assert len(model.nodes) == len(nodes) + len(runs)
    assert all(run.left == count for run, count in Counter(runs.values()).items())
    for place in model.places:
        filed = place.order.check_integrity()
        in_runs = {key: (run.home, 1) for key, run in runs.items() if run.places[0] is place}
        leaves = {key: (node.home, node.kind) for key, node in nodes.items() if place in node.places[: node.filed]}
        assert filed == in_runs | leaves
        assert place.count == len(in_runs) + sum(place in node.places for node in nodes.values())
    for key, node in nodes.items():
        _check_filed(key, node, nodes, is_waiting=model.current.is_waiting(key))
        _check_links(key, node, nodes, model)
    for parent, children in model.tree.parentless.items():
        assert children
        assert parent not in model.nodes
    assert not any(has_cycle(key, model.tree.parent_of) for key in nodes)
    assert not any(key in model.nodes for key in model.ghosts.by_key)
    _check_hints(nodes, model)


def _check_filed(key: K, node: PrefixNode[K], nodes: dict[K, PrefixNode[K]], *, is_waiting: bool) -> None:
    assert list(node.places) == sorted(set(node.places), key=lambda place: place.tier)
    tiers = [nodes[child].places[0].tier for child in node.children] if node.child is not None else []
    count = sum(place.tier < min(tiers, default=place.tier + 1) for place in node.places)
    assert node.leaf_places() == count
    assert node.filed == (count if node.home is not None else 0)
    assert (node.home is not None) == bool(count) or is_waiting, f"{key}: leaves are filed, others are not"


def _check_links(key: K, node: PrefixNode[K], nodes: dict[K, PrefixNode[K]], model: PrefixModel[K]) -> None:
    assert all(nodes[child].parent == key for child in (node.children if node.child is not None else ()))
    if node.parent is not None:
        above = nodes.get(node.parent)
        assert key in (above.children if above is not None else model.tree.parentless[node.parent])


def _check_hints(nodes: dict[K, PrefixNode[K]], model: PrefixModel[K]) -> None:
    hints = model.estimate.hints
    if hints is None:
        return
    hints.check_integrity(lambda key: key in model.nodes or key in model.ghosts.by_key)
    filed = {key: node for key, node in nodes.items() if node.home not in (None, model.filer.orphans)}
    assert all(node.kind >> 1 == hints.level(key) for key, node in filed.items())
    expected = {key: node.home for key, node in filed.items() if isinstance(node.home, ExpectedRead)}
    assert all(not home.is_over and hints.expected(key) is home for key, home in expected.items())
