"""The stores of a test: they are checked and closed at its end."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.store.tables import Store


@pytest.fixture
def make_store(tmp_path: Path) -> Iterator[Callable[..., Store]]:
    stores: list[Store] = []

    def make(dram_bytes: int = 400, **options: int | float | str) -> Store:
        stores.append(Store(dram_bytes, folder=tmp_path, **options))  # type: ignore[arg-type]
        return stores[-1]

    yield make
    for store in stores:
        store.table.check_integrity()
        store.close()
