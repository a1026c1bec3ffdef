"""What a tenant holds above limits that are about to be set. Pure: from a StatusReply."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvstore.client.tools.quota_table import limit_shown
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.node_states import AWAY

EVICTING: Final = ("hbm_bytes", "dram_bytes", "nvme_bytes", "hbm_slabs", "dram_slabs", "blocks")
"""Limits above which a node evicts. Above the others it refuses new requests."""


@dataclass(frozen=True, slots=True)
class Excess:
    """Use of one tenant at one node above a new limit."""

    at: str
    what: str
    used: int
    limit: int
    blocks: int
    """All blocks of the tenant at the node."""

    def __str__(self) -> str:
        above = limit_shown(self.what, self.used - self.limit)
        of = f"of {limit_shown(self.what, self.used)} in {self.blocks:,} blocks" if self.what != "blocks" else f"of {self.used:,}"
        return f"{above} {of} lie above the new {self.what} of {limit_shown(self.what, self.limit)}, and will be evicted"


def excesses(status: pb.StatusReply, tenant: str, limits: Mapping[str, int | None]) -> list[Excess]:
    """By node and limit. Empty if the status has no use by tenants, as for a caller that is no operator."""
    found = []
    for node in sorted(status.nodes, key=lambda node: node.name):
        for use in node.tenants:
            if use.tenant == tenant and node.state not in AWAY:
                found += [
                    Excess(node.name, name, getattr(use, name), limit, use.blocks)
                    for name, limit in limits.items()
                    if name in EVICTING and limit is not None and getattr(use, name) > limit
                ]
    return found


def known_tenants(status: pb.StatusReply) -> list[str]:
    """Tenants that hold something at a node or a master, or that have limits of their own."""
    held = {use.tenant for node in status.nodes for use in node.tenants} | {grants.tenant for grants in status.grants}
    return sorted(held | set(status.quotas.tenants))


def is_known(status: pb.StatusReply, tenant: str) -> bool:
    return tenant in known_tenants(status)
