"""The stores of a test, which are checked and closed at its end, and the client of its `node`."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.store.integrity import check
from tests.store.served import Client, Served
from tests.store.tables import Store


@pytest.fixture
def make_store(tmp_path: Path) -> Iterator[Callable[..., Store]]:
    stores: list[Store] = []

    def make(dram_bytes: int = 400, **options: int | float | str) -> Store:
        stores.append(Store(dram_bytes, folder=tmp_path, **options))  # type: ignore[arg-type]
        return stores[-1]

    yield make
    for store in stores:
        check(store.table)
        store.close()


@pytest.fixture
def client(node: Served) -> Iterator[Client]:
    client = node.connect()
    yield client
    client.close()
