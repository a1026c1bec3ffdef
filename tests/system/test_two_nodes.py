"""Two nodes, and clients that are on neither's host: placement by free space, values over TCP, and the death of one node."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.client.sync import Client
from tests.system.history import value_of
from tests.system.running import MIB, System, running_system, until

SIZES = (700, 70_000, MIB)
KEYS = [b"block-%d" % number for number in range(60)]
VALUES = [value_of(key, 0, SIZES[number % 3]) for number, key in enumerate(KEYS)]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[System]:
    with running_system(tmp_path, "--dram 64MiB", nodes=("n0", "n1")) as started:
        yield started


def places(client: Client, keys: list[bytes]) -> list[str]:
    return [found[0].node if found else "" for found in client.locate(keys)]


@pytest.mark.promise("dead-node")
def test_dead_node_blocks_are_misses_and_puts_go_elsewhere(pair: System) -> None:
    with pair.remote_client() as client, pair.remote_client() as newcomer:
        for key, value in zip(KEYS, VALUES, strict=True):
            client.put(key, value)
        before = places(client, KEYS)
        assert set(before) == {"n0", "n1"}
        assert client.get_batch(KEYS) == VALUES
        pair.kill_node()
        left = [value if place == "n1" else None for value, place in zip(VALUES, before, strict=True)]
        assert client.get_batch(KEYS, deadline_s=20.0) == left, "a client with places in mind"
        assert newcomer.get_batch(KEYS, deadline_s=20.0) == left, "a client without"
        until(lambda: newcomer.exists_batch(KEYS) == [value is not None for value in left], "the directory knows")
        assert client.put_batch(KEYS, VALUES) == [value is None for value in left]
        assert set(places(client, KEYS)) == {"n1"}
        assert client.get_batch(KEYS) == VALUES


def test_client_without_local_sockets_uses_tcp(pair: System) -> None:
    for socket_file in pair.folder.glob("*/*.sock"):
        socket_file.unlink()
    with pair.client() as client:
        assert client.put_batch(KEYS, VALUES) == [True] * len(KEYS)
        assert client.get_batch(KEYS) == VALUES
