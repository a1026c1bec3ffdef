"""Fixtures of the router's tests: a store of two nodes."""

from collections.abc import Iterator

import pytest

from kvstore.client.tools.cluster import Cluster, ClusterPlan
from tests.forked import Forked


@pytest.fixture(scope="session")
def two_nodes() -> Iterator[Cluster]:
    """A master with `node-0` and `node-1`, for tests that use keys of their own."""
    with Cluster(ClusterPlan(dram="8MiB", nodes=2, is_private=True), on_log=lambda name, line: None, start=Forked) as cluster:
        cluster.wait_ready()
        yield cluster
