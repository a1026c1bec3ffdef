"""What a tenant may take: of each node's tiers and blocks, of the master's pins and reservations, and of every daemon's attention.

Values; never changed. Who holds a tenant to them: the block table (store/block_table/quotas.py), the directory, and both daemons' sessions.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from types import MappingProxyType
from typing import Final

import xxhash

from kvstore.protocol.settings import format_size

BYTES: Final = ("hbm_bytes", "dram_bytes", "nvme_bytes")
"""Those counted in bytes, by tier from the fastest down: each at each node, slot rounding included."""
SLABS: Final = ("hbm_slabs", "dram_slabs")
"""Those counted in slabs, by tier as BYTES; NVMe has none."""
SHARED: Final = ("pins", "reservations")
"""Those that hold for the cluster as a whole, of which each partition has a share (master/directory/limits/quotas.py)."""
PINS, RESERVATIONS = range(len(SHARED))
"""Their places in it."""


@dataclass(frozen=True, slots=True)
class Quota:
    """Of one tenant; None: no limit.

    `blocks` at each node, in all its tiers together; `pins` and `reservations` (puts that the master has granted and that are not
    published) in the cluster; `requests_in_flight` and `connections` at each daemon; slabs at each node, those in which it has slots.
    """

    hbm_bytes: int | None = None
    dram_bytes: int | None = None
    nvme_bytes: int | None = None
    blocks: int | None = None
    pins: int | None = None
    reservations: int | None = None
    requests_in_flight: int | None = None
    connections: int | None = None
    # By their place in this order the catalog's records name them (master/directory/records.py): new ones come last.
    hbm_slabs: int | None = None
    dram_slabs: int | None = None

    def of_tier(self, index: int) -> int | None:
        """Bytes in a tier, by its place among BYTES."""
        limit: int | None = getattr(self, BYTES[index])
        return limit

    def slabs_of_tier(self, index: int) -> int | None:
        """Slabs in a tier, by its place among BYTES; None of one that has no slabs."""
        limit: int | None = getattr(self, SLABS[index]) if index < len(SLABS) else None
        return limit

    def limits(self) -> dict[str, int]:
        """What is limited, by name."""
        return {name: limit for name, limit in asdict(self).items() if limit is not None}


NAMES: Final = tuple(one.name for one in fields(Quota))
NO_QUOTA: Final = Quota()


@dataclass(frozen=True, slots=True)
class Quotas:
    """Of all tenants: those with a quota of their own, and the others."""

    default: Quota = NO_QUOTA
    tenants: Mapping[str, Quota] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, tenant: str) -> Quota:
        return self.tenants.get(tenant, self.default)

    @property
    def version(self) -> int:
        """Differs where the quotas do, is the same at every master that has these, and never 0."""
        parts = sorted((name, sorted(quota.limits().items())) for name, quota in self.tenants.items())
        return xxhash.xxh3_64_intdigest(repr((sorted(self.default.limits().items()), parts)).encode(errors="surrogatepass")) or 1


UNLIMITED: Final = Quotas()


def format_limits(quota: Quota, names: Collection[str]) -> str:
    """These limits for people, in the order of NAMES: `dram_bytes 4 GiB, blocks no limit`. Bytes that are no whole unit are exact."""
    return ", ".join(f"{name} {_shown(name, getattr(quota, name))}" for name in NAMES if name in names)


def _shown(name: str, limit: int | None) -> str:
    if limit is None:
        return "no limit"
    if name not in BYTES:
        return f"{limit:,}"
    text = format_size(limit)
    return text if "." not in text else f"{limit:,} B"
