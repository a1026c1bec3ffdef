"""Promises of at_hand.py, with a real node: what this host shows is found before anybody is asked, whereupon a call's time begins."""

import asyncio
import os
from pathlib import Path

import pytest

from kvstore.client import AsyncClient, Client
from kvstore.protocol.errors import InvalidArgument
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.testing.waiting import eventually
from tests.client.behaviour import running
from tests.client.processes import Cluster

__all__ = ["running"]
VALUE = b"v" * 5000
NEVER_NS = 1 << 62
"""When nodes are to be looked for again."""


def test_nodes_are_at_hand_before_a_calls_time_begins_and_slabs_mapped_when_it_has(running: Cluster) -> None:
    key = os.urandom(16)
    with Client(running.address) as writer, Client(running.address) as client:
        writer.put(key, VALUE)
        near, at_hand = client._operations.near, client._at_hand
        eventually(lambda: bool(at_hand.nodes(7.0)[0]), "the node's index to be read")
        client._operations.local.at_hand = NEVER_NS, client._operations.local.at_hand[1]  # however long this takes on a busy machine
        nodes, timeout = at_hand.nodes(7.0)
        assert timeout == 7.0
        assert near.get(nodes, key) is None
        assert near.wanted, "it was found in a slab that is not mapped yet"
        value, deadline = at_hand.again(timeout, near.get, nodes, key)
        assert value == VALUE
        assert isinstance(deadline, Deadline)
        with pytest.raises(InvalidArgument):
            at_hand.nodes(-1.0)


def test_it_is_awaited_where_the_client_is(running: Cluster) -> None:
    key = os.urandom(16)

    async def scenario() -> None:
        async with AsyncClient(running.address) as writer, AsyncClient(running.address) as client:
            await writer.put(key, VALUE)
            near, at_hand = client._operations.near, client._at_hand
            while not (await at_hand.nodes(7.0))[0]:
                await asyncio.sleep(0)
            client._operations.local.at_hand = NEVER_NS, client._operations.local.at_hand[1]
            nodes, timeout = await at_hand.nodes(7.0)
            assert timeout == 7.0
            assert near.get(nodes, key) is None
            value, deadline = await at_hand.again(timeout, near.get, nodes, key)
            assert value == VALUE
            assert isinstance(deadline, Deadline)
            with pytest.raises(InvalidArgument):
                await at_hand.nodes(-1.0)

    asyncio.run(scenario())


def test_nodes_are_looked_for_in_the_time_of_the_call(tmp_path: Path) -> None:
    with Client(f"unix:{tmp_path}/nobody.sock") as client:
        nodes, deadline = client._at_hand.nodes(7.0)
        assert nodes == ()
        assert isinstance(deadline, Deadline)
