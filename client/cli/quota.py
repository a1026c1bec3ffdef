"""The command `quota`: what tenants take of the cluster against what they may, and how an operator changes that."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import click

from kvstore.client.cli.options import client_options, console, echo_json, json_option
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control, cluster_status
from kvstore.client.tools.quota_excess import Excess, excesses, is_known, known_tenants
from kvstore.client.tools.quota_table import limit_shown, quota_table, rows
from kvstore.client.tools.status_tables import NOT_SHOWN, is_whole, names_shown
from kvstore.protocol.errors import Denied, InvalidArgument
from kvstore.protocol.settings import flag_name
from kvstore.security.quotas.limits import NO_LIMIT, parse_limit
from kvstore.security.quotas.quota import BYTES, NAMES


@click.group(short_help="Show and set tenants' quotas.")
def quota() -> None:
    """Tenants' quotas. What is set here is kept in the catalog, above what the master's quotas file says (docs/security.md)."""


@quota.command(short_help="Show what each tenant uses of what it may, by node.")
@json_option
@client_options
def show(as_json: bool, settings: ClientSettings) -> None:
    """Show by tenant and node what is used, the quota of it (a dash where there is no limit), and who says so: an operator, the tenant's
    table of the quotas file, or its default. Of a node the tenants that take most."""
    found = cluster_status(settings)
    if not is_whole(found):
        raise Denied(NOT_SHOWN)
    if as_json:
        echo_json([asdict(row) for row in rows(found)])
    else:
        console().print(quota_table(rows(found)))


def _limit_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds an option a limit; the command gets the texts by name, None for one that is not given."""
    for name in reversed(NAMES):
        metavar = "SIZE" if name in BYTES else "NUMBER"
        function = click.option(flag_name(name), name, metavar=metavar, help=f'Its {name}, or "{NO_LIMIT}".')(function)
    return function


@quota.command(name="set", short_help="Give a tenant other limits than the quotas file does.")
@click.argument("of_tenant", metavar="TENANT")
@_limit_options
@click.option("--yes", is_flag=True, help="Evict what lies above the new limits without asking.")
@client_options
def set_(of_tenant: str, yes: bool, settings: ClientSettings, **texts: str | None) -> None:
    """Give TENANT these limits, for all masters of the catalog; limits that are not named stay as they are.

    Nodes learn of them with their next heartbeat, and evict the tenant's coldest blocks above a lowered limit. The command says how much
    that is and asks first; a script passes --yes. Limits outlive masters, except with the catalog memory:.
    """
    limits = {name: parse_limit(name, text) for name, text in texts.items() if text is not None}
    with Control.find(settings) as control:
        status = control.status()
        _confirm(of_tenant, excesses(status, of_tenant, limits), yes=yes)
        control.set_quota(of_tenant, limits)
    if of_tenant and is_whole(status) and not is_known(status, of_tenant):
        seen = names_shown(known_tenants(status)) or "none"
        click.echo(f"warning: no node or master has seen tenant {of_tenant!r} yet; tenants seen: {seen}", err=True)
    click.echo(f"{_named(of_tenant)}: {', '.join(f'{name} {limit_shown(name, limit)}' for name, limit in limits.items())}")


@quota.command(short_help="Let the quotas file say again what a tenant may.")
@click.argument("of_tenant", metavar="TENANT")
@click.argument("limits", metavar="[LIMIT]...", nargs=-1)
@client_options
def clear(of_tenant: str, limits: tuple[str, ...], settings: ClientSettings) -> None:
    """Have each LIMIT of TENANT (dram_bytes, blocks, ...; all if none is named) be as the master's quotas file has it."""
    names = [limit.replace("-", "_") for limit in limits]
    with Control.find(settings) as control:
        control.clear_quota(of_tenant, names)
    click.echo(f"{_named(of_tenant)}: {', '.join(names) or 'all limits'} as in the quotas file")


def _confirm(tenant: str, found: Sequence[Excess], *, yes: bool) -> None:
    """Say what will be evicted, and ask. Raises InvalidArgument: standard input is no terminal, and --yes is not given."""
    if not found:
        return
    for one in found:
        click.echo(f"{_named(tenant)} at {one.at}: {one}", err=True)
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidArgument("nothing was changed: pass --yes to evict what lies above the new limits")
    click.confirm("Set the limits, and evict these?", abort=True, err=True)


def _named(tenant: str) -> str:
    """The tenant "" is easily changed by mistake: by a script's variable that is not set."""
    return tenant or "whoever names no tenant"
