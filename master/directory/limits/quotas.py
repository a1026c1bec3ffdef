"""Quotas: limits that operators set, with their records, and a partition's share of a cluster-wide limit. Sans-I/O.

These override the master's quotas file (security/quotas/)."""

from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from kvstore.master.catalogs.interface import Op
from kvstore.master.directory import records
from kvstore.protocol.errors import Full, InvalidArgument, QuotaExceeded
from kvstore.security.quotas.limits import MAX_LIMIT, NamedLimits, check_name
from kvstore.security.quotas.quota import NAMES, SHARED, Quota

MAX_TENANTS: Final = 4096
"""Tenants with limits set by operators. Nodes get all of them in one message, 1 MiB with the longest names; use the
file for more."""

MIN_SHARE: Final = 1024
"""Minimum share of a partition, if the limit allows it: all keys of a batch may fall into one partition. So all
partitions together may exceed a small limit; none grants more than the whole limit."""
HAS: Final = ("blocks pinned", "puts granted and not published")
WHAT_TO_DO: Final = ("let some go", "put fewer at once")
"""Advice, in the order of SHARED, as HAS."""


class TenantShare(NamedTuple):
    """One tenant's limit: `now` in this partition, `whole` in the cluster. Equal with one partition."""

    now: int
    whole: int

    def exceeded(self, tenant: str, limit: int, *, used: int, more: int) -> QuotaExceeded:
        """Return the error that `more` exceed the limit of a tenant with `used` here. `limit` is its index in
        SHARED."""
        text, name = f"tenant {tenant!r} has {used} {HAS[limit]}", SHARED[limit]
        if self.now < self.whole:
            text += f" in one partition of the key space; {more} more exceed {self.now}, the share of each partition in"
        else:
            text += f"; {more} more exceed"
        return QuotaExceeded(f"{text} its quota of {self.whole} ({name}): {WHAT_TO_DO[limit]}, or have the operator raise it")


def share_of(quota: Quota, limit: int, partitions: int) -> TenantShare | None:
    """Return each partition's share of a limit, by its index in SHARED; None if the quota does not limit it."""
    whole: int | None = getattr(quota, SHARED[limit])
    return None if whole is None else TenantShare(min(whole, max(-(-whole // partitions), MIN_SHARE)), whole)


def unshared(_tenant: str, _limit: int) -> TenantShare | None:
    """Return None: no limit."""
    return None


class OperatorQuotas:
    """Limits set by operators, by tenant. Not thread-safe."""

    def __init__(self, recorded: Mapping[str, NamedLimits]) -> None:
        """Neither `recorded` nor `tenants` is changed in place."""
        self.tenants = recorded
        """Limits by tenant."""

    def set(self, tenant: str, limits: NamedLimits) -> list[Op]:
        """Set limits of the tenant; its other limits stay. Return operations.

        Raises InvalidArgument (no limit, an unknown one, one out of range, a too long name), Full: too many tenants
        have limits set; nothing has changed."""
        records.check_tenant(tenant)
        if not limits:
            raise InvalidArgument(f"no limit is given: set at least one of {', '.join(NAMES)}")
        for name, limit in limits.items():
            check_name(name)
            if limit is not None and not 0 <= limit <= MAX_LIMIT:
                raise InvalidArgument(f"{name}: {limit} is no limit; it is at most {MAX_LIMIT}")
        if tenant not in self.tenants and len(self.tenants) >= MAX_TENANTS:
            raise Full(f"{MAX_TENANTS} tenants have limits set by operators: clear those of some, or write limits into the quotas file")
        return self._become(tenant, {**self.tenants.get(tenant, {}), **limits})

    def clear(self, tenant: str, names: Collection[str] = ()) -> list[Op]:
        """Clear these limits of the tenant, or all, so that the file's apply; return operations. Raises
        InvalidArgument for an unknown limit."""
        for name in names:
            check_name(name)
        former = self.tenants.get(tenant, {})
        return self._become(tenant, {name: limit for name, limit in former.items() if names and name not in names})

    def _become(self, tenant: str, limits: NamedLimits) -> list[Op]:
        if limits == self.tenants.get(tenant, {}):
            return []
        others = {name: of for name, of in self.tenants.items() if name != tenant}
        self.tenants = {**others, tenant: limits} if limits else others
        return [records.put_quota(tenant, limits) if limits else records.delete_quota(tenant)]
