"""Commands that show the cluster's state once: status, health, nodes, tiers."""

import sys
from dataclasses import asdict
from typing import Any, Final

import click

from kvstore.cli.options import client_options, console, echo_json, json_option, show
from kvstore.cli.tools.cluster_report import (
    OWNER,
    ask_masters,
    exit_status,
    find_problems,
    health_line,
    healths,
    master_line,
    probe_shared_memory,
    problem_lines,
    shared_memory_line,
)
from kvstore.cli.tools.status_tables import effective_bits, nodes_table, status_lines, tiers_table
from kvstore.client.config import ClientSettings
from kvstore.client.control import as_dict, cluster_status
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import DeadlineExceeded, KVStoreError, Unavailable

TROUBLE_STATUS: Final = 1


@click.command(short_help="Show a summary of the cluster, problems first.")
@json_option
@client_options
def status(as_json: bool, settings: ClientSettings) -> None:
    """Show a summary of the cluster: problems, masters (if --master names several), nodes, and the nodes of this host whose memory this
    user shares.

    Exit status 0: healthy; 1: a problem was found; 2: no master owns the catalog.

    --json adds all that the master knows. `masters` has each master's own report, `problems` the problems, and `shared_memory` for each
    node of this host the reason why memory is not shared, or "".
    """
    try:
        found = cluster_status(settings)
    except (Unavailable, DeadlineExceeded) as error:
        _show_unowned(settings, error, as_json=as_json)
        raise
    reports = ask_masters(settings, found)
    problems = find_problems(found, reports)
    local, why = probe_shared_memory(settings)
    if as_json:
        more = {"masters": [asdict(one) for one in reports], "problems": [asdict(one) for one in problems], "shared_memory": local}
        echo_json({**as_dict(found), **more})
    else:
        if problems:
            console().print(problem_lines(problems))
        each = [master_line(report, known=found.catalog_health) for report in reports] if len(reports) > 1 else ()
        console().print(status_lines(found, shared_memory_line(local, why), each))
    if problems:
        sys.exit(TROUBLE_STATUS)


def _show_unowned(settings: ClientSettings, error: KVStoreError, *, as_json: bool) -> None:
    """Print each master's own report while no master owns the catalog."""
    reports = ask_masters(settings, pb.StatusReply())
    if as_json:
        echo_json({"error": str(error), "masters": [asdict(report) for report in reports]})
    elif len(reports) > 1 or reports[0].role:
        healths = {report.catalog_health for report in reports if not report.error} - {"ok"}
        known = healths.pop() if len(healths) == 1 else "ok"
        cause = f", {known.partition(';')[0]}" if known != "ok" else ""
        if owner := next((report for report in reports if report.error and report.role == OWNER), None):
            click.echo(f"{owner.address} owns the catalog, and its control plane cannot be asked from here")
        else:
            click.echo(f"no master owns the catalog now{cause}: clients can read only blocks that they have located")
        for master in reports:
            click.echo(f"  {master_line(master, known=known)}" + (f", {master.records:,} records" if not master.error else ""))


@click.command(short_help="Show nodes: address, state, contents.")
@json_option
@client_options
def nodes(as_json: bool, settings: ClientSettings) -> None:
    """Show the nodes: address, state, transports, blocks, tiers and last heartbeat."""
    found = cluster_status(settings)
    show([as_dict(node) for node in found.nodes], lambda: nodes_table(found), as_json=as_json)


@click.command(short_help="Show occupancy and hit ratio of each tier.")
@json_option
@client_options
def tiers(as_json: bool, settings: ClientSettings) -> None:
    """Show each tier of each node: occupancy, blocks, hit ratio, evictions, and what it would evict next.

    The hit ratio is the tier's share of all requested blocks; the column sums to the cluster's hit ratio.

    "evicts next": time since the last read of the next victim, and its value by the policy in hits per second of a GiB; or why it is first:
    its namespace is retired, or the copy is secondary.

    For tiers that quantise values (nvme_codec) a second table has the decoded size, and the payload, metadata and bits per element of the
    encoded values.
    """
    found = cluster_status(settings)
    show([_tier(node, tier) for node in found.nodes for tier in node.tiers], lambda: tiers_table(found), as_json=as_json)


def _tier(node: pb.NodeStatus, tier: pb.TierStatus) -> dict[str, Any]:
    return {
        "node": node.name,
        "misses": node.counters.get("misses", 0),
        **as_dict(tier),
        "next_victim": as_dict(tier.next_victim) if tier.HasField("next_victim") else None,
        "effective_bits": effective_bits(tier.payload_bytes + tier.metadata_bytes, tier.elements),
    }


@click.command(short_help="Check whether each master and node is healthy.")
@json_option
@client_options
def health(as_json: bool, settings: ClientSettings) -> None:
    """Check each master that --master names, and each node.

    Exit status 0: all are healthy; 1: some are not; 2: no master owns the catalog.
    """
    try:
        status, why = cluster_status(settings), ""
    except (Unavailable, DeadlineExceeded) as error:
        status, why = None, str(error)
    found = healths(ask_masters(settings, status or pb.StatusReply()), status)
    if as_json:
        echo_json([asdict(one) for one in found])
    else:
        for one in found:
            click.echo(health_line(one))
    if why:
        click.echo(f"kvstore: error: {why}", err=True)
    sys.exit(exit_status(found, has_owner=status is not None))
