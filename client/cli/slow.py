"""The command `slow`: the slowest requests of the last minutes."""

import click

from kvstore.client.cli.options import client_options, console, echo_json, json_option
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control, as_dict
from kvstore.client.tools.operator_tables import slow_table

DEFAULT_LINES = 20


@click.command(short_help="Show the slowest requests by tenant and kind.")
@click.option("--of-tenant", metavar="TENANT", help="Of one tenant.")
@click.option("-n", "lines", type=click.IntRange(min=1), default=DEFAULT_LINES, show_default=True, help="The slowest so many.")
@json_option
@client_options
def slow(of_tenant: str | None, lines: int, as_json: bool, settings: ClientSettings) -> None:
    """Show the slowest requests of the last 10 minutes at nodes and masters: of each tenant and operation the slowest a minute.

    Requests of less than 1 ms are not kept. With --json one object a line.
    """
    with Control.find(settings) as control:
        found = [one for one in control.slow_requests() if of_tenant in (None, one.tenant)][:lines]
    if as_json:
        for one in found:
            echo_json(as_dict(one))
    else:
        console().print(slow_table(found))
