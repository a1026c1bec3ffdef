"""A real cluster of a node, for the tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.client.processes import Cluster, cluster


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("store")) as started:
        started.start_node("--dram", "16MiB")
        yield started
