"""A client in a process that was forked from its own: it says so by name, and its parent goes on unharmed."""

import asyncio
import copy
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import AsyncClient, Client, new_hold
from tests.client.processes import Cluster, cluster
from tests.forks import told_by_child

KEYS = [b"%d" % i for i in range(20)]
VALUES = [key * 5000 for key in KEYS]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("c")) as started:
        started.start_node("--dram", "32MiB")
        yield started


def sockets() -> set[str]:
    """The sockets that this process has open."""
    links = (os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink())
    return {link for link in links if link.startswith("socket:")}


CALLS: list[Callable[[Any], object]] = [
    lambda client: client.get(KEYS[0]),
    lambda client: client.get_batch(KEYS),
    lambda client: client.put(b"other", b"value"),
    lambda client: client.view(KEYS[0]).__enter__(),
    lambda client: client.match_prefix(KEYS),
    lambda client: client.match_prefix(KEYS, hold=new_hold(1)),
    lambda client: client.release(new_hold(1)),
    lambda client: client.remove(KEYS),
]


@pytest.mark.promise("interrupts-safe")
@pytest.mark.parametrize("call", CALLS)
def test_a_forked_child_is_told_by_name_and_the_parent_goes_on(running: Cluster, call: Callable[[Any], object]) -> None:
    with Client(running.address) as client:
        client.put_batch(KEYS, VALUES)
        for _ in range(3):
            assert told_by_child(lambda: call(client)) == "Forked"
            assert client.get_batch(KEYS) == VALUES


@pytest.mark.promise("interrupts-safe")
def test_child_holds_no_parent_connection(running: Cluster) -> None:
    before = sockets()
    with Client(running.address) as client:
        client.put_batch(KEYS, VALUES, ack="cluster")
        ours = sockets() - before
        assert ours
        assert told_by_child(lambda: sockets() & ours) == "set()"
        assert told_by_child(client.close) == "None"
        assert told_by_child(lambda: Client(running.address).get_batch(KEYS) == VALUES) == "True"
        assert client.get_batch(KEYS) == VALUES


def test_a_view_is_its_own_processes_to_end(running: Cluster) -> None:
    with Client(running.address) as client:
        client.put_batch(KEYS, VALUES)
        view = client.view(KEYS[3])
        with view as memory:
            assert memory is not None
            assert told_by_child(lambda: view.__exit__(None, None, None)) == "Forked"
            assert bytes(memory) == VALUES[3]
        assert client.get_batch(KEYS) == VALUES


def test_the_asyncio_client_says_so_too(running: Cluster) -> None:
    async def main() -> None:
        async with AsyncClient(running.address) as client:
            await client.put_batch(KEYS, VALUES)
            view = client.view(KEYS[0])
            async with view as memory:
                for call in (lambda: client.get(KEYS[1]), lambda: view.__aexit__(None, None, None)):
                    assert told_by_child(lambda call=call: call().send(None)) == "Forked"  # type: ignore[misc]
                assert memory is not None
                assert bytes(memory) == VALUES[0]
            assert await client.get_batch(KEYS) == VALUES

    asyncio.run(main())


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_client_is_neither_copied_nor_pickled(kind: type[Client | AsyncClient], duplicate: Callable[[object], object]) -> None:
    """A program that hands a client to a process that it spawns learns what to do."""
    with pytest.raises(TypeError, match="create one in each process"):
        duplicate(kind("127.0.0.1:1"))
