"""The command `weights`: versions of weights that engines use, and how an operator retires one."""

import click

from kvstore.client.cli.options import client_options, console, echo_json, json_option
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control, as_dict
from kvstore.client.tools.weights_table import weights_table


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
    if as_json:
        echo_json([as_dict(one) for one in found.versions])
    else:
        console().print(weights_table(found, tenants=len({one.tenant for one in found.versions}) > 1))


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
