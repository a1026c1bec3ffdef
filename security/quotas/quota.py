"""Quota values of tenants, immutable.

Enforced by the block table (store/block_table/quotas.py), the directory, and sessions.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from types import MappingProxyType
from typing import Final

import xxhash

from kvstore.protocol.settings import format_size

BYTES: Final = ("hbm_bytes", "dram_bytes", "nvme_bytes")
"""Limits in bytes by tier, the fastest first; at each node, slot rounding included."""
SLABS: Final = ("hbm_slabs", "dram_slabs")
"""Limits in slabs, by tier as BYTES; NVMe has no slabs."""
SHARED: Final = ("pins", "reservations")
"""Limits of the whole cluster, divided among partitions (master/directory/limits/quotas.py)."""
PINS, RESERVATIONS = range(len(SHARED))
"""Indices in SHARED."""


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one tenant; None: no limit.

    - At each node: bytes by tier, `blocks` in all tiers, slabs in which the tenant has slots.
    - In the cluster: `pins`, and `reservations` (granted puts that are not published).
    - At each daemon: `requests_in_flight`, `connections`.
    """

    hbm_bytes: int | None = None
    dram_bytes: int | None = None
    nvme_bytes: int | None = None
    blocks: int | None = None
    pins: int | None = None
    reservations: int | None = None
    requests_in_flight: int | None = None
    connections: int | None = None
    # Records of the catalog have limits by index in this order (master/directory/records.py): append new ones.
    hbm_slabs: int | None = None
    dram_slabs: int | None = None

    def of_tier(self, index: int) -> int | None:
        """Return the limit of bytes in a tier, by its index in BYTES."""
        limit: int | None = getattr(self, BYTES[index])
        return limit

    def slabs_of_tier(self, index: int) -> int | None:
        """Return the limit of slabs in a tier, by its index in BYTES; None for one without slabs."""
        limit: int | None = getattr(self, SLABS[index]) if index < len(SLABS) else None
        return limit

    def limits(self) -> dict[str, int]:
        """Return the limits that are set, by name."""
        return {name: limit for name, limit in asdict(self).items() if limit is not None}


NAMES: Final = tuple(one.name for one in fields(Quota))
NO_QUOTA: Final = Quota()


@dataclass(frozen=True, slots=True)
class Quotas:
    """Quotas of all tenants: own ones, and the default."""

    default: Quota = NO_QUOTA
    tenants: Mapping[str, Quota] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, tenant: str) -> Quota:
        return self.tenants.get(tenant, self.default)

    @property
    def version(self) -> int:
        """Hash of the quotas, never 0: equal for equal quotas at every master."""
        parts = sorted((name, sorted(quota.limits().items())) for name, quota in self.tenants.items())
        return xxhash.xxh3_64_intdigest(repr((sorted(self.default.limits().items()), parts)).encode(errors="surrogatepass")) or 1


UNLIMITED: Final = Quotas()


def format_limits(quota: Quota, names: Collection[str]) -> str:
    """Format these limits in the order of NAMES: `dram_bytes 4 GiB, blocks no limit`.

    Bytes that are not whole units are exact.
    """
    return ", ".join(f"{name} {_shown(name, getattr(quota, name))}" for name in NAMES if name in names)


def _shown(name: str, limit: int | None) -> str:
    if limit is None:
        return "no limit"
    if name not in BYTES:
        return f"{limit:,}"
    text = format_size(limit)
    return text if "." not in text else f"{limit:,} B"
