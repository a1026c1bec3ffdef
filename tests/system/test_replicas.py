"""Replicas that puts ask for, with real processes: they exist when the put returns so, and are replaced when a node dies."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.client.aio import AsyncClient
from kvstore.client.sync import Client
from kvstore.protocol.errors import InvalidArgument, Unavailable
from tests.system.history import value_of
from tests.system.running import System, until

BLOCK_BYTES = 64 << 10
KEYS = [b"block-%d" % number for number in range(60)]
VALUES = [value_of(key, 0, BLOCK_BYTES) for key in KEYS]
NAMES = {"n0", "n1", "n2"}


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    """Three nodes, and a catalog that outlives the master."""
    with System(tmp_path, f"lmdb:{tmp_path / 'catalog'}") as started:
        started.start_master(0, "--repair-after-s", "0.5")
        for name in sorted(NAMES):
            started.start_node(name, "--dram", "32MiB")
        yield started


def places(client: Client) -> list[set[str]]:
    return [{place.node for place in found} for found in client.locate(KEYS)]


@pytest.mark.promise("replicas-survive")
def test_put_acknowledged_with_replicas_survives_node_loss(system: System) -> None:
    with system.client() as client:
        assert client.put_batch(KEYS, VALUES, replicas=2, ack="replicas") == [True] * len(KEYS)
        found = places(client)
        assert {len(nodes) for nodes in found} == {2}
        dead = sorted(found[0])[0]
        system.kill_node(dead)
        until(lambda: all(len(nodes - {dead}) == 2 for nodes in places(client)), "what the dead node had is copied again")
        assert client.get_batch(KEYS) == VALUES


@pytest.mark.promise("replicas-survive")
def test_replicas_are_made_for_old_blocks_and_after_restart(system: System) -> None:
    with system.client() as client:
        assert client.put_batch(KEYS, VALUES) == [True] * len(KEYS)
        assert client.put(KEYS[0], VALUES[0], replicas=3, ack="replicas") is False
        assert [len(nodes) for nodes in places(client)] == [3] + [1] * (len(KEYS) - 1)
        dead = sorted(NAMES - places(client)[1])[0]
        system.kill_node(dead)
        assert client.put_batch(KEYS, VALUES, replicas=3, ack="cluster") == [False] * len(KEYS)
        with pytest.raises(Unavailable, match="fewer than 3 nodes accept blocks"):
            client.put_batch(KEYS, VALUES, replicas=3, ack="replicas")
        until(lambda: all(len(nodes) == 2 for nodes in places(client)), "as many as there can be")
        system.masters[0].kill()
        system.start_master()
        system.start_node(dead)
        until(lambda: places(client) == [NAMES] * len(KEYS), "three of each")
        assert client.get_batch(KEYS) == VALUES


@pytest.mark.parametrize("ack", ["node", "replicas"])
def test_both_clients_ask_for_replicas(system: System, ack: str) -> None:
    async def put() -> None:
        async with AsyncClient(system.address) as client:
            assert await client.put(KEYS[1], VALUES[1], replicas=2, ack=ack) is True
            assert await client.put_batch(KEYS[2:4], VALUES[2:4], replicas=2, ack=ack) == [True, True]
            with pytest.raises(InvalidArgument, match="replicas is 1 to 16, not "):
                await client.put(KEYS[5], VALUES[5], replicas=0)

    asyncio.run(put())
    with system.client() as client:
        assert client.put(KEYS[0], VALUES[0], replicas=2, ack=ack) is True
        if ack != "replicas":
            until(lambda: all(len(nodes) == 2 for nodes in places(client)[:4]), "two of each")
        assert [len(nodes) for nodes in places(client)[:5]] == [2, 2, 2, 2, 0]
        assert client.remove(KEYS[:4]) == 4
        assert client.put(KEYS[0], VALUES[0]) is True
        assert len(places(client)[0]) == 1, "the target went with the block"
        with pytest.raises(InvalidArgument, match="replicas is 1 to 16, not "):
            client.put(KEYS[5], VALUES[5], replicas=17)
