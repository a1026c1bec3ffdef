"""A copy of the columns that say what is held, taken a slice at a time: whoever looks at all rows does so in a thread of its own.

Between two slices rows may change, so a copy may tell of a block twice or not at all, and of a parent whose row is another block's by
then. It is for people to look at.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.master.directory.keys import NO_ROW
from kvstore.master.directory.rows import Rows
from kvstore.master.directory.tenants import Tenants

Indexes = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint64]


@dataclass(slots=True)
class Columns:
    """By row. Row 0 is none."""

    sizes: Bytes
    parents: Indexes
    tenants: Indexes
    namespaces: Indexes
    holders: Indexes
    masks: npt.NDArray[np.uint8]
    """By index of holders: 1 << 7 where a block with them can be read now, and the bits of the tiers that have it."""
    tenant_names: dict[int, str] = field(default_factory=dict)
    namespace_names: list[str] = field(default_factory=list)
    pins: dict[int, int] = field(default_factory=dict)
    """Pinned keys by tenant's index."""

    def row_masks(self) -> npt.NDArray[np.uint8]:
        """`masks` by row; of holders that came after they were copied 0."""
        return self.masks[np.where(self.holders < len(self.masks), self.holders, 0)]


LIVE = 1 << 7


def copied(rows: Rows, tenants: Tenants, *, slice_rows: int) -> Iterator[Columns | None]:
    """None after each slice but the last, then the copy. The directory may change while nobody iterates."""
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
    parents[parents >= count] = NO_ROW  # of a row that was used again meanwhile, whose parent came after the copy was begun
    yield Columns(
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


def joined(parts: Sequence[Columns], links: Sequence[tuple[Indexes, Indexes]]) -> tuple[Columns, list[int]]:
    """The tables of all partitions as one, and where the rows of each begin in it. `links` say, of the rows of each that stand for blocks
    of other partitions, which they are, by their places in the whole."""
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
    whole = Columns(sizes, stands_for[parents], tenant_indexes, namespace_indexes, holder_indexes, masks, names, list(namespaces), pins)
    return whole, begins[:-1]


def _mask(live: int, tiers: bytes) -> int:
    mask = LIVE if live else 0
    for one in set(tiers):
        mask |= one
    return mask
