"""The command `quota`: shows tenants' usage and quotas, and sets quotas."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import click
from rich.console import RenderableType
from rich.text import Text

from kvstore.cli.options import client_options, json_option
from kvstore.cli.options import show as show_result
from kvstore.cli.tools.status_tables import NOT_SHOWN, is_whole
from kvstore.cli.tools.tables import names_shown, new_table
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control, cluster_status
from kvstore.console.tenants import AT_MASTER, AT_NODES
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import Denied, InvalidArgument
from kvstore.protocol.node_states import NOT_RUNNING
from kvstore.protocol.settings import flag_name, format_size
from kvstore.security.quotas.limits import NO_LIMIT, parse_limit
from kvstore.security.quotas.quota import BYTES, NAMES

EVICTING: Final = ("hbm_bytes", "dram_bytes", "nvme_bytes", "hbm_slabs", "dram_slabs", "blocks")
"""Limits that a node enforces by eviction. It enforces the others by refusing new requests."""


@dataclass(frozen=True, slots=True)
class QuotaRow:
    """One limit of one tenant at one daemon; `quota` is None without a limit."""

    tenant: str
    at: str
    """The node's name, or "master"."""
    what: str
    used: int
    quota: int | None
    origin: str
    """Source of the limit: "operator", "file" (the tenant's table), "default" (the file's default), or "" if none or not reported."""


def rows(status: pb.StatusReply) -> list[QuotaRow]:
    """Return limits and usage of all tenants, by tenant and node."""
    found = [row for node in sorted(status.nodes, key=lambda node: node.name) for row in _at_node(node, status)]
    given = {grants.tenant: grants for grants in status.grants}
    for tenant in {**given, **dict.fromkeys(status.quotas.tenants)}:
        found += _rows(status, tenant, "master", AT_MASTER, given.get(tenant, pb.TenantGrants()))
    return sorted(found, key=lambda row: row.tenant)


def quota_table(found: Sequence[QuotaRow]) -> RenderableType:
    table = new_table("tenant", "at", "what", "used", "quota", "set by", right=("used", "quota"))
    for row in found:
        is_at_limit = row.quota is not None and row.used >= row.quota
        used = Text(_shown(row.what, row.used), style="red" if is_at_limit else "")
        quota = _shown(row.what, row.quota) if row.quota is not None else "-"
        table.add_row(row.tenant, row.at, row.what, used, quota, row.origin or "-")
    return table


def limit_text(what: str, limit: int | None) -> str:
    return "none" if limit is None else _shown(what, limit)


def _at_node(node: pb.NodeStatus, status: pb.StatusReply) -> Iterator[QuotaRow]:
    """Rows of the tenants that the node reported, and of those with a quota of their own."""
    uses = {use.tenant: use for use in node.tenants}
    for tenant in {**uses, **dict.fromkeys(status.quotas.tenants)}:
        yield from _rows(status, tenant, node.name, AT_NODES, uses.get(tenant, pb.TenantUse()))


def _rows(status: pb.StatusReply, tenant: str, at: str, names: Sequence[str], used: "pb.TenantUse | pb.TenantGrants") -> Iterator[QuotaRow]:
    """Rows for limits that are set or used, or that an operator has lifted."""
    quota = status.quotas.tenants.get(tenant, status.quotas.default)
    for name in names:
        limit = getattr(quota, name) if quota.HasField(name) else None
        origin = _origin(status, tenant, name, limit)
        if limit is not None or getattr(used, name) or origin == "operator":
            yield QuotaRow(tenant, at, name, getattr(used, name), limit, origin)


def _origin(status: pb.StatusReply, tenant: str, name: str, limit: int | None) -> str:
    if tenant in status.quotas.tenants and tenant not in status.quota_origins:
        return ""
    origins = status.quota_origins.get(tenant, pb.QuotaOrigins())
    return "operator" if name in origins.operator else "file" if name in origins.file else "default" if limit is not None else ""


def _shown(what: str, number: int) -> str:
    return format_size(number) if what.endswith("_bytes") else f"{number:,}"


@dataclass(frozen=True, slots=True)
class OverQuota:
    """Usage of one tenant at one node above a new limit."""

    at: str
    what: str
    used: int
    limit: int
    blocks: int
    """All blocks of the tenant at the node."""

    def __str__(self) -> str:
        above = limit_text(self.what, self.used - self.limit)
        of = f"of {limit_text(self.what, self.used)} in {self.blocks:,} blocks" if self.what != "blocks" else f"of {self.used:,}"
        return f"{above} {of} exceed the new {self.what} of {limit_text(self.what, self.limit)}, and will be evicted"


