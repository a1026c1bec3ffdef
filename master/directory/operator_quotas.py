"""What operators have set of tenants' limits, and the records that keep it. Sans-I/O.

What holds is made of this and of the master's quotas file elsewhere (security/quotas/); here nobody is held to anything.
"""

from collections.abc import Collection, Mapping
from typing import Final

from kvstore.master.catalogs.interface import Op
from kvstore.master.directory import records
from kvstore.protocol.errors import Full, InvalidArgument
from kvstore.security.quotas.limits import MAX_LIMIT, NamedLimits, check_name
from kvstore.security.quotas.quota import NAMES

MAX_TENANTS: Final = 4096
"""With limits set: nodes are told all of them in one message, 1 MiB where every name is as long as it may be. More go into the file."""


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
