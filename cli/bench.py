"""`kvstore bench`: throughput and latency of a client on this machine, compared with memcpy in the same run."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import click

from kvstore.cli.options import client_options, json_option, names_master, show
from kvstore.cli.replay import show_warning
from kvstore.cli.tools.bench import NEEDED_DRAM_BYTES, measure, table
from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control
from kvstore.client.sync import Client


@click.command(short_help="Measure throughput and latency against memcpy.")
@json_option
@client_options
def bench(as_json: bool, settings: ClientSettings) -> None:
    """Measure put, get, view and exists: medians, and ratios to memcpy taken in the same rounds.

    With a master configured the benchmark uses that cluster: it takes 640 MiB of the tenant's DRAM and removes its blocks afterwards.
    Otherwise it starts a cluster of its own. Run it on an idle machine: other load distorts the figures.
    """
    with _cluster(settings) as chosen, Client(settings=chosen) as client, Control.find(chosen) as control:
        rows = list(measure(client, control))
    show([dataclasses.asdict(row) for row in rows], lambda: table(rows), as_json=as_json)


@contextlib.contextmanager
def _cluster(settings: ClientSettings) -> Iterator[ClientSettings]:
    if names_master():
        yield settings
        return
    with LocalCluster(ClusterPlan(dram=str(NEEDED_DRAM_BYTES), is_private=True), on_log=show_warning) as cluster:
        cluster.wait_warm()
        of_another: dict[str, Any] = dict.fromkeys(("tenant", "token", "tls_ca", "tls_cert", "tls_key", "tls_revoked"), "")
        yield dataclasses.replace(settings, master=cluster.address, **of_another)