def excesses(status: pb.StatusReply, tenant: str, limits: Mapping[str, int | None]) -> list[OverQuota]:
    """Return the tenant's usage above `limits`, by node and limit. Empty for callers that are not operators: they get no usage."""
    found = []
    for node in sorted(status.nodes, key=lambda node: node.name):
        for use in node.tenants:
            if use.tenant == tenant and node.state not in NOT_RUNNING:
                found += [
                    OverQuota(node.name, name, getattr(use, name), limit, use.blocks)
                    for name, limit in limits.items()
                    if name in EVICTING and limit is not None and getattr(use, name) > limit
                ]
    return found


def known_tenants(status: pb.StatusReply) -> list[str]:
    """Return the tenants with usage at a node or master, or with limits of their own."""
    held = {use.tenant for node in status.nodes for use in node.tenants} | {grants.tenant for grants in status.grants}
    return sorted(held | set(status.quotas.tenants))


def is_known(status: pb.StatusReply, tenant: str) -> bool:
    return tenant in known_tenants(status)


@click.group(short_help="Show and set tenants' quotas.")
def quota() -> None:
    """Tenants' quotas. Limits set here are kept in the catalog and override the master's quotas file (docs/security.md)."""


@quota.command(short_help="Show each tenant's usage and quotas, by node.")
@json_option
@client_options
def show(as_json: bool, settings: ClientSettings) -> None:
    """Show usage and quotas by tenant and node. A dash means no limit.

    "set by" is the source of the limit: an operator, the tenant's table of the quotas file, or the file's default. Nodes report the tenants
    with the largest usage.
    """
    found = cluster_status(settings)
    if not is_whole(found):
        raise Denied(NOT_SHOWN)
    show_result([asdict(row) for row in rows(found)], lambda: quota_table(rows(found)), as_json=as_json)


def _limit_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add an option for each limit; the command receives the texts by name, None for an option that is not given."""
    for name in reversed(NAMES):
        metavar = "SIZE" if name in BYTES else "NUMBER"
        function = click.option(flag_name(name), name, metavar=metavar, help=f'Its {name}, or "{NO_LIMIT}".')(function)
    return function


@quota.command(name="set", short_help="Set a tenant's limits, overriding the quotas file.")
@click.argument("of_tenant", metavar="TENANT")
@_limit_options
@click.option("--yes", is_flag=True, help="Evict blocks above the new limits without confirmation.")
@client_options
def set_(of_tenant: str, yes: bool, settings: ClientSettings, **texts: str | None) -> None:
    """Set limits of TENANT for all masters of the catalog. Limits that are not named stay unchanged.

    Nodes receive them with their next heartbeat, and evict the tenant's coldest blocks above a lowered limit. The command prints how much
    would be evicted and asks for confirmation; scripts pass --yes. Limits survive restarts of masters, except with the catalog memory:.
    """
    limits = {name: parse_limit(name, text) for name, text in texts.items() if text is not None}
    with Control.find(settings) as control:
        status = control.status()
        _confirm(of_tenant, excesses(status, of_tenant, limits), yes=yes)
        control.set_quota(of_tenant, limits)
    if of_tenant and is_whole(status) and not is_known(status, of_tenant):
        seen = names_shown(known_tenants(status)) or "none"
        click.echo(f"warning: no node or master has seen tenant {of_tenant!r} yet; tenants seen: {seen}", err=True)
    click.echo(f"{_named(of_tenant)}: {', '.join(f'{name} {limit_text(name, limit)}' for name, limit in limits.items())}")


@quota.command(short_help="Reset a tenant's limits to the quotas file.")
@click.argument("of_tenant", metavar="TENANT")
@click.argument("limits", metavar="[LIMIT]...", nargs=-1)
@client_options
def clear(of_tenant: str, limits: tuple[str, ...], settings: ClientSettings) -> None:
    """Reset each LIMIT of TENANT (dram_bytes, blocks, ...; all if none is named) to the value of the master's quotas file."""
    names = [limit.replace("-", "_") for limit in limits]
    with Control.find(settings) as control:
        control.clear_quota(of_tenant, names)
    click.echo(f"{_named(of_tenant)}: {', '.join(names) or 'all limits'} as in the quotas file")


def _confirm(tenant: str, found: Sequence[OverQuota], *, yes: bool) -> None:
    """Print what will be evicted and ask for confirmation.

    Raises InvalidArgument if standard input is not a terminal and --yes was not given.
    """
    if not found:
        return
    for one in found:
        click.echo(f"{_named(tenant)} at {one.at}: {one}", err=True)
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidArgument("no limit was changed: pass --yes to evict the blocks above the new limits")
    click.confirm("Set the limits, and evict these?", abort=True, err=True)


def _named(tenant: str) -> str:
    """Name of a tenant for messages. "" is spelled out: a script with an unset variable passes it by mistake."""
    return tenant or "requests without a tenant"
