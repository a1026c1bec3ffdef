"""The commands `drain`, which empties a node before it is stopped, and `forget`, which removes a dead node from the cluster."""

import time
from typing import Final

import click

from kvstore.cli.options import client_options
from kvstore.cli.tools.status_polls import poll_status
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import DeadlineExceeded, Unavailable
from kvstore.protocol.node_states import NOT_RUNNING

POLL_S: Final = 0.2
"""Interval at which the master's status is read."""


@click.command(short_help="Empty a node before it is stopped.")
@click.argument("node")
@click.option(
    "--to",
    type=click.Choice(["peers", "nvme"]),
    default="peers",
    show_default=True,
    help="Where its last replicas go: peers with free space (the rest to its own NVMe), or its own NVMe only.",
)
@click.option("--cancel", is_flag=True, help="End the drain: the node accepts blocks again.")
@click.option("--no-wait", is_flag=True, help="Start the drain and return at once.")
@click.option(
    "--wait-s", type=click.FloatRange(min=0.1), metavar="SECONDS", help="Wait at most this long; the drain continues.  [default: no limit]"
)
@client_options
def drain(node: str, to: str, cancel: bool, no_wait: bool, wait_s: float | None, settings: ClientSettings) -> None:
    """Drain NODE: it gets no new blocks, and blocks that no other node has are copied. The command returns when all are copied.

    The node stays readable. It stays drained, over restarts of nodes and masters, until --cancel or `kvstore forget`. Ctrl-C and --wait-s
    end the wait, not the drain: repeat the command to wait again, or see `kvstore status`.
    """
    with Control.find(settings) as control:
        control.drain(node, to=to, cancel=cancel)
        if cancel:
            click.echo(f"{node} accepts blocks again")
        elif no_wait:
            click.echo(f"{node} is being drained: kvstore status shows the progress")
    if not (cancel or no_wait):
        _wait(settings, node, wait_s)


def _wait(settings: ClientSettings, name: str, wait_s: float | None) -> None:
    """Print the progress whenever it changes, across failovers of masters.

    Raises DeadlineExceeded after `wait_s`, Unavailable if the drain was cancelled or no master was reachable for deadline_s.
    """
    until_s = None if wait_s is None else time.monotonic() + wait_s
    shown = ""
    for status in poll_status(settings, answered_s=time.monotonic()):
        if status is not None:
            node = next((node for node in status.nodes if node.name == name), None)
            if node is None or not node.HasField("drain"):
                raise Unavailable(f"the drain of {name!r} has been cancelled")
            line = progress(node)
            if line != shown:
                click.echo(line)
                shown = line
            if node.drain.is_done:
                return
        if until_s is not None and time.monotonic() >= until_s:
            raise DeadlineExceeded(f"{name} is not drained after {wait_s:g} s; the drain continues")
        time.sleep(POLL_S)


def progress(node: pb.NodeStatus) -> str:
    """Return the progress of the node's drain in one line."""
    drain = node.drain
    kept = f"; {drain.nvme_only_blocks:,} blocks are on its NVMe only, until it is restarted" if drain.nvme_only_blocks else ""
    if drain.is_done:
        return f"{node.name} is drained: no block is in its memory only, and it can be stopped{kept}"
    if node.state in NOT_RUNNING:
        return f"{node.name} is {node.state}: its drain continues when it is started again"
    if not (drain.remaining_blocks or drain.nvme_only_blocks or drain.copying_blocks):
        return f"{node.name}: searching for blocks that only its memory has"
    lacks = " (no node has free space)" if drain.lacks_space and drain.remaining_blocks else ""
    return f"{node.name}: {drain.remaining_blocks:,} blocks left in its memory only{lacks}{kept}; {drain.copying_blocks:,} are being copied"


@click.command(short_help="Remove a dead node from the cluster.")
@click.argument("node")
@client_options
def forget(node: str, settings: ClientSettings) -> None:
    """Remove NODE, which will not return: its last replicas are lost, and the masters drop the tombstones that they keep for it.

    Refused while the node is alive: stop it first. A forgotten node that starts again joins as a new node and drops its old blocks.
    """
    with Control.find(settings) as control:
        control.forget(node)
    click.echo(f"{node} is forgotten")
