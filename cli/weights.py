"""The command `weights`: versions of weights that engines use, and how an operator retires one."""

from typing import Final

import click
from rich.console import RenderableType

from kvstore.cli.options import client_options, json_option, show
from kvstore.cli.tools.tables import new_table
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control, as_dict
from kvstore.protocol import control_pb2 as pb

SHORT: Final = 48
"""Characters of a base that are shown in a table; JSON has all of it."""
MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86_400.0


def weights_table(found: pb.WeightsTable, *, tenants: bool) -> RenderableType:
    """`tenants`: whether they are of more than one tenant."""
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
    """Whether an engine uses it, and whether its blocks are evicted first."""
    return ("in use" if one.is_used else "unused") + (", retired" if one.is_retired else "") + ("" if one.is_durable else ", private")


def age(seconds: float) -> str:
    """Time since something, to two digits or so."""
    for unit_s, unit in ((DAY_S, "d"), (HOUR_S, "h"), (MINUTE_S, "min")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


@click.group(invoke_without_command=True, short_help="List versions of weights and who uses them; retire one.")
@json_option
@client_options
@click.pass_context
def weights(context: click.Context, as_json: bool, settings: ClientSettings) -> None:
    """List the versions of weights that engines reported, who uses them, and whether their blocks are evicted first (retired).

    A version is retired while no live engine uses it and another version of the same weights came into use after it. An operator sees all
    tenants, a tenant its own.
    """
    if context.invoked_subcommand is not None:
        return
    with Control.find(settings) as control:
        found = control.weights()
    tenants = {one.tenant for one in found.versions}
    show([as_dict(one) for one in found.versions], lambda: weights_table(found, tenants=len(tenants) > 1), as_json=as_json)


@weights.command(short_help="Have blocks of a version evicted first.")
@click.argument("name", metavar="BASE[@VERSION]")
@client_options
def retire(name: str, settings: ClientSettings) -> None:
    """Have the blocks of BASE@VERSION (BASE: the weights of the files) of the tenant evicted before its others, with all adapters.

    It holds until an engine begins to use the version. Blocks stay until their room is needed.
    """
    base, _at, version = name.partition("@")
    with Control.find(settings) as control:
        rows = control.retire_weights(base, version)
    click.echo(f"{name}: retired, {rows} {'row' if rows == 1 else 'rows'} of the table")
