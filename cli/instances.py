"""The command `instances`: the engines that the scheduler dispatches requests to."""

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


@click.command(short_help="Show the engines that the scheduler dispatches to.")
@json_option
@client_options
def instances(as_json: bool, settings: ClientSettings) -> None:
    """Show the inference instances: their last reports, and the requests dispatched since.

    Queue and batch are the reported values plus the requests in flight; "sent" counts all requests since the instance joined. --json has
    these values separately.
    """
    with SchedulerClient(settings) as client:
        found = client.instances()
    show(as_dict(found), lambda: instances_view(found), as_json=as_json)


def instances_view(found: pb.InstancesReply) -> RenderableType:
    """Return a table of the instances, prefill before decode, by name; below it the decisions, the dispatcher and its estimators."""
    figures = ("queue", "batch", "own blocks", "sent", "reported")
    table = new_table("instance", "role", "address", "node", *figures, right=figures)
    for status in sorted(found.instances, key=lambda each: (each.report.role, each.report.name)):
        report = status.report
        # An instance of both roles has its requests in flight in its queue.
        in_flight = 0 if report.role == pb.ROLE_BOTH else status.unseen_requests
        table.add_row(
            report.name,
            ROLES.get(report.role, "-"),
            report.address,
            report.node or "-",
            f"{report.queue_s + status.unseen_s:.2f} s" if report.role != pb.ROLE_DECODE else "-",
            f"{report.batch + in_flight:,}" if report.role != pb.ROLE_PREFILL else "-",
            f"{status.engine_blocks:,}" if status.engine_blocks else "-",
            f"{status.scheduled:,}",
            f"{status.report_age_s:.1f} s ago",
        )
    return Group(table, Text(), Text(_decisions(found)), Text(f"{found.dispatcher}; {found.estimators}", style="dim"))


def _decisions(found: pb.InstancesReply) -> str:
    counters = found.counters
    rejected = {name.removeprefix("rejected_"): count for name, count in sorted(counters.items()) if name.startswith("rejected_")}
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in rejected.items())
    return (
        f"{counters.get('scheduled', 0):,} scheduled, {sum(rejected.values()):,} rejected{f' ({reasons})' if reasons else ''}; "
        f"{counters.get('transfers', 0):,} transfers of {counters.get('transfer_blocks', 0):,} blocks, "
        f"{counters.get('promoted_blocks', 0):,} blocks brought up from NVMe"
    )
