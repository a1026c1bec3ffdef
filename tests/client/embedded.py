"""A running cluster for tests of commands: small, private to the test module, gone afterwards."""

import contextlib
from collections.abc import Iterator

from kvstore.client.tools.cluster import Cluster, ClusterPlan

SMALL = ClusterPlan(dram="4MiB", nvme="16MiB", is_private=True)


@contextlib.contextmanager
def embedded(plan: ClusterPlan = SMALL) -> Iterator[Cluster]:
    """Ready. Use it in the main thread: daemons end with the thread that started them."""
    with Cluster(plan, on_log=lambda name, line: None) as cluster:
        cluster.wait_ready()
        yield cluster
