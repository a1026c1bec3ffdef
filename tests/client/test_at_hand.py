"""Promises of at_hand.py, with a real node: what this host shows is found before anybody is asked, whereupon a call's time begins."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import AsyncClient, Client
from kvstore.client.local.nodes import LocalNode
from kvstore.client.local.reads import LocalReads
from kvstore.protocol.errors import InvalidArgument
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.testing.waiting import eventually
from tests.client.behaviour import running
from tests.client.processes import Cluster

__all__ = ["running"]
VALUE = b"v" * 5000


class Lacking:
    """Reads, the first time as if the node's slab had not been mapped."""

    def __init__(self, near: LocalReads) -> None:
        self._near = near
        self.count = 0

    def get(self, nodes: tuple[LocalNode, ...], key: bytes) -> bytes | None:
        self.count += 1
        if self.count == 1:
            self._near.wanted.append((nodes[0], 0))
            return None
        return self._near.get(nodes, key)


def test_what_is_shown_is_found_before_a_calls_time_begins_and_mapped_when_it_has(running: Cluster) -> None:
    key = os.urandom(16)
    with Client(running.address) as client:
        client.put(key, VALUE)
        near, at_hand = client._operations.near, client._at_hand
        eventually(lambda: at_hand.look(None, near.get, key)[0] == VALUE, "the node's index to be read")
        assert at_hand.look(7.0, near.get, key) == (VALUE, 7.0)
        assert at_hand.look(None, near.get, b"nowhere") == (None, None)
        lacking = Lacking(near)
        found, deadline = at_hand.look(7.0, lacking.get, key)
        assert (found, lacking.count, type(deadline)) == (VALUE, 2, Deadline)
        with pytest.raises(InvalidArgument):
            at_hand.nodes(-1.0)


def test_it_is_awaited_where_the_client_is(running: Cluster) -> None:
    key = os.urandom(16)

    async def scenario() -> None:
        async with AsyncClient(running.address) as client:
            await client.put(key, VALUE)
            near, at_hand = client._operations.near, client._at_hand
            while (await at_hand.look(None, near.get, key))[0] != VALUE:
                await client.get_batch([key])
            assert await at_hand.look(7.0, near.get, key) == (VALUE, 7.0)
            lacking = Lacking(near)
            found, deadline = await at_hand.look(7.0, lacking.get, key)
            assert (found, lacking.count, type(deadline)) == (VALUE, 2, Deadline)
            with pytest.raises(InvalidArgument):
                await at_hand.nodes(-1.0)

    asyncio.run(scenario())


def test_nodes_are_looked_for_in_the_time_of_the_call(tmp_path: Path) -> None:
    def read(*_: Any) -> None:
        raise AssertionError

    with Client(f"unix:{tmp_path}/nobody.sock") as client:
        found, deadline = client._at_hand.look(7.0, read)
        assert found is None
        assert isinstance(deadline, Deadline)
