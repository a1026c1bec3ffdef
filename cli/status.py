"""Commands that look at the cluster once: status, health, nodes, tiers."""

import sys
from dataclasses import asdict
from typing import Any, Final

import click

from kvstore.cli.options import client_options, console, echo_json, json_option, show
from kvstore.cli.tools.cluster_report import (
    ask_masters,
    exit_status,
    health_line,
    healths,
    master_line,
    probe_shared_memory,
    shared_memory_line,
    trouble_lines,
    troubles,
)
from kvstore.cli.tools.status_tables import effective_bits, nodes_table, status_lines, tiers_table
from kvstore.client.config import ClientSettings
from kvstore.client.control import as_dict, cluster_status
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import DeadlineExceeded, Unavailable

TROUBLE_STATUS: Final = 1


@click.command(short_help="Show the cluster in a few lines, trouble first.")
@json_option
@client_options
def status(as_json: bool, settings: ClientSettings) -> None:
    """Show the cluster in a few lines: what is wrong, its masters where --master names several, its nodes, and with which nodes of this
    host this user shares memory.

    Exit status 0: all is well; 1: something is wrong; 2: no master answers for the cluster.

    --json has everything the master knows of the cluster, in masters what each of them says of itself, in troubles what is wrong, and in
    shared_memory each node of this host with why not: "" where it does.
    """
    try:
        found = cluster_status(settings)
    except Unavailable as error:
        _show_unowned(settings, error, as_json=as_json)
        raise
    told = ask_masters(settings, found)
    wrong = troubles(found, told)
    near, why = probe_shared_memory(settings)
    if as_json:
        more = {"masters": [asdict(master) for master in told], "troubles": [asdict(one) for one in wrong], "shared_memory": near}
        echo_json({**as_dict(found), **more})
    else:
        if wrong:
            console().print(trouble_lines(wrong))
        each = [master_line(master, known=found.catalog_health) for master in told] if len(told) > 1 else ()
        console().print(status_lines(found, shared_memory_line(near, why), each))
    if wrong:
        sys.exit(TROUBLE_STATUS)


def _show_unowned(settings: ClientSettings, error: Unavailable, *, as_json: bool) -> None:
    """What each master says of itself while none of them answers for the cluster."""
    told = ask_masters(settings, pb.StatusReply())
    if as_json:
        echo_json({"error": str(error), "masters": [asdict(master) for master in told]})
    elif len(told) > 1 or not told[0].trouble:
        healths = {master.catalog_health for master in told if not master.trouble} - {"ok"}
        known = healths.pop() if len(healths) == 1 else "ok"
        cause = f", {known.partition(';')[0]}" if known != "ok" else ""
        click.echo(f"no master owns the catalog now{cause}: only blocks that clients have located are read")
        for master in told:
            click.echo(f"  {master_line(master, known=known)}" + (f", {master.records:,} records" if not master.trouble else ""))


@click.command(short_help="Show where nodes are, their state and what they hold.")
@json_option
@client_options
def nodes(as_json: bool, settings: ClientSettings) -> None:
    """Show the nodes: where they are, whether they live, what they hold."""
    found = cluster_status(settings)
    show([as_dict(node) for node in found.nodes], lambda: nodes_table(found), as_json=as_json)


@click.command(short_help="Show how full each tier is, and its hit ratio.")
@json_option
@client_options
def tiers(as_json: bool, settings: ClientSettings) -> None:
    """Show each tier of each node: occupancy, blocks, hit ratio, evictions.

    The hit ratio is the tier's share of all blocks that were asked for; the column sums to the cluster's.

    Where a tier quantises values (nvme_codec), also what it holds is worth to readers, and the payload, metadata and bits an element of
    what is encoded.
    """
    found = cluster_status(settings)
    show([_tier(node, tier) for node in found.nodes for tier in node.tiers], lambda: tiers_table(found), as_json=as_json)


def _tier(node: pb.NodeStatus, tier: pb.TierStatus) -> dict[str, Any]:
    return {
        "node": node.name,
        "misses": node.counters.get("misses", 0),
        **as_dict(tier),
        "effective_bits": effective_bits(tier.payload_bytes + tier.metadata_bytes, tier.elements),
    }


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
    found = healths(ask_masters(settings, status or pb.StatusReply()), status)
    if as_json:
        echo_json([asdict(one) for one in found])
    else:
        for one in found:
            click.echo(health_line(one))
    if why:
        click.echo(f"kvstore: error: {why}", err=True)
    sys.exit(exit_status(found, has_owner=status is not None))
