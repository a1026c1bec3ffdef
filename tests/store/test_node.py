"""Tests of node.py without a second process: everything opened is closed after any failure, and a node reports its
state."""

import contextlib
import gc
import logging
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.protocol.errors import ConfigError, KVStoreError
from kvstore.protocol.settings import Size
from kvstore.store.config import NodeSettings
from kvstore.store.memory_plan import MIN_TABLE_BYTES
from kvstore.store.node import Node
from kvstore.tiers.huge_pages import unavailable_reason


@pytest.fixture
def settings(tmp_path: Path) -> NodeSettings:
    return NodeSettings(
        master=f"unix:{tmp_path}/nobody.sock",
        run_dir=str(tmp_path / "run"),
        dram=Size(1 << 20),
        nvme=f"{tmp_path / 'nvme'}:1MiB",
    )


def open_fds() -> set[str]:
    """Open sockets and files, each by its own name. Garbage of earlier tests does not count."""
    gc.collect()
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself, or a thread of an earlier test has just closed it
            found.add(f"{descriptor.name} {descriptor.readlink()}")
    return found


@pytest.mark.promise("least-privilege")
@pytest.mark.parametrize(
    "wrong",
    [
        {"low_watermark": 0.9, "high_watermark": 0.5},
        {"listen": "unix:/tmp/x"},
        {"listen": "0.0.0.0:0"},
        {"listen": "0.0.0.0:0", "allow_unauthenticated": True},
        {"join_token": "a", "join_token_file": "/dev/null"},
        {"join_token_file": "/no/such/file"},
        {"advertise": "unix:/tmp/x"},
        {"advertise": "nonsense"},
        {"master": "nonsense"},
        {"hbm": "nodevice:1MiB"},
        {"nvme": "/proc/nowhere:1MiB"},
        {"nvme_codec": "fp9"},
        {"nvme_codec": "int4/7"},
        {"nvme_codec": "int8", "nvme": ""},
    ],
    ids=str,
)
def test_a_node_with_invalid_settings_leaves_nothing_open(settings: NodeSettings, wrong: dict[str, Any]) -> None:
    before = open_fds()
    with pytest.raises(KVStoreError):
        Node(replace(settings, **wrong))
    assert open_fds() <= before


def test_a_node_that_cannot_listen_leaves_nothing_open(settings: NodeSettings) -> None:
    before = open_fds()
    with socket.create_server(("127.0.0.1", 0)) as owner:
        with pytest.raises(ConfigError, match="in use"):
            Node(replace(settings, listen=f"127.0.0.1:{owner.getsockname()[1]}"))
    with pytest.raises(ConfigError, match="/proc/nowhere"):
        Node(replace(settings, run_dir="/proc/nowhere"))
    assert open_fds() <= before


def test_a_node_starts_serves_and_closes(settings: NodeSettings, caplog: pytest.LogCaptureFixture) -> None:
    before = open_fds()
    with caplog.at_level(logging.WARNING):
        touched = threading.Event()
        settings = replace(settings, name="n7", hbm="cpu:64KiB", advertise="example.org:7441")
        node = Node(settings)
        places = node.start()
        assert (places.name, places.tcp) == ("n7", "example.org:7441")
        assert Path(places.unix).is_socket()
        thread = threading.Thread(target=node.reactor.run)
        thread.start()
        node.prefault(touched.set)
        assert touched.wait(10)
        tiers, counters = node.reactor.call(node.status, deadline_s=10)
        node.reactor.stop()
        thread.join()
        node.close()
    assert [(tier.name, tier.used_bytes, tier.health) for tier in tiers] == [("hbm", 0, "ok"), ("dram", 0, "ok"), ("nvme", 0, "ok")]
    assert tiers[1].prefaulted_bytes == tiers[1].capacity_bytes == 1 << 20
    assert (tiers[0].not_huge_reason, tiers[1].not_huge_reason) == ("", unavailable_reason())
    assert counters.pop("max_table_bytes") == MIN_TABLE_BYTES
    assert counters.pop("max_connections")
    assert counters.pop("max_open_files")
    assert set(counters.values()) == {0}
    assert "no master" in caplog.text
    assert not Path(places.unix).exists()
    assert open_fds() <= before
