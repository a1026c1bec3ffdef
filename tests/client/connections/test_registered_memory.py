"""Registered memory is found by address, whole or in part, until it is closed."""

import asyncio

import numpy as np
import pytest

from kvstore.client import AsyncClient, Client
from kvstore.client.connections.registered_memory import Registry
from kvstore.protocol.errors import Closed, InvalidArgument
from kvstore.transfer.memory.region import Region
from kvstore.transfer.paths.batch import Copy, Span

OTHER = memoryview(bytearray(100))


def ends(registry: Registry, *copies: Copy) -> list[object]:
    """For each end the offset in a region, or "plain"."""
    return [end.offset_bytes if isinstance(end, Span) else "plain" for copy in registry.named(copies) for end in copy[:2]]


def test_named_replaces_ends_in_registered_memory() -> None:
    registry, array = Registry(), np.zeros((10, 10), np.float32)
    assert registry.named(copies := [(array.reshape(-1).view(np.uint8).data, OTHER, 100)]) is copies
    registry.add(array, "cpu:0")
    memory = array.reshape(-1).view(np.uint8).data
    assert ends(registry, (memory, OTHER, 100), (OTHER, memory[300:], 100)) == [0, "plain", "plain", 300]
    span = Span(Region(OTHER), 7)
    assert registry.named([(memory[4:8], span, 4)])[0][1] is span


def test_closed_it_is_forgotten_and_free() -> None:
    registry, pool = Registry(), bytearray(100)
    with registry.add(pool, "cpu:0") as registered:
        assert ends(registry, (memoryview(pool), OTHER, 100)) == [0, "plain"]
    assert ends(registry, (memoryview(pool), OTHER, 100)) == ["plain", "plain"]
    registered.close()
    registry.add(pool, "cpu:0")


def test_with_the_client_all_of_it_ends() -> None:
    registry, pool = Registry(), bytearray(100)
    registered = registry.add(pool, "cpu:0")
    for _ in range(2):
        registry.close()
    registered.close()
    with pytest.raises(Closed):
        registry.add(pool, "cpu:0")


def test_clients_of_both_kinds_register_without_asking_anybody() -> None:
    pool = bytearray(100)
    with Client("127.0.0.1:1") as client, client.register(pool):
        with pytest.raises(InvalidArgument, match="registered already"):
            client.register(memoryview(pool)[50:])
    with pytest.raises(Closed):
        client.register(pool)

    async def work() -> None:
        async with AsyncClient("127.0.0.1:1") as client:
            client.register(pool, location="cpu:1")
        with pytest.raises(Closed):
            client.register(pool)

    asyncio.run(work())
    pool.clear()
