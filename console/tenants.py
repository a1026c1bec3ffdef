"""How near tenants are to their quotas: of each the limit that is most used, and where. Pure: from a master's status.

Most limits hold at each node by itself, so it is the fullest node that counts, not the sum.
"""

from collections.abc import Iterator
from typing import Any, Final

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.node_states import NOT_RUNNING

AT_NODES: Final = ("hbm_bytes", "dram_bytes", "nvme_bytes", "hbm_slabs", "dram_slabs", "blocks", "requests_in_flight", "connections")
AT_MASTER: Final = ("pins", "reservations", "requests_in_flight", "connections")


def nearest(status: pb.StatusReply) -> list[dict[str, Any]]:
    """By tenant, of those that have a limit: `what` is the one that is nearest to being reached, with `used` of `limit`, `share` (above 1:
    it was lowered, 1 for a limit of 0) and `at`, the node's name or "" for the master. Of a tenant that uses nothing, any of its limits."""
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
