"""What each tenant holds in each namespace. Pure: from a copy of the columns."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.master.directory.contents import LIVE, Columns
from kvstore.protocol.message import TIER_BITS

FASTEST: Final = np.array([next((place for place, bit in enumerate(TIER_BITS.values()) if mask & bit), 3) for mask in range(256)])
"""By a mask of tiers: which is the fastest of them, 0 for HBM; 3 for none that is known."""


@dataclass(frozen=True, slots=True)
class Held:
    """Blocks, and their bytes by the fastest tier that has them: HBM, DRAM, NVMe, not known."""

    blocks: int
    tiers: tuple[int, int, int, int]

    @property
    def size_bytes(self) -> int:
        return sum(self.tiers)


@dataclass(frozen=True, slots=True)
class Usage:
    tenant: str
    namespace: str
    held: Held
    pinned: int
    """Blocks of the tenant, in whatever namespace."""


def usage(columns: Columns, tenant: str | None, *, limit: int) -> list[Usage]:
    """Of one tenant or all (None), the largest first, `limit` at most. O(rows)."""
    masks = columns.row_masks()
    index = {name: number for number, name in columns.tenant_names.items()}.get(tenant, -1) if tenant is not None else None
    chosen = np.flatnonzero((masks & LIVE != 0) & ((columns.tenants == index) if index is not None else True))
    width = len(columns.namespace_names)
    groups, at = np.unique(columns.tenants[chosen].astype(np.int64) * width + columns.namespaces[chosen], return_inverse=True)
    blocks = np.bincount(at, minlength=len(groups))
    sizes = tier_sums(at, masks[chosen], columns.sizes[chosen], len(groups))
    order = np.argsort(-sizes.sum(axis=1), kind="stable")[:limit]
    return [
        Usage(
            columns.tenant_names.get(owner := int(groups[place]) // width, ""),
            columns.namespace_names[int(groups[place]) % width],
            Held(int(blocks[place]), (*sizes[place].tolist(),)),
            columns.pins.get(owner, 0),
        )
        for place in order.tolist()
    ]


def tier_sums(
    groups: "npt.NDArray[np.intp]", masks: "npt.NDArray[np.uint8]", sizes: "npt.NDArray[np.uint64]", count: int
) -> "npt.NDArray[np.int64]":
    """Bytes of `count` groups by fastest tier: [group, tier]. Exact up to 8 PiB a group and tier."""
    places = groups * 4 + FASTEST[masks & (LIVE - 1)]
    summed = np.bincount(places, weights=sizes.astype(np.float64), minlength=4 * count)
    return summed.astype(np.int64).reshape(count, 4)
