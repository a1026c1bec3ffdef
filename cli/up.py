"""`kvstore up`: runs a local cluster in the foreground."""

import json
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from kvstore.tiers.policies.by_name import POLICY_NAMES


@click.command(short_help="Run a whole cluster on this machine, until Ctrl-C.")
@click.option("--listen", default="", metavar="HOST:PORT", help="Address for clients.  [default: the master's, 127.0.0.1:7440]")
@click.option("--memory", default="", metavar="SIZE", help="Total memory of each node, instead of --dram.")
@click.option("--dram", default="", metavar="SIZE", help="DRAM tier of each node.  [default: the node's, 1 GiB]")
@click.option("--nvme", default="", metavar="DIR:SIZE", help="NVMe tier of each node; with several nodes DIR/node-0 and so on.")
@click.option("--hbm", default="", metavar="DEVICE:SIZE", help="HBM tier of each node, such as cuda:0:8GiB.")
@click.option("--nodes", default=1, show_default=True, metavar="N", help="Number of nodes.")
@click.option("--catalog", default="", metavar="URL", help="memory:, lmdb:PATH or etcd://HOST:PORT,...  [default: the master's]")
@click.option("--policy", default="", metavar="NAME", help=f"Eviction policy: {', '.join(POLICY_NAMES)}.  [default: the node's]")
@click.option("--config", default="", metavar="FILE", help="TOML file with the daemons' settings.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines: when the cluster listens, is ready, and has touched its memory.")
def up(as_json: bool, **plan: Any) -> None:
    """Run a whole cluster on this machine: a master and its nodes, until Ctrl-C or SIGTERM.

    Other settings come from the daemons' own sources (KVSTORE_MASTER_*, KVSTORE_NODE_*, the TOML file). If a daemon exits, the others are
    stopped, and the exit status is not 0.

    The cluster is ready before all DRAM is touched, which takes half a second per GiB: until then first writes are slower.
    """
    console = Console(stderr=True)
    try:
        with LocalCluster(ClusterPlan(**plan), on_log=lambda name, line: print_log(console, f"{name} | {line}")) as cluster:
            if as_json:
                _print_event("serving", cluster)
            cluster.wait_ready()
            if as_json:
                _print_event("ready", cluster)
            else:
                click.echo(f"ready: clients connect to {cluster.address}; Ctrl-C stops the cluster")
                if cluster.console_address:
                    click.echo(f"console: {cluster.console_address}")
            _await_memory(cluster, console)
            if as_json:
                _print_event("warm", cluster)
            cluster.wait_for_end()
    except KeyboardInterrupt:
        console.print("stopped", style="dim")


def print_log(console: Console, line: str) -> None:
    """Print a log line unchanged, above the progress bar if one is shown."""
    console.print(line, soft_wrap=True, markup=False, highlight=False, emoji=False)


def _await_memory(cluster: LocalCluster, console: Console) -> None:
    columns = (TextColumn("touching memory"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("memory", total=None)
        cluster.wait_warm(lambda done, whole: progress.update(task, completed=done, total=whole))


def _print_event(event: str, cluster: LocalCluster) -> None:
    nodes = [{"name": node.name, "pid": node.pid} for node in cluster.nodes]
    addresses = {"master": cluster.address, "control": cluster.control_address, "console": cluster.console_address}
    click.echo(json.dumps({"event": event, **addresses, "master_pid": cluster.master_pid, "nodes": nodes}))
