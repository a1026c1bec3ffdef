"""`kvstore replay`: replays a production trace through a real cluster and compares every byte."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Final

import click
from click.core import ParameterSource

from kvstore.cli.options import client_options, json_option, names_master, show
from kvstore.cli.tools.cluster import LONG_DEMOTION_WAIT_S, ClusterPlan, LocalCluster
from kvstore.cli.tools.replay import run_replay
from kvstore.client.config import ClientSettings
from kvstore.kvcache.traces.named import count_requests, read_requests
from kvstore.protocol.errors import ConfigError, Corrupt
from kvstore.protocol.settings import parse_size
from kvstore.tiers.policies.by_name import POLICY_NAMES

OWN = ("dram", "nvme", "hbm", "nodes", "catalog", "policy")
"""Options that describe a local cluster that the replay starts."""
DRAM_BYTES: Final = 1 << 30
"""Default DRAM tier of each node."""
TABLE_BYTES: Final = 800
"""Memory per block in a node's block table, ghost entries of the eviction policy included."""
MIN_TABLE_SHARE, MAX_TABLE_SHARE = 0.5, 16.0
"""A node's default and largest `table_share`."""


@click.command(short_help="Replay a production trace and compare every byte.")
@click.argument("trace", metavar="TRACE")
@click.option("--block-bytes", default="4KiB", show_default=True, metavar="SIZE", help="Size of a stored block.")
@click.option("--limit", type=click.IntRange(min=1), help="Replay only this many requests, from the first.")
@click.option("--dram", default="", metavar="SIZE", help="Own cluster: DRAM tier of each node.  [default: 1 GiB]")
@click.option("--nvme", default="", metavar="[DIR:]SIZE", help="Own cluster: NVMe tier of each node; without DIR in a temporary folder.")
@click.option("--hbm", default="", metavar="DEVICE:SIZE", help="Own cluster: HBM tier of each node.")
@click.option("--nodes", default=1, show_default=True, metavar="N", help="Own cluster: number of nodes.")
@click.option("--catalog", default="", metavar="URL", help="Own cluster: memory:, lmdb:PATH or etcd://HOST:PORT,...")
@click.option("--policy", default="", metavar="NAME", help=f"Own cluster: eviction policy, {', '.join(POLICY_NAMES)}.")
@json_option
@client_options
def replay(trace: str, block_bytes: str, limit: int | None, as_json: bool, settings: ClientSettings, **own: Any) -> None:
    """Replay TRACE and compare every byte that is read.

    TRACE is a file in the public Mooncake format, or generated:SEED:COUNT for COUNT requests of generated conversations.

    With a master configured the replay uses that cluster. Otherwise it starts a temporary one: a master and nodes as processes. Each
    prompt's blocks are read, then the missing ones are stored. The prefix hit ratio is the number of cached blocks before each request's
    first miss, over all blocks. Exit status 1: bytes were wrong.
    """
    size = parse_size(block_bytes)
    total = count_requests(trace, limit=limit)
    requests = read_requests(trace, limit=limit)
    with _cluster(settings, own, size) as (chosen, cluster):
        report = run_replay(chosen, requests, total=total, block_bytes=size, cluster=cluster)
    show(report.as_dict(), report.as_table, as_json=as_json)
    if report.counts.wrong_bytes:
        raise Corrupt(f"{report.counts.wrong_block}: {report.counts.wrong_bytes} wrong bytes")


@contextlib.contextmanager
def _cluster(settings: ClientSettings, own: dict[str, Any], block_bytes: int) -> Iterator[tuple[ClientSettings, LocalCluster | None]]:
    """Yield settings for the cluster to use, and the LocalCluster if the replay started one."""
    context = click.get_current_context()
    described = [name for name in OWN if context.get_parameter_source(name) == ParameterSource.COMMANDLINE]
    if described and context.get_parameter_source("master") == ParameterSource.COMMANDLINE:
        raise click.UsageError(f"--master names a running cluster: --{described[0]} is only for a cluster that the replay starts")
    if not described and names_master():
        yield settings, None
        return
    table = table_share(block_bytes, own["dram"], own["nvme"], own["hbm"])
    plan = ClusterPlan(**own, table_share=table, demotion_wait_s=LONG_DEMOTION_WAIT_S, is_private=True)
    with LocalCluster(plan, on_log=show_warning) as cluster:
        cluster.wait_warm()
        yield dataclasses.replace(settings, master=cluster.address), cluster


def table_share(block_bytes: int, dram: str, *lower: str) -> str:
    """Return the `table_share` with which a node's block table covers tiers of these sizes, as a share of its DRAM.

    "" if the default suffices, or a size is malformed: the node reports that.
    """
    try:
        dram_bytes = parse_size(dram) if dram else DRAM_BYTES
        tiers_bytes = dram_bytes + sum(parse_size(tier.rpartition(":")[2]) for tier in lower if tier)
    except ConfigError:
        return ""
    share = math.ceil(100 * tiers_bytes * TABLE_BYTES / max(1, block_bytes * dram_bytes)) / 100
    return f"{min(share, MAX_TABLE_SHARE)}" if share > MIN_TABLE_SHARE else ""


def show_warning(name: str, line: str) -> None:
    """Print a daemon's log line unless it is of level INFO."""
    if " INFO " not in line:
        click.echo(f"{name} | {line}", err=True)
