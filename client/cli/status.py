"""Commands that look at the cluster once: status, nodes, tiers."""

from dataclasses import asdict
from typing import Any

import click

from kvstore.client.cli.options import client_options, console, echo_json, json_option
from kvstore.client.config import ClientSettings
from kvstore.client.control import as_dict, cluster_status
from kvstore.client.tools import masters, sharing
from kvstore.client.tools.status_tables import effective_bits, nodes_table, status_lines, tiers_table
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import Unavailable


@click.command()
@json_option
@client_options
def status(as_json: bool, settings: ClientSettings) -> None:
    """Show the cluster in a few lines, its masters where --master names several, and with which nodes of this host this user shares memory.

    --json has everything the master knows of the cluster, in masters what each of them says of itself, and in shared_memory each node of
    this host with why not: "" where it does.
    """
    try:
        found = cluster_status(settings)
    except Unavailable as error:
        _show_unowned(settings, error, as_json=as_json)
        raise
    told = masters.look(settings, found)
    near, why = sharing.look(settings)
    if as_json:
        echo_json({**as_dict(found), "masters": [asdict(master) for master in told], "shared_memory": near})
    else:
        console().print(status_lines(found, sharing.line(near, why), [masters.line(master) for master in told] if len(told) > 1 else ()))


def _show_unowned(settings: ClientSettings, error: Unavailable, *, as_json: bool) -> None:
    """What each master says of itself while none of them answers for the cluster."""
    told = masters.look(settings, pb.StatusReply())
    if as_json:
        echo_json({"error": str(error), "masters": [asdict(master) for master in told]})
    elif len(told) > 1 or not told[0].trouble:
        click.echo("no master owns the catalog now:")
        for master in told:
            click.echo(f"  {masters.line(master)}" + (f", {master.records:,} records" if not master.trouble else ""))


@click.command()
@json_option
@client_options
def nodes(as_json: bool, settings: ClientSettings) -> None:
    """Show the nodes: where they are, whether they live, what they hold."""
    found = cluster_status(settings)
    if as_json:
        echo_json([as_dict(node) for node in found.nodes])
    else:
        console().print(nodes_table(found))


@click.command(short_help="Show how full each tier is, and what it answers.")
@json_option
@client_options
def tiers(as_json: bool, settings: ClientSettings) -> None:
    """Show each tier of each node: occupancy, blocks, hit ratio, evictions.

    The hit ratio is the tier's share of all blocks that were asked for; the column sums to the cluster's.

    Where a tier quantises values (nvme_codec), also what it holds is worth to readers, and the payload, metadata and bits an element of
    what is encoded.
    """
    found = cluster_status(settings)
    if as_json:
        echo_json([_tier(node, tier) for node in found.nodes for tier in node.tiers])
    else:
        console().print(tiers_table(found))


def _tier(node: pb.NodeStatus, tier: pb.TierStatus) -> dict[str, Any]:
    return {
        "node": node.name,
        "misses": node.counters.get("misses", 0),
        **as_dict(tier),
        "effective_bits": effective_bits(tier.payload_bytes + tier.metadata_bytes, tier.elements),
    }
