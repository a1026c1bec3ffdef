"""`kvstore up`: a whole cluster in the foreground."""

import json
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from kvstore.tiers.policies.by_name import POLICY_NAMES


@click.command(short_help="Run a whole cluster on this machine, until Ctrl-C.")
@click.option("--listen", default="", metavar="HOST:PORT", help="Where clients connect.  [default: the master's, 127.0.0.1:7440]")
@click.option("--memory", default="", metavar="SIZE", help="Most memory of each node in all, in place of --dram.")
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

    What is not given comes from the daemons' own settings (KVSTORE_MASTER_*, KVSTORE_NODE_*, the TOML file). If a daemon ends by
    itself, the others are stopped, and the exit status is not 0.

    It is ready while the nodes still touch their DRAM, for half a second a GiB: until then first writes are slower.
    """
    console = Console(stderr=True)
    try:
        with LocalCluster(ClusterPlan(**plan), on_log=lambda name, line: pass_on(console, f"{name} | {line}")) as cluster:
            if as_json:
                _say("serving", cluster)
            cluster.wait_ready()
            if as_json:
                _say("ready", cluster)
            else:
                click.echo(f"ready: clients connect to {cluster.address}; Ctrl-C stops the cluster")
                if cluster.console_address:
                    click.echo(f"console: {cluster.console_address}")
            _await_memory(cluster, console)
            if as_json:
                _say("warm", cluster)
            cluster.wait_for_end()
    except KeyboardInterrupt:
        console.print("stopped", style="dim")


def pass_on(console: Console, line: str) -> None:
    """As it is, and above the progress bar where there is one."""
    console.print(line, soft_wrap=True, markup=False, highlight=False, emoji=False)


def _await_memory(cluster: LocalCluster, console: Console) -> None:
    columns = (TextColumn("touching memory"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("memory", total=None)
        cluster.wait_warm(lambda done, whole: progress.update(task, completed=done, total=whole))


def _say(event: str, cluster: LocalCluster) -> None:
    nodes = [{"name": node.name, "pid": node.pid} for node in cluster.nodes]
    places = {"master": cluster.address, "control": cluster.control_address, "console": cluster.console_address}
    click.echo(json.dumps({"event": event, **places, "master_pid": cluster.master_pid, "nodes": nodes}))
