"""What tenants take against what they may, by tenant and node. Pure: from a StatusReply to rows, and from rows to what rich prints."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.settings import format_size

AT_NODES: Final = ("hbm_bytes", "dram_bytes", "nvme_bytes", "hbm_slabs", "dram_slabs", "blocks", "requests_in_flight", "connections")
AT_MASTER: Final = ("pins", "reservations", "requests_in_flight", "connections")


@dataclass(frozen=True, slots=True)
class Row:
    """One limit of one tenant at one daemon; `quota` is None where there is none."""

    tenant: str
    at: str
    """The node's name; of the master "master"."""
    what: str
    used: int
    quota: int | None
    origin: str
    """Who says so: "operator", "file" (its table) or "default" (that of the file); "" for nobody, or by a master that does not tell."""


def rows(status: pb.StatusReply) -> list[Row]:
    """By tenant and node: what is limited, and what is used of anything."""
    found = [row for node in sorted(status.nodes, key=lambda node: node.name) for row in _at_node(node, status)]
    given = {grants.tenant: grants for grants in status.grants}
    for tenant in {**given, **dict.fromkeys(status.quotas.tenants)}:
        found += _rows(status, tenant, "master", AT_MASTER, given.get(tenant, pb.TenantGrants()))
    return sorted(found, key=lambda row: row.tenant)


def quota_table(found: Sequence[Row]) -> RenderableType:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("tenant", "at", "what", "used", "quota", "set by"):
        table.add_column(name, justify="right" if name in ("used", "quota") else "left")
    for row in found:
        is_at_limit = row.quota is not None and row.used >= row.quota
        used = Text(_shown(row.what, row.used), style="red" if is_at_limit else "")
        quota = _shown(row.what, row.quota) if row.quota is not None else "-"
        table.add_row(row.tenant, row.at, row.what, used, quota, row.origin or "-")
    return table


def limit_shown(what: str, limit: int | None) -> str:
    return "none" if limit is None else _shown(what, limit)


def _at_node(node: pb.NodeStatus, status: pb.StatusReply) -> Iterator[Row]:
    """Of the tenants that the node has told of, and of those with a quota of their own."""
    told = {use.tenant: use for use in node.tenants}
    for tenant in {**told, **dict.fromkeys(status.quotas.tenants)}:
        yield from _rows(status, tenant, node.name, AT_NODES, told.get(tenant, pb.TenantUse()))


def _rows(status: pb.StatusReply, tenant: str, at: str, names: Sequence[str], used: "pb.TenantUse | pb.TenantGrants") -> Iterator[Row]:
    """Of what is limited, used, or left without a limit by an operator."""
    quota = status.quotas.tenants.get(tenant, status.quotas.default)
    for name in names:
        limit = getattr(quota, name) if quota.HasField(name) else None
        origin = _origin(status, tenant, name, limit)
        if limit is not None or getattr(used, name) or origin == "operator":
            yield Row(tenant, at, name, getattr(used, name), limit, origin)


def _origin(status: pb.StatusReply, tenant: str, name: str, limit: int | None) -> str:
    if tenant in status.quotas.tenants and tenant not in status.quota_origins:
        return ""
    told = status.quota_origins.get(tenant, pb.QuotaOrigins())
    return "operator" if name in told.operator else "file" if name in told.file else "default" if limit is not None else ""


def _shown(what: str, number: int) -> str:
    return format_size(number) if what.endswith("_bytes") else f"{number:,}"
