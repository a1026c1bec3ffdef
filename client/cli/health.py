"""The command `health`: one line a master and a node, and an exit status for scripts."""

import sys
from dataclasses import asdict

import click

from kvstore.client.cli.options import client_options, echo_json, json_option
from kvstore.client.config import ClientSettings
from kvstore.client.control import cluster_status
from kvstore.client.tools import health as healths
from kvstore.client.tools import masters
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import DeadlineExceeded, Unavailable


@click.command(short_help="Say whether each master and node is healthy.")
@json_option
@client_options
def health(as_json: bool, settings: ClientSettings) -> None:
    """Say of each master that --master names, and of each node, whether it is healthy.

    Exit status 0: all are; 1: some are not; 2: no master answers for the cluster.
    """
    try:
        status, why = cluster_status(settings), ""
    except (Unavailable, DeadlineExceeded) as error:
        status, why = None, str(error)
    found = healths.of(masters.look(settings, status or pb.StatusReply()), status)
    if as_json:
        echo_json([asdict(one) for one in found])
    else:
        for one in found:
            click.echo(healths.line(one))
    if why:
        click.echo(f"kvstore: error: {why}", err=True)
    sys.exit(healths.exit_status(found, has_owner=status is not None))
