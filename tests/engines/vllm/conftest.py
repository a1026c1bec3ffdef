"""A small real cluster for this folder's tests, and clients of it that can be made to fail."""

import contextlib
from collections.abc import Iterator

import pytest

from tests.client.embedded import embedded
from tests.client.jobs.faulty import FaultyClient


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    with embedded() as cluster:
        yield cluster.address


@pytest.fixture
def client(address: str) -> Iterator[FaultyClient]:
    with contextlib.closing(FaultyClient(address)) as client:
        yield client
