"""Contents of the directory for display: copies of its columns, usage by tenant and namespace, and the prefix tree.

The columns are copied in slices; the rest is pure, and works on the copy in a thread of its own. Rows may change
between slices: a copy may miss a block, have it twice, or have a parent whose row is another block's by then.

The tree of a million blocks takes some tenths of a second and no object per block: depths by pointer doubling,
subtree sizes by level from the deepest up, and Python loops only over the returned segments."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.master.directory.index.keys import NO_ROW
from kvstore.master.directory.index.rows import Rows
from kvstore.master.directory.index.tenants import Tenants
from kvstore.protocol.message import TIER_BITS

Indexes = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint64]


@dataclass(slots=True)
class ContentsColumns:
    """Copied columns, by row. Row 0 is none."""

    sizes: Bytes
    parents: Indexes
    tenants: Indexes
    namespaces: Indexes
    holders: Indexes
    masks: npt.NDArray[np.uint8]
    """By index of holders: LIVE if a block with them is readable, and the bits of the tiers that hold it."""
    tenant_names: dict[int, str] = field(default_factory=dict)
    namespace_names: list[str] = field(default_factory=list)
    pins: dict[int, int] = field(default_factory=dict)
    """Pinned keys by tenant's index."""

    def row_masks(self) -> npt.NDArray[np.uint8]:
        """Return `masks` by row; 0 for holders that are newer than the copy."""
        return self.masks[np.where(self.holders < len(self.masks), self.holders, 0)]


LIVE = 1 << 7


def copied(rows: Rows, tenants: Tenants, *, slice_rows: int) -> Iterator[ContentsColumns | None]:
    """Copy the columns in slices: yields None after each slice but the last, then the copy. The directory may change
    in between."""
    count = len(rows)
    sizes: Bytes = np.zeros(count, np.uint64)
    others: list[Indexes] = [np.zeros(count, np.uint32) for _ in range(4)]
    for begin in range(0, count, slice_rows):
        end = min(begin + slice_rows, count)
        sizes[begin:end] = rows.sizes[begin:end]
        for copy, column in zip(others, (rows.parents, rows.tenant_indexes, rows.namespace_indexes, rows.holders), strict=True):
            copy[begin:end] = column[begin:end]
        yield None
    masks: list[int] = []
    while len(masks) < len(rows.sets.tiers):
        begin = len(masks)
        masks += map(_mask, rows.sets.live[begin : begin + slice_rows], rows.sets.tiers[begin : begin + slice_rows])
        yield None
    parents, tenant_indexes, namespaces, holders = others
    parents[parents >= count] = NO_ROW  # of a reused row, whose parent is newer than the copy
    yield ContentsColumns(
        sizes,
        parents,
        tenant_indexes,
        namespaces,
        holders,
        np.array(masks, np.uint8),
        {tenant.index: tenant.name for tenant in tenants},
        rows.namespaces.names(),
        {tenant.index: len(tenant.pins) for tenant in tenants},
    )


def joined(parts: Sequence[ContentsColumns], links: Sequence[tuple[Indexes, Indexes]]) -> tuple[ContentsColumns, list[int]]:
    """Concatenate the tables of all partitions; return them and the first row of each. `links` map, for each table,
    rows that stand for other partitions' blocks to their rows in the whole."""
    begins = np.cumsum([0, *(len(part.sizes) for part in parts)]).tolist()
    tenants, namespaces, pins = dict[str, int](), dict[str, int](), dict[int, int]()
    stands_for = np.arange(begins[-1], dtype=np.uint32)
    columns: list[list[Indexes]] = [[], [], [], []]
    sets = 0
    for part, begin, (rows, others) in zip(parts, begins, links, strict=False):
        stands_for[rows + begin] = others
        of_tenant = np.zeros(max(part.tenant_names, default=0) + 1, np.uint32)
        for index, name in part.tenant_names.items():
            of_tenant[index] = tenants.setdefault(name, len(tenants))
            pins[int(of_tenant[index])] = pins.get(int(of_tenant[index]), 0) + part.pins.get(index, 0)
        of_namespace = np.array([namespaces.setdefault(name, len(namespaces)) for name in part.namespace_names] or [0], np.uint32)
        holders = np.where(part.holders < len(part.masks), part.holders, 0)
        made = (
            np.where(part.parents == NO_ROW, 0, part.parents + begin),
            of_tenant[np.minimum(part.tenants, len(of_tenant) - 1)],
            of_namespace[np.minimum(part.namespaces, len(of_namespace) - 1)],
            holders + sets,
        )
        for column, one in zip(columns, made, strict=True):
            column.append(one.astype(np.uint32))
        sets += len(part.masks)
    parents, tenant_indexes, namespace_indexes, holder_indexes = (np.concatenate(column) for column in columns)
    sizes, masks = np.concatenate([part.sizes for part in parts]), np.concatenate([part.masks for part in parts])
    names = {index: name for name, index in tenants.items()}
    whole = ContentsColumns(
        sizes, stands_for[parents], tenant_indexes, namespace_indexes, holder_indexes, masks, names, list(namespaces), pins
    )
    return whole, begins[:-1]


def _mask(live: int, tiers: bytes) -> int:
    mask = LIVE if live else 0
    for one in set(tiers):
        mask |= one
    return mask


FASTEST: Final = np.array([next((place for place, bit in enumerate(TIER_BITS.values()) if mask & bit), 3) for mask in range(256)])
"""By tier mask: index of the fastest tier, 0 for HBM; 3 for none."""


@dataclass(frozen=True, slots=True)
class TierUsage:
    """Number of blocks, and bytes by their fastest tier: HBM, DRAM, NVMe, unknown."""

    blocks: int
    tiers: tuple[int, int, int, int]

    @property
    def size_bytes(self) -> int:
        return sum(self.tiers)


