"""One cluster for the tests of Mooncake's API, and a store that is set up on it for each."""

from collections.abc import Iterator

import pytest

from kvstore.engines.mooncake.store import MooncakeDistributedStore
from tests.client.processes import Cluster, cluster


@pytest.fixture(scope="package")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster")) as started:
        started.start_node("--dram", "64MiB")
        yield started


@pytest.fixture
def store(running: Cluster) -> Iterator[MooncakeDistributedStore]:
    """Whatever was put by it is gone afterwards."""
    store = MooncakeDistributedStore()
    assert store.setup("here", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", running.address) == 0
    yield store
    store.remove_all(force=True)
    store.close()
