"""The command `weights`: lists versions of model weights that engines use, and retires one."""

from typing import Final

import click
from rich.console import RenderableType

from kvstore.cli.options import client_options, json_option, show
from kvstore.cli.tools.tables import new_table
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control, as_dict
from kvstore.protocol import control_pb2 as pb

SHORT: Final = 48
"""Longest base in a table; JSON has the whole text."""
MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86_400.0


def weights_table(found: pb.WeightsTable, *, tenants: bool) -> RenderableType:
    """`tenants`: add a column with the tenant."""
    columns = ("weights", "adapter", "state", "used", "namespaces", "engines")
    table = new_table(*(("tenant",) if tenants else ()), *columns, right=("namespaces",))
    for one in found.versions:
        engines, name = ", ".join(one.users) or "-", weights_text(one.base, one.version)
        row = (name, shortened(one.adapter) or "-", state(one), age(one.used_age_s), str(one.namespaces), engines)
        table.add_row(*((one.tenant or "-", *row) if tenants else row))
    return table


def weights_text(base: str, version: str) -> str:
    """`BASE` or `BASE@VERSION`, its base shortened."""
    return f"{shortened(base) or '(no base)'}@{version}" if version else shortened(base) or "(no base)"


def shortened(base: str) -> str:
    return base if len(base) <= SHORT else f"{base[: SHORT - 1]}…"


def state(one: pb.WeightsVersion) -> str:
    """State in words: in use or unused, retired, private."""
    return ("in use" if one.is_used else "unused") + (", retired" if one.is_retired else "") + ("" if one.is_durable else ", private")


def age(seconds: float) -> str:
    """Format the time since an event, to about two digits."""
    for unit_s, unit in ((DAY_S, "d"), (HOUR_S, "h"), (MINUTE_S, "min")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


@click.group(invoke_without_command=True, short_help="List versions of model weights and their users; retire one.")
@json_option
@client_options
@click.pass_context
def weights(context: click.Context, as_json: bool, settings: ClientSettings) -> None:
    """List the versions of weights that engines reported, the engines that use them, and whether they are retired.

    Blocks of retired versions are evicted first. A version is retired while no live engine uses it and a later version of the same weights
    is in use. An operator sees all tenants, a tenant its own.
    """
    if context.invoked_subcommand is not None:
        return
    with Control.find(settings) as control:
        found = control.weights()
    tenants = {one.tenant for one in found.versions}
    show([as_dict(one) for one in found.versions], lambda: weights_table(found, tenants=len(tenants) > 1), as_json=as_json)


@weights.command(short_help="Retire a version: its blocks are evicted first.")
@click.argument("name", metavar="BASE[@VERSION]")
@client_options
def retire(name: str, settings: ClientSettings) -> None:
    """Retire BASE@VERSION with all its adapters: its blocks are evicted before the tenant's others.

    Without @VERSION: the weights as loaded from files. The version stays retired until an engine uses it. Blocks stay until their space is
    needed.
    """
    base, _at, version = name.partition("@")
    with Control.find(settings) as control:
        rows = control.retire_weights(base, version)
    click.echo(f"{name}: retired, {rows} {'row' if rows == 1 else 'rows'} of the table")
