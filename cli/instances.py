"""The command that shows where the scheduler sends requests: instances."""

import click
from rich.console import Group, RenderableType
from rich.text import Text

from kvstore.cli.options import client_options, json_option, show
from kvstore.cli.tools.tables import new_table
from kvstore.client.config import ClientSettings
from kvstore.client.control import as_dict
from kvstore.client.instances.client import SchedulerClient
from kvstore.protocol import control_pb2 as pb

ROLES = {pb.ROLE_PREFILL: "prefill", pb.ROLE_DECODE: "decode", pb.ROLE_BOTH: "both"}


@click.command(short_help="Show the engines that the scheduler sends requests to.")
@json_option
@client_options
def instances(as_json: bool, settings: ClientSettings) -> None:
    """Show the inference instances that the scheduler sends requests to: as they last reported, and what they were sent since.

    Queue and batch are as reported, plus the requests on their way; "sent" counts all since the instance joined. --json has it apart.
    """
    with SchedulerClient(settings) as client:
        found = client.instances()
    show(as_dict(found), lambda: instances_view(found), as_json=as_json)


def instances_view(found: pb.InstancesReply) -> RenderableType:
    """A row an instance, prefill before decode, by name; then what was decided, and how times are foreseen."""
    figures = ("queue", "batch", "own blocks", "sent", "reported")
    table = new_table("instance", "role", "address", "node", *figures, right=figures, no_wrap=figures)
    for status in sorted(found.instances, key=lambda each: (each.report.role, each.report.name)):
        report = status.report
        # Of one that does both the requests on their way are in its queue.
        on_their_way = 0 if report.role == pb.ROLE_BOTH else status.unseen_requests
        table.add_row(
            report.name,
            ROLES.get(report.role, "-"),
            report.address,
            report.node or "-",
            f"{report.queue_s + status.unseen_s:.2f} s" if report.role != pb.ROLE_DECODE else "-",
            f"{report.batch + on_their_way:,}" if report.role != pb.ROLE_PREFILL else "-",
            f"{status.engine_blocks:,}" if status.engine_blocks else "-",
            f"{status.scheduled:,}",
            f"{status.report_age_s:.1f} s ago",
        )
    return Group(table, Text(), Text(_decided(found)), Text(f"{found.dispatcher}; {found.estimators}", style="dim"))


def _decided(found: pb.InstancesReply) -> str:
    counters = found.counters
    rejected = {name.removeprefix("rejected_"): count for name, count in sorted(counters.items()) if name.startswith("rejected_")}
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in rejected.items())
    return (
        f"{counters.get('scheduled', 0):,} scheduled, {sum(rejected.values()):,} rejected{f' ({reasons})' if reasons else ''}; "
        f"{counters.get('transfers', 0):,} transfers of {counters.get('transfer_blocks', 0):,} blocks"
    )
