"""The command `namespaces`: what is in the store, what a namespace is made of, and why two engines do not share."""

import click

from kvstore.client.cli.options import client_options, console, echo_json, json_option
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control
from kvstore.client.tools.namespaces import Known, compared, details, details_table, find, known, namespaces_table
from kvstore.console.documents import contents


@click.group(invoke_without_command=True, short_help="List namespaces; say why two engines do not share.")
@json_option
@client_options
@click.pass_context
def namespaces(context: click.Context, as_json: bool, settings: ClientSettings) -> None:
    """List namespaces: model, weights, blocks, size, last read, and the engines that use them.

    The largest come first, 1,000 at most, then empty ones that live engines use. An operator sees all tenants, a tenant its own.
    """
    if context.invoked_subcommand is not None:
        return
    with Control.find(settings) as control:
        reply = control.contents()
    if as_json:
        echo_json(contents(reply)["namespaces"])
    else:
        console().print(namespaces_table(reply))


@namespaces.command(short_help="Show all fields of a namespace's identity.")
@click.argument("id")
@json_option
@client_options
def show(id: str, as_json: bool, settings: ClientSettings) -> None:
    """Show what the namespace ID is made of, with its figures. The beginning of an id is enough."""
    one = find(id, _known(settings), settings.tenant)
    if as_json:
        echo_json(details(one))
    else:
        console().print(details_table(one))


@namespaces.command(short_help="Say why engines of two namespaces do not share.")
@click.argument("a")
@click.argument("b")
@json_option
@client_options
def diff(a: str, b: str, as_json: bool, settings: ClientSettings) -> None:
    """Say in which fields the namespaces A and B differ, and what to do about each. The beginning of an id is enough."""
    among = _known(settings)
    lines = compared(find(a, among, settings.tenant), find(b, among, settings.tenant))
    if as_json:
        echo_json(lines)
    else:
        click.echo("\n".join(lines))


def _known(settings: ClientSettings) -> list[Known]:
    with Control.find(settings) as control:
        return known(control.contents(), control.weights())