@dataclass(frozen=True, slots=True)
class BlockUsage:
    """Usage of one tenant's namespace."""

    tenant: str
    namespace: str
    held: TierUsage
    pinned: int
    """Pinned blocks of the tenant, in all namespaces."""


def usage(columns: ContentsColumns, tenant: str | None, *, limit: int) -> list[BlockUsage]:
    """Return the usage of one tenant or all (None), the largest first, at most `limit`. O(rows)."""
    masks = columns.row_masks()
    index = {name: number for number, name in columns.tenant_names.items()}.get(tenant, -1) if tenant is not None else None
    chosen = np.flatnonzero((masks & LIVE != 0) & ((columns.tenants == index) if index is not None else True))
    width = len(columns.namespace_names)
    groups, at = np.unique(columns.tenants[chosen].astype(np.int64) * width + columns.namespaces[chosen], return_inverse=True)
    blocks = np.bincount(at, minlength=len(groups))
    sizes = tier_sums(at, masks[chosen], columns.sizes[chosen], len(groups))
    order = np.argsort(-sizes.sum(axis=1), kind="stable")[:limit]
    return [
        BlockUsage(
            columns.tenant_names.get(owner := int(groups[place]) // width, ""),
            columns.namespace_names[int(groups[place]) % width],
            TierUsage(int(blocks[place]), (*sizes[place].tolist(),)),
            columns.pins.get(owner, 0),
        )
        for place in order.tolist()
    ]


def tier_sums(
    groups: "npt.NDArray[np.intp]", masks: "npt.NDArray[np.uint8]", sizes: "npt.NDArray[np.uint64]", count: int
) -> "npt.NDArray[np.int64]":
    """Return bytes of `count` groups by fastest tier: [group, tier]. Exact up to 8 PiB a group and tier."""
    places = groups * 4 + FASTEST[masks & (LIVE - 1)]
    summed = np.bincount(places, weights=sizes.astype(np.float64), minlength=4 * count)
    return summed.astype(np.int64).reshape(count, 4)


MAX_DOUBLINGS: Final = 17
"""Chains of up to 131,072 blocks. Longer chains, and cycles (rows may change during the copy), are cut."""
MAX_WALKED: Final = 1 << 18
"""Blocks visited one by one: a fifth of a second. Segments that would take more are cut there."""

Numbers = npt.NDArray[np.int64]
Reads = npt.NDArray[np.float64]
"""Reads a second, by row."""


@dataclass(frozen=True, slots=True)
class ChainSegment:
    """Blocks of one chain without a branch. `parent` is the number of the preceding segment, from 1; `row` is its
    first block."""

    parent: int
    row: int
    held: TierUsage
    subtree_bytes: int
    branches: int
    reads_per_s: float = 0.0
    """Reads a second of its own blocks."""
    subtree_reads_per_s: float = 0.0


def segments(columns: ContentsColumns, tenant: str, namespace: str, *, limit: int, reads: Reads | None = None) -> list[ChainSegment]:
    """Return the `limit` segments with the largest subtrees, each after its parent. With `reads`: those with the
    most reads a second, without unread ones."""
    rows, tree = _tree(columns, tenant, namespace, reads)
    if not len(rows):
        return []
    weights = tree.totals if reads is None else tree.read_totals
    masks = columns.row_masks()[rows]
    found: list[ChainSegment] = []
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
        held = TierUsage(int(np.count_nonzero(tree.own[run])), (*tiers.astype(np.int64).tolist(),))
        onward = tree.children(run[-1])
        own_reads, all_reads = float(tree.reads[run].sum()), float(tree.read_totals[first])
        found.append(ChainSegment(parent, int(rows[first - 1]), held, int(tree.totals[first]), len(onward), own_reads, all_reads))
        offer(onward[weights[onward] > 0], len(found))
    return found


@dataclass(slots=True)
class _Tree:
    """Prefix tree: nodes count from 1, and 0 is the root."""

    own: Numbers
    totals: Numbers
    reads: Reads
    read_totals: Reads
    _by_parent: Numbers
    _begins: Numbers

    def children(self, node: int) -> Numbers:
        """Children with a nonempty subtree."""
        found = self._by_parent[self._begins[node] : self._begins[node + 1]]
        return found[self.totals[found] > 0]

    def run(self, node: int, limit: int) -> list[int]:
        """Return the node and its descendants while each is the only child; at most `limit`."""
        run = [node]
        while len(run) < limit and len(onward := self.children(run[-1])) == 1:
            run.append(int(onward[0]))
        return run


def _tree(columns: ContentsColumns, tenant: str, namespace: str, reads: Reads | None) -> tuple[Numbers, _Tree]:
    """Return the rows of the tree's nodes from 1 on, and the tree."""
    indexes = [index for index, name in columns.tenant_names.items() if name == tenant]
    spaces = [index for index, name in enumerate(columns.namespace_names) if name == namespace]
    is_live = columns.row_masks() & LIVE != 0
    is_theirs = np.isin(columns.tenants, indexes)
    is_theirs[NO_ROW] = False
    counts = is_live & np.isin(columns.namespaces, spaces)
    rows = np.flatnonzero(is_theirs & (counts | ~is_live))  # an unreadable block still links its children
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
    """Return each node's number of ancestors, and the parents without those of too long chains."""
    ancestors, depths = parents.copy(), (parents > 0).astype(np.int64)
    for _ in range(MAX_DOUBLINGS):
        if not ancestors.any():
            break
        depths += depths[ancestors]
        ancestors = ancestors[ancestors]
    is_lost = ancestors > 0
    return np.where(is_lost, 0, depths), np.where(is_lost, 0, parents)
