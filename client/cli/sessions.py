"""The command `sessions`: who is connected to the masters, and the end of a connection."""

import click

from kvstore.client.cli.options import client_options, console, echo_json, json_option
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control, as_dict
from kvstore.client.tools.operator_tables import sessions_table
from kvstore.protocol.errors import InvalidArgument


@click.command(short_help="Show who is connected to the masters; end a connection.")
@click.option("--end", "end", metavar="ID", help="Close this connection, an ID of the list. Its peer may connect again.")
@json_option
@client_options
def sessions(end: str | None, as_json: bool, settings: ClientSettings) -> None:
    """Show the connections of clients and nodes to the masters that own the catalog: tenant, role, address, since when, requests.

    To keep a peer out take its token out of the tokens file, or add its certificate to tls_revoked: both end its connections to masters
    and nodes. With --json one object a line.
    """
    with Control.find(settings) as control:
        if end is not None:
            number, _, master = end.partition("@")
            if not number.isascii() or not number.isdigit():
                raise InvalidArgument(f"{end!r} is no session: write its ID as `kvstore sessions` prints it")
            control.end_session(int(number), master)
            click.echo(f"session {end} is closed")
            return
        found = control.sessions()
    if as_json:
        for one in found:
            echo_json(as_dict(one))
    else:
        console().print(sessions_table(found))
