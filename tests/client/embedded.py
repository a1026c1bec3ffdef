"""A running cluster for tests of commands: small, private to the test module, gone afterwards."""

import contextlib
from collections.abc import Iterator

from kvstore.cli.tools.cluster import LONG_DEMOTION_WAIT_S, ClusterPlan, LocalCluster
from tests.forked import Forked

SMALL = ClusterPlan(dram="4MiB", nvme="16MiB", demotion_wait_s=LONG_DEMOTION_WAIT_S, is_private=True)


@contextlib.contextmanager
def embedded(plan: ClusterPlan = SMALL) -> Iterator[LocalCluster]:
    """Ready. Its daemons are forked: to start them as programs is for the tests of Cluster and of the commands that start one."""
    with LocalCluster(plan, on_log=lambda name, line: None, start=Forked) as cluster:
        cluster.wait_ready()
        yield cluster
