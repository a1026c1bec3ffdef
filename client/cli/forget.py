"""The command `forget`: a node that will not return is known no more."""

import click

from kvstore.client.cli.options import client_options
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control


@click.command(short_help="Forget a node that is gone for good.")
@click.argument("node")
@client_options
def forget(node: str, settings: ClientSettings) -> None:
    """Forget NODE, which is gone for good: blocks that only it had are gone, and removals need not be kept for it any more.

    Refused while the node is alive: stop it first. Should it ever return, it is a new node, and drops what it held before.
    """
    with Control.find(settings) as control:
        control.forget(node)
    click.echo(f"{node} is forgotten")
