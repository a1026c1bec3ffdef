"""Tests of `segments` in index/contents.py, against a tree of Python objects."""

import random

import numpy as np
import pytest

from kvstore.master.directory.index import contents as module
from kvstore.master.directory.index.contents import ChainSegment, ContentsColumns, segments
from kvstore.protocol.catalog_messages import EVENT_REMOVED
from tests.master.blocks import NVME, TENANT, Event, Master, one_node
from tests.master.directory.index.test_contents import copy


def told(master: Master, limit: int = 1000, namespace: str = "ns") -> dict[bytes, ChainSegment]:
    found = segments(copy(master), TENANT, namespace, limit=limit)
    return dict(zip([master.directory.columns()[0].keys[one.row] for one in found], found, strict=True))


def chain(keys: bytes, *, after: bytes = b"", size: int = 100, tiers: int = 2) -> list[Event]:
    parents = [after, *(bytes([key]) for key in keys)]
    return [Event(bytes([key]), size=size, tiers=tiers, parent=parent) for key, parent in zip(keys, parents, strict=False)]


def test_chain_is_one_segment_until_a_branch() -> None:
    master, node = one_node()
    master.publish(node, *chain(b"abc"), *chain(b"de", after=b"c", tiers=NVME), *chain(b"f", after=b"c"), *chain(b"z", size=1))
    found = told(master)
    assert list(found) == [b"a", b"d", b"f", b"z"]  # the largest subtrees first, each after the one that it goes on from
    root, left, right, other = found.values()
    assert (root.parent, root.held.blocks, root.held.tiers, root.subtree_bytes, root.branches) == (0, 3, (0, 300, 0, 0), 600, 2)
    assert (left.parent, left.held.blocks, left.held.tiers, left.subtree_bytes, left.branches) == (1, 2, (0, 0, 200, 0), 200, 0)
    assert (right.parent, right.held.blocks, other.parent, other.subtree_bytes) == (1, 1, 0, 1)


def test_largest_segments_are_returned_first() -> None:
    master, node = one_node()
    master.publish(node, *(Event(bytes([n]), size=n + 1) for n in range(50)))
    assert list(told(master, 3)) == [bytes([49]), bytes([48]), bytes([47])]


def test_gone_block_links_its_children_without_size() -> None:
    master, node = one_node()
    master.publish(node, *chain(b"abc"))
    master.publish(node, Event(b"b", 1, EVENT_REMOVED))
    (segment,) = told(master).values()
    assert (segment.held.blocks, segment.subtree_bytes) == (2, 200)


def test_other_namespaces_and_tenants_are_left_out() -> None:
    master, node = one_node(b"a")
    master.publish(node, Event(b"b", namespace="other"), Event(b"c", tenant="blue"))
    assert list(told(master)) == [b"a"]
    assert list(told(master, namespace="other")) == [b"b"]
    assert told(master, namespace="none") == {}
    assert segments(copy(master), "nobody", "ns", limit=9) == []


@pytest.mark.promise("observable")
def test_a_random_tree_agrees_with_one_of_objects() -> None:
    chosen = random.Random(5)
    master, node = one_node()
    parents: dict[bytes, bytes] = {}
    sizes: dict[bytes, int] = {}
    for number in range(400):
        key = number.to_bytes(2, "big")
        parents[key] = chosen.choice([b"", *list(parents)[-40:]])
        sizes[key] = chosen.randrange(1, 1000)
        master.publish(node, Event(key, size=sizes[key], parent=parents[key]))
    totals = dict(sizes)
    for key in reversed(list(parents)):
        if parents[key]:
            totals[parents[key]] += totals[key]
    children = {key: [one for one, parent in parents.items() if parent == key] for key in ["", *parents] if key}
    found = told(master)
    assert sum(one.held.blocks for one in found.values()) == 400
    for key, segment in found.items():
        assert segment.subtree_bytes == totals[key]
        end, blocks = key, 1
        while len(children[end]) == 1:
            end, blocks = children[end][0], blocks + 1
        assert (segment.held.blocks, segment.branches) == (blocks, len(children[end]))


def test_long_chains_and_cycles_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    master, node = one_node()
    master.publish(node, *chain(b"abcdefgh"))
    monkeypatch.setattr(module, "MAX_DOUBLINGS", 2)
    assert sum(one.held.blocks for one in told(master).values()) == 8
    monkeypatch.setattr(module, "MAX_WALKED", 3)
    assert sum(one.held.blocks for one in told(master).values()) <= 3 + 4
    monkeypatch.undo()
    columns: ContentsColumns = copy(master)
    columns.parents[1] = 8  # a circle
    assert sum(one.held.blocks for one in segments(columns, TENANT, "ns", limit=100)) == 8


def test_hottest_segments_come_with_their_ancestors() -> None:
    master, node = one_node()
    master.publish(
        node, *chain(b"ab"), *chain(b"cd", after=b"b"), *chain(b"e", after=b"b", size=9000), *chain(b"z", size=5000), *chain(b"y")
    )
    columns = copy(master)
    reads = np.zeros(len(columns.sizes))
    reads[master.directory.queries.rows_of(TENANT, [b"a", b"b", b"d", b"y"])] = (3.0, 2.0, 1.5, 4.0)
    found = segments(columns, TENANT, "ns", limit=10, reads=reads)
    assert [master.directory.columns()[0].keys[one.row] for one in found] == [b"a", b"y", b"c"]
    assert [(one.parent, one.reads_per_s, one.subtree_reads_per_s, one.subtree_bytes) for one in found] == [
        (0, 5.0, 6.5, 9400),
        (0, 4.0, 4.0, 100),
        (1, 1.5, 1.5, 200),
    ]
    assert [one.branches for one in found] == [2, 0, 0]
    assert segments(columns, TENANT, "ns", limit=10, reads=np.zeros(len(columns.sizes))) == []
    assert len(segments(columns, TENANT, "ns", limit=1, reads=reads)) == 1
