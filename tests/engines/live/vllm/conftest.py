"""One store, and engines that all tests of this folder share: each takes long to begin. Each test has prompts of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.processes import Cluster, cluster
from tests.engines.live.vllm.engines import PATIENT, Engine, start_node

HINTS = {"retention_from_requests": True}
LOSING = "tests.engines.live.vllm.faults:LosingConnector"


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("store")
    with cluster(folder) as started:
        start_node(started)
        yield started


@pytest.fixture(scope="session")
def plain(model: Path) -> Iterator[Engine]:
    """Without a store: what the others are held to."""
    with Engine(model) as engine:
        yield engine


@pytest.fixture(scope="session")
def first(model: Path, store: Cluster) -> Iterator[Engine]:
    """Computes what the other one loads."""
    with Engine(model, store=PATIENT | {"master": store.address} | HINTS, connector=LOSING) as engine:
        yield engine


@pytest.fixture(scope="session")
def second(model: Path, store: Cluster) -> Iterator[Engine]:
    """Loads between its steps."""
    with Engine(model, store=PATIENT | {"master": store.address} | HINTS, connector=LOSING) as engine:
        yield engine
