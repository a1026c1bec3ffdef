"""A copy of the columns that say what is held, taken a slice at a time: whoever looks at all rows does so in a thread of its own.

Between two slices rows may change, so a copy may tell of a block twice or not at all, and of a parent whose row is another block's by
then. It is for people to look at.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

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


def _mask(live: int, tiers: bytes) -> int:
    mask = LIVE if live else 0
    for one in set(tiers):
        mask |= one
    return mask
