"""A small real cluster for this folder's tests, and a client of it."""

from collections.abc import Iterator

import pytest

from kvstore.cli.tools.cluster import ClusterPlan
from kvstore.client import Client
from tests.client.embedded import embedded


@pytest.fixture(scope="package")
def address() -> Iterator[str]:
    with embedded(ClusterPlan(dram="64MiB", is_private=True)) as running:
        yield running.address


@pytest.fixture(scope="package")
def client(address: str) -> Iterator[Client]:
    with Client(address) as client:
        yield client
