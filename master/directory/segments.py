"""A namespace's prefixes as a tree of segments, the largest ones or those that are read most: blocks in a row with no branch are one.
Pure: from a copy of the columns.

The tree of a million blocks takes some tenths of a second and no object a block: depths by doubling (the ancestors of ancestors), sizes of
subtrees a level at a time from the deepest up, and Python's loops only over what is told.
"""

import heapq
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.master.directory.contents import LIVE, Columns
from kvstore.master.directory.keys import NO_ROW
from kvstore.master.directory.usage import FASTEST, Held

MAX_DOUBLINGS: Final = 17
"""Lines of up to 131,072 blocks; what goes on longer, or in a circle, for its rows changed while they were copied, is cut."""
MAX_WALKED: Final = 1 << 18
"""Blocks that are looked at one by one: a fifth of a second. Segments that would take more end there."""

Numbers = npt.NDArray[np.int64]
Reads = npt.NDArray[np.float64]
"""A second, by row."""


@dataclass(frozen=True, slots=True)
class Segment:
    """`parent` is the place of the segment it goes on from, from 1; `row` that of its first block."""

    parent: int
    row: int
    held: Held
    subtree_bytes: int
    branches: int
    reads_per_s: float = 0.0
    """Blocks of its own that clients read in a second."""
    subtree_reads_per_s: float = 0.0


def segments(columns: Columns, tenant: str, namespace: str, *, limit: int, reads: Reads | None = None) -> list[Segment]:
    """The `limit` segments with the largest subtrees, each after the one that it goes on from; with `reads` those of which most blocks are
    read in a second, and none of which no block is."""
    rows, tree = _tree(columns, tenant, namespace, reads)
    if not len(rows):
        return []
    weights = tree.totals if reads is None else tree.read_totals
    masks = columns.row_masks()[rows]
    found: list[Segment] = []
    heap: list[tuple[float, int, int]] = []

    def offer(children: Numbers, parent: int) -> None:
        for child in children[np.argsort(-weights[children], kind="stable")[: limit - len(found)]].tolist():
            heapq.heappush(heap, (-weights[child].item(), child, parent))

    roots = tree.children(0)
    offer(roots[weights[roots] > 0], 0)
    walked = 0
    while heap and len(found) < limit and walked < MAX_WALKED:
        _weight, first, parent = heapq.heappop(heap)
        run = tree.run(first, MAX_WALKED - walked)
        walked += len(run)
        places = np.array(run) - 1
        tiers = np.bincount(FASTEST[masks[places] & (LIVE - 1)], weights=tree.own[run].astype(np.float64), minlength=4)
        held = Held(int(np.count_nonzero(tree.own[run])), (*tiers.astype(np.int64).tolist(),))
        onward = tree.children(run[-1])
        own_reads, all_reads = float(tree.reads[run].sum()), float(tree.read_totals[first])
        found.append(Segment(parent, int(rows[first - 1]), held, int(tree.totals[first]), len(onward), own_reads, all_reads))
        offer(onward[weights[onward] > 0], len(found))
    return found


@dataclass(slots=True)
class _Tree:
    """Of nodes from 1; 0 is above all."""

    own: Numbers
    totals: Numbers
    reads: Reads
    read_totals: Reads
    _by_parent: Numbers
    _begins: Numbers

    def children(self, node: int) -> Numbers:
        """Those with anything below them."""
        found = self._by_parent[self._begins[node] : self._begins[node + 1]]
        return found[self.totals[found] > 0]

    def run(self, node: int, limit: int) -> list[int]:
        """The node and those after it as long as each is the only one; `limit` at most."""
        run = [node]
        while len(run) < limit and len(onward := self.children(run[-1])) == 1:
            run.append(int(onward[0]))
        return run


def _tree(columns: Columns, tenant: str, namespace: str, reads: Reads | None) -> tuple[Numbers, _Tree]:
    """The rows of the tree's nodes from 1 on, and the tree."""
    indexes = [index for index, name in columns.tenant_names.items() if name == tenant]
    spaces = [index for index, name in enumerate(columns.namespace_names) if name == namespace]
    is_live = columns.row_masks() & LIVE != 0
    is_theirs = np.isin(columns.tenants, indexes)
    is_theirs[NO_ROW] = False
    counts = is_live & np.isin(columns.namespaces, spaces)
    rows = np.flatnonzero(is_theirs & (counts | ~is_live))  # a block that is gone still links those that are not
    place = np.zeros(len(columns.parents), np.int64)
    place[rows] = np.arange(1, len(rows) + 1)
    parents = np.concatenate(([0], place[columns.parents[rows]]))
    own = np.concatenate(([0], np.where(counts[rows], columns.sizes[rows], 0).astype(np.int64)))
    depths, parents = _depths(parents)
    totals = own.copy()
    read = np.zeros(len(own)) if reads is None else np.concatenate(([0.0], np.where(counts[rows], reads[rows], 0.0)))
    read_totals = read.copy()
    order = np.argsort(depths, kind="stable")
    begins = np.searchsorted(depths[order], np.arange(int(depths.max(initial=0)) + 2))
    for depth in range(len(begins) - 2, 0, -1):
        level = order[begins[depth] : begins[depth + 1]]
        np.add.at(totals, parents[level], totals[level])
        if reads is not None:
            np.add.at(read_totals, parents[level], read_totals[level])
    parents[0] = -1
    by_parent = np.argsort(parents, kind="stable")
    child_begins = np.searchsorted(parents[by_parent], np.arange(len(parents) + 1))
    return rows, _Tree(own, totals, read, read_totals, by_parent, child_begins)


def _depths(parents: Numbers) -> tuple[Numbers, Numbers]:
    """How many ancestors each node has, and the parents less those of lines that are too long."""
    ancestors, depths = parents.copy(), (parents > 0).astype(np.int64)
    for _ in range(MAX_DOUBLINGS):
        if not ancestors.any():
            break
        depths += depths[ancestors]
        ancestors = ancestors[ancestors]
    is_lost = ancestors > 0
    return np.where(is_lost, 0, depths), np.where(is_lost, 0, parents)
