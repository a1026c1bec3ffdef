"""One cluster for the tests of Mooncake's API, and a store that is set up on it for each."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore.engines.mooncake.store import MooncakeDistributedStore
from tests.client.processes import Cluster, cluster

Opened = Callable[..., MooncakeDistributedStore]


@pytest.fixture(scope="package")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster")) as started:
        started.start_node("--dram", "64MiB")
        yield started


@pytest.fixture
def opened(running: Cluster) -> Iterator[Opened]:
    """Set up a store on the cluster, with more entries of its configuration. Its objects are removed afterwards."""
    with contextlib.ExitStack() as stack:

        def made(**entries: Any) -> MooncakeDistributedStore:
            store = MooncakeDistributedStore()
            config = {"local_hostname": "here", "metadata_server": "P2PHANDSHAKE", "master_server_addr": running.address}
            assert store.setup(config | {"local_buffer_size": 16 << 20} | entries) == 0
            stack.callback(store.close)
            stack.callback(store.remove_all, force=True)
            return store

        yield made


@pytest.fixture
def store(opened: Opened) -> MooncakeDistributedStore:
    return opened()
