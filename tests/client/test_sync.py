"""The blocking client against real daemons."""

import signal
from pathlib import Path

import pytest

from kvstore.client.sync import Client
from kvstore.protocol.errors import KVStoreError
from tests.client.behaviour import ClientBehaviour, MakeClient, client, running, where
from tests.client.processes import cluster

__all__ = ["client", "running", "where"]


@pytest.fixture
def make_client() -> MakeClient:
    return Client


class TestClient(ClientBehaviour):
    pass


def test_blocks_of_a_killed_node_are_misses_and_a_new_process_serves_anew(tmp_path: Path) -> None:
    with cluster(tmp_path) as started:
        node = started.start_node("--dram", "32MiB")
        with Client(started.address) as client:
            assert client.put_batch([b"small", b"big"], [b"s", b"b" * 100_000]) == [True, True]
            node.stop(signal.SIGKILL)
            assert client.get_batch([b"small", b"big"]) == [None, None]
            with pytest.raises(KVStoreError):
                client.put(b"other", b"x" * 100_000, deadline_s=1.0)
            started.start_node("--dram", "32MiB", "--name", "n0")
            assert client.put(b"again", b"x" * 100_000, deadline_s=10.0)
            assert client.get(b"again") == b"x" * 100_000
            assert client.get(b"big") is None
