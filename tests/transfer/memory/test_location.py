"""Where memory lies, as this host's kernel says."""

from pathlib import Path

import numpy as np
import pytest

from kvstore.transfer.memory import region as location
from kvstore.transfer.memory.region import ANYWHERE, location_of, node_of


def nodes(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).mkdir()
    return folder


@pytest.fixture(autouse=True)
def counted_anew() -> None:
    location._count_nodes.cache_clear()


def test_the_kernel_names_a_node_that_this_host_has_or_does_not_tell() -> None:
    memory = np.zeros(1 << 20, np.uint8)
    found = node_of(memory.ctypes.data)
    assert found is None or Path(f"/sys/devices/system/node/node{found}").exists()


def test_with_one_node_memory_is_there_and_with_several_where_the_kernel_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = np.zeros(1 << 20, np.uint8)
    monkeypatch.setattr(location, "node_of", lambda address: 7 if address == memory.ctypes.data else None)
    monkeypatch.setattr(location, "_NODES", nodes(tmp_path, "node0", "possible"))
    assert location_of(memory.ctypes.data) == ANYWHERE
    location._count_nodes.cache_clear()
    nodes(tmp_path, "node1")
    assert location_of(memory.ctypes.data) == "cpu:7"
    assert location_of(1) == ANYWHERE
    location._count_nodes.cache_clear()
