"""A cluster whose daemons trace, and send what they have traced at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from tests.forked import Forked
from tests.telemetry.tracing.collector import Collector


@contextmanager
def traced_cluster(collector: Collector, folder: Path, *, nodes: int = 1) -> Iterator[LocalCluster]:
    """`folder` exists: their settings are put there."""
    config = folder / "kvstore.toml"
    config.write_text(f'[tracing]\nendpoint = "{collector.endpoint}"\n')
    plan = ClusterPlan(dram="8MiB", nodes=nodes, is_private=True, config=str(config))
    with LocalCluster(plan, on_log=lambda name, line: None, start=Forked) as cluster:
        cluster.wait_ready()
        yield cluster
