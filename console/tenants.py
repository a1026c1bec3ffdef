"""The most used limit of each tenant, from a master's status.

Most limits apply per node, so the fullest node counts, not the sum.
"""

from collections.abc import Iterator
from typing import Any, Final

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.node_states import NOT_RUNNING

AT_NODES: Final = ("hbm_bytes", "dram_bytes", "nvme_bytes", "hbm_slabs", "dram_slabs", "blocks", "requests_in_flight", "connections")
AT_MASTER: Final = ("pins", "reservations", "requests_in_flight", "connections")


def nearest(status: pb.StatusReply) -> list[dict[str, Any]]:
    """Return the most used limit of each tenant that has one, by tenant.

    `what` is the limit's name; `share` is `used` over `limit` (above 1 after it was lowered; 1 for a used limit of 0); `at` is the node's
    name, or "" for the master. Tenants without usage get one of their limits.
    """
    found: dict[str, dict[str, Any]] = {}
    for one in _limits(status):
        known = found.get(one["tenant"])
        if known is None or one["share"] > known["share"]:
            found[one["tenant"]] = one
    return [found[tenant] for tenant in sorted(found)]


def _limits(status: pb.StatusReply) -> Iterator[dict[str, Any]]:
    for tenant in status.quotas.tenants:
        yield from _of(status.quotas, tenant, "", (*AT_NODES, *AT_MASTER), pb.TenantUse())
    for node in status.nodes:
        for use in node.tenants if node.state not in NOT_RUNNING else ():
            yield from _of(status.quotas, use.tenant, node.name, AT_NODES, use)
    for grants in status.grants:
        yield from _of(status.quotas, grants.tenant, "", AT_MASTER, grants)


def _of(
    quotas: pb.Quotas, tenant: str, at: str, names: tuple[str, ...], used: "pb.TenantUse | pb.TenantGrants"
) -> Iterator[dict[str, Any]]:
    quota = quotas.tenants.get(tenant, quotas.default)
    for name in names:
        if quota.HasField(name):
            limit, taken = getattr(quota, name), getattr(used, name, 0)
            share = taken / limit if limit else float(taken > 0)
            yield {"tenant": tenant, "at": at, "what": name, "used": taken, "limit": limit, "share": round(share, 4)}
