"""Limits of tenants: those that operators set, with their records, and a partition's share of those of the whole cluster. Sans-I/O.

The limits in force are these over the master's quotas file (security/quotas/).
"""

from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from kvstore.master.catalogs.interface import Op
from kvstore.master.directory import records
from kvstore.protocol.errors import Full, InvalidArgument, QuotaExceeded
from kvstore.security.quotas.limits import MAX_LIMIT, NamedLimits, check_name
from kvstore.security.quotas.quota import NAMES, SHARED, Quota

MAX_TENANTS: Final = 4096
"""With limits set: nodes are told all of them in one message, 1 MiB where every name is as long as it may be. More go into the file."""

MIN_SHARE: Final = 1024
"""Least share of a partition, where the limit allows it: all keys of a batch may fall into one partition. So all partitions together may
exceed a small limit, and no partition grants more than the whole limit."""
HAS: Final = ("blocks pinned", "puts granted and not published")
WHAT_TO_DO: Final = ("let some go", "put fewer at once")
"""As HAS, in the order of SHARED."""


class TenantShare(NamedTuple):
    """Of one tenant's limit: `now` in this partition, `whole` in the cluster. Equal where there is one partition."""

    now: int
    whole: int

    def exceeded(self, tenant: str, limit: int, *, used: int, more: int) -> QuotaExceeded:
        """That `more` are too many for a tenant that has `used` here already. `limit`: its place in SHARED."""
        text, name = f"tenant {tenant!r} has {used} {HAS[limit]}", SHARED[limit]
        if self.now < self.whole:
            text += f" in one partition of the key space; {more} more exceed {self.now}, the share of each partition in"
        else:
            text += f"; {more} more exceed"
        return QuotaExceeded(f"{text} its quota of {self.whole} ({name}): {WHAT_TO_DO[limit]}, or have the operator raise it")


def share_of(quota: Quota, limit: int, partitions: int) -> TenantShare | None:
    """The share that each of so many partitions has of a limit, by its place in SHARED; None: the quota does not limit it."""
    whole: int | None = getattr(quota, SHARED[limit])
    return None if whole is None else TenantShare(min(whole, max(-(-whole // partitions), MIN_SHARE)), whole)


def unshared(_tenant: str, _limit: int) -> TenantShare | None:
    """Of tenants that have no such limit."""
    return None


class OperatorQuotas:
    """See the module. Not thread-safe."""

    def __init__(self, recorded: Mapping[str, NamedLimits]) -> None:
        """`recorded` is never changed in place, and `tenants` neither."""
        self.tenants = recorded
        """By tenant, of those that have any."""

    def set(self, tenant: str, limits: NamedLimits) -> list[Op]:
        """These limits are the tenant's, and what was set of others stays; operations.

        Raises InvalidArgument (no limit, one that there is not, one out of range, a name that is too long), Full: too many tenants have
        limits set; nothing has changed.
        """
        records.check_tenant(tenant)
        if not limits:
            raise InvalidArgument(f"say at least one limit to set: {', '.join(NAMES)}")
        for name, limit in limits.items():
            check_name(name)
            if limit is not None and not 0 <= limit <= MAX_LIMIT:
                raise InvalidArgument(f"{name}: {limit} is no limit; it is at most {MAX_LIMIT}")
        if tenant not in self.tenants and len(self.tenants) >= MAX_TENANTS:
            raise Full(f"{MAX_TENANTS} tenants have limits set by operators: clear those of some, or write limits into the quotas file")
        return self._become(tenant, {**self.tenants.get(tenant, {}), **limits})

    def clear(self, tenant: str, names: Collection[str] = ()) -> list[Op]:
        """These limits of the tenant, all if none is named, are as the file has them; operations. Raises InvalidArgument for a limit that
        there is not."""
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
