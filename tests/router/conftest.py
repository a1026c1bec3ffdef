"""Fixtures of the router's tests: a store of two nodes."""

from collections.abc import Iterator

import pytest

from kvstore.cli.tools.cluster import Cluster, ClusterPlan
from tests.forked import Forked


@pytest.fixture(scope="session")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A master with `node-0` and `node-1`, for tests that use keys of their own. Instances that report once stay."""
    config = tmp_path_factory.mktemp("two_nodes") / "config.toml"
    config.write_text("[master]\ninstance_ttl_s = 600\n")
    plan = ClusterPlan(dram="8MiB", nodes=2, config=str(config), is_private=True)
    with Cluster(plan, on_log=lambda name, line: None, start=Forked) as cluster:
        cluster.wait_ready()
        yield cluster
