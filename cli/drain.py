"""The commands `drain` and `forget`: a node is emptied so that it can be stopped without misses; one that is gone for good is removed."""

import time
from collections.abc import Iterator
from typing import Final

import click

from kvstore.cli.options import client_options
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import DeadlineExceeded, Unavailable
from kvstore.protocol.node_states import NOT_RUNNING

LOOK_S: Final = 0.2
"""How often the master is asked how far it is."""


@click.command(short_help="Empty a node that is to be stopped.")
@click.argument("node")
@click.option(
    "--to",
    type=click.Choice(["peers", "nvme"]),
    default="peers",
    show_default=True,
    help="Where what only it has goes: to nodes with room, and to its own NVMe what finds none; or all of it to its own NVMe.",
)
@click.option("--cancel", is_flag=True, help="It takes blocks again.")
@click.option("--no-wait", is_flag=True, help="Begin, and do not wait until it is done.")
@click.option(
    "--wait-s", type=click.FloatRange(min=0.1), metavar="SECONDS", help="Wait no longer than this; the drain goes on.  [default: no limit]"
)
@client_options
def drain(node: str, to: str, cancel: bool, no_wait: bool, wait_s: float | None, settings: ClientSettings) -> None:
    """Drain NODE: new blocks go elsewhere, and blocks that no other node has are copied. The command ends when none of them is left.

    It is read all the while, and stays drained, over restarts of its own and of masters, until --cancel or `kvstore forget`. Whoever
    stops waiting (Ctrl-C, --wait-s) leaves the drain going on; the same command waits again, and `kvstore status` shows it.
    """
    with Control.find(settings) as control:
        control.drain(node, to=to, cancel=cancel)
        if cancel:
            click.echo(f"{node} takes blocks again")
        elif no_wait:
            click.echo(f"{node} is being drained: kvstore status shows how far it is")
    if not (cancel or no_wait):
        _wait(settings, node, wait_s)


def _wait(settings: ClientSettings, name: str, wait_s: float | None) -> None:
    """Show what is left whenever that changes, whichever masters own the catalog meanwhile. Raises DeadlineExceeded, Unavailable: somebody
    has cancelled it, or no master can be reached for deadline_s."""
    until_s = None if wait_s is None else time.monotonic() + wait_s
    shown = ""
    for status in _looks(settings):
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
            raise DeadlineExceeded(f"{name} is not drained after {wait_s:g} s; the drain goes on")
        time.sleep(LOOK_S)


def _looks(settings: ClientSettings) -> Iterator[pb.StatusReply | None]:
    """The cluster's status at each look; None: its masters are to be found anew. Raises Unavailable: they could not be for deadline_s."""
    answered_s = time.monotonic()
    while True:
        try:
            with Control.find(settings) as control:
                while True:
                    status = control.status()
                    answered_s = time.monotonic()
                    yield status
        except Unavailable:
            if time.monotonic() > answered_s + settings.deadline_s:
                raise
        yield None


def progress(node: pb.NodeStatus) -> str:
    """How far the drain of the node is, in a line."""
    drain = node.drain
    kept = f"; {drain.nvme_only_blocks:,} blocks are on its NVMe only, until it is back" if drain.nvme_only_blocks else ""
    if drain.is_done:
        return f"{node.name} is drained: it holds no block that no other node has, and can be stopped{kept}"
    if node.state in NOT_RUNNING:
        return f"{node.name} is {node.state}: its drain goes on when it is started again"
    if not (drain.remaining_blocks or drain.nvme_only_blocks or drain.copying_blocks):
        return f"{node.name}: looking for blocks that only its memory has"
    lacks = " (no node has room)" if drain.lacks_space and drain.remaining_blocks else ""
    return f"{node.name}: {drain.remaining_blocks:,} blocks left in its memory only{lacks}{kept}; {drain.copying_blocks:,} are being copied"


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
