"""The command `console`: the page that every master serves, of a cluster elsewhere, on this machine."""

import ipaddress
import secrets
import signal
from typing import Final

import click

from kvstore.client.cli.ending import ending_signals
from kvstore.client.cli.options import client_options
from kvstore.client.config import ClientSettings
from kvstore.client.tools.outside import Outside
from kvstore.console.config import INTERVAL_DEFAULT_S, ConsoleSettings
from kvstore.console.watch import Watch
from kvstore.console.web import add_console
from kvstore.rpc.address import parse_address
from kvstore.telemetry.http.access import by_any_of, this_host_only, why_unknown
from kvstore.telemetry.http.server import HttpServer

LISTEN_DEFAULT: Final = "127.0.0.1:7480"


@click.command(short_help="Serve the console of a cluster on this machine.")
@click.option(
    "--listen",
    default=LISTEN_DEFAULT,
    show_default=True,
    metavar="HOST:PORT",
    help="Where browsers connect; port 0 takes a free one.",
)
@click.option(
    "--interval-s",
    type=click.FloatRange(min=0.1, max=60),
    default=INTERVAL_DEFAULT_S,
    show_default=True,
    metavar="SECONDS",
    help="Time between looks at the cluster.",
)
@client_options
def console(listen: str, interval_s: float, settings: ClientSettings) -> None:
    """Serve the console of the cluster of --master for browsers, until Ctrl-C.

    Masters serve it themselves on their HTTP port (kvstore status --json names it); this one is for a cluster that a browser does not
    reach. It acts with the rights of --token: where there is one, or others than this host can connect, the address that is printed ends
    with a key, without which nobody is let in.
    """
    key = secrets.token_urlsafe(24) if settings.token or not _is_local(listen) else ""
    source = Outside(settings)
    server = HttpServer(listen, authorize=by_any_of([key]) if key else this_host_only, explain=why_unknown)
    watch = Watch(source, ConsoleSettings(interval_s=interval_s))
    add_console(server, watch)
    ending = ending_signals()
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)  # of the threads as well: then whoever waits for them misses none
    server.start()
    watch.start()
    try:
        click.echo(f"http://{server.address}/" + (f"#key={key}" if key else ""))
        signal.sigwait(ending)
    finally:
        watch.close(wait_s=0)
        server.close()
        source.close()


def _is_local(listen: str) -> bool:
    host = parse_address(listen).host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
