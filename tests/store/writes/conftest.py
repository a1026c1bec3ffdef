"""The node that these tests put into, which has room for four blocks of 4 KiB."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.served import Served, served


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path, dram_bytes=16 << 10) as node:
        yield node
