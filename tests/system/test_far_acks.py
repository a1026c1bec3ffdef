"""Promises of `ack="node"` where the client's host has no node: SIGKILL to target node, master and client between the put and the
master's decision."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvstore.client.aio import AsyncClient
from kvstore.client.cli.main import kvstore
from kvstore.client.config import ClientSettings
from kvstore.client.sync import Client
from kvstore.protocol.errors import DeadlineExceeded, Unavailable
from kvstore.transfer.config import TransferSettings
from tests.system.history import value_of
from tests.system.running import System, until

KEYS = [b"block-%d" % number for number in range(12)]
VALUES = [value_of(key, 0, 4096) for key in KEYS]
STORED = [True] * len(KEYS)
DEADLINE_S = 60.0
PUTS = 400


@pytest.fixture
def running(tmp_path: Path) -> Iterator[System]:
    with System(tmp_path, f"lmdb:{tmp_path / 'catalog'}") as started:
        started.start_master()
        started.start_node("n0", "--dram", "64MiB")
        yield started


def master_away(system: System) -> None:
    """The master is stopped: it decides nothing, and the nodes' links to it stay."""
    os.kill(system.masters[0].pid, signal.SIGSTOP)


def put_first(client: Client) -> None:
    """Learn the target."""
    client.put(os.urandom(16), os.urandom(4096))


def target_of(client: Client) -> str:
    """Name of the node that the client's next small put goes to."""
    resources = client._operations.resources
    node = resources.daemons.nodes.get(resources.put_targets.node_id(4096))
    assert node is not None
    return node.name


def test_put_is_read_by_its_client_at_once_and_by_all_after_a_flush(running: System) -> None:
    with running.remote_client(ack="node") as client, running.remote_client() as other:
        put_first(client)
        master_away(running)
        assert [client.put(key, value) for key, value in zip(KEYS[:6], VALUES[:6], strict=True)] == STORED[:6]
        assert client.put_batch(KEYS[6:], VALUES[6:]) == STORED[6:]
        assert client.get_batch(KEYS) == VALUES
        with pytest.raises(DeadlineExceeded):
            client.flush(deadline_s=0.5)
        os.kill(running.masters[0].pid, signal.SIGCONT)
        client.flush(deadline_s=DEADLINE_S)
        assert other.get_batch(KEYS) == VALUES


def test_put_of_an_async_client_is_one_message_too(running: System) -> None:
    async def work() -> None:
        async with AsyncClient(running.address, transfer=TransferSettings(transports="tcp")) as client:
            await client.put(b"first", VALUES[0])
            master_away(running)
            assert await client.put(KEYS[0], VALUES[0])
            assert await client.put_batch(KEYS[1:], VALUES[1:]) == STORED[1:]
            os.kill(running.masters[0].pid, signal.SIGCONT)
            await client.flush(deadline_s=DEADLINE_S)
            assert await client.get_batch(KEYS) == VALUES

    asyncio.run(work())


def test_put_outlives_a_master_that_is_killed_before_it_knew(running: System) -> None:
    with running.remote_client(ack="node") as client:
        put_first(client)
        master_away(running)
        assert client.put_batch(KEYS, VALUES) == STORED
        running.masters[0].kill()
        running.start_master()
        running.await_alive("n0")
        client.flush(deadline_s=DEADLINE_S)
    with running.client() as newcomer:
        assert newcomer.get_batch(KEYS) == VALUES


def put_and_be_killed(address: str) -> None:
    client = Client(address, transfer=TransferSettings(transports="tcp"))
    client.put(b"first", VALUES[0])
    for key, value in zip(KEYS, VALUES, strict=True):
        assert client.put(key, value)
    os.kill(os.getpid(), signal.SIGKILL)


def test_put_outlives_its_client(running: System) -> None:
    process = multiprocessing.get_context("spawn").Process(target=put_and_be_killed, args=(running.address,))
    process.start()
    process.join(DEADLINE_S)
    assert process.exitcode == -signal.SIGKILL
    process.close()
    with running.client() as other:
        until(lambda: all(other.exists_batch(KEYS)), "the node to have claimed what the killed client put")
        assert other.get_batch(KEYS) == VALUES


def test_put_goes_with_its_node_and_flush_says_so_once(running: System) -> None:
    with running.remote_client(ack="node") as client:
        put_first(client)
        client.flush(deadline_s=DEADLINE_S)
        master_away(running)
        assert client.put_batch(KEYS, VALUES) == STORED
        running.kill_node()
        os.kill(running.masters[0].pid, signal.SIGCONT)
        running.start_node()
        with pytest.raises(Unavailable, match="n0: gone, or started anew, and with it what was put there and was not known"):
            client.flush(deadline_s=DEADLINE_S)
        client.flush(deadline_s=DEADLINE_S)
        assert client.get_batch(KEYS) == [None] * len(KEYS)
        assert client.put_batch(KEYS, VALUES) == STORED
        client.flush(deadline_s=DEADLINE_S)
        assert client.get_batch(KEYS) == VALUES


def test_puts_go_on_at_another_node_when_the_target_is_killed(running: System) -> None:
    """Each put that returned is read as it was put, or is a miss where the killed node had it."""
    running.start_node("n1", "--dram", "64MiB")
    with running.remote_client(ack="node") as client:
        keys = [b"of many-%d" % number for number in range(PUTS)]
        for number, key in enumerate(keys):
            assert client.put(key, value_of(key, 0, 4096), deadline_s=DEADLINE_S)
            if number == PUTS // 2:
                running.kill_node(target_of(client))
        with contextlib.suppress(Unavailable):  # where the master did not know the last ones before the kill
            client.flush(deadline_s=DEADLINE_S)
        values = client.get_batch(keys)
        assert all(value in (None, value_of(key, 0, 4096)) for key, value in zip(keys, values, strict=True))
        assert None not in values[PUTS // 2 + 1 :], "what was put after the kill is at the other node"
        assert values[0] is None


def test_puts_go_to_another_node_while_the_target_is_drained(running: System) -> None:
    running.start_node("n1", "--dram", "64MiB")
    with running.remote_client(ack="node") as client:
        put_first(client)
        client.put(KEYS[0], VALUES[0])
        arguments = ["drain", target_of(client), "--master", running.address]
        assert CliRunner().invoke(kvstore, arguments, catch_exceptions=False).exit_code == 0
        put_first(client)
        assert client.put_batch(KEYS[1:], VALUES[1:]) == STORED[1:]
        client.flush(deadline_s=DEADLINE_S)
        assert client.get_batch(KEYS) == VALUES


def test_remove_after_a_put_leaves_nothing_behind(running: System) -> None:
    settings = ClientSettings(max_hints=4)
    with running.remote_client(settings=settings) as client:
        put_first(client)
        for _ in range(20):
            assert client.put_batch(KEYS, VALUES) == STORED
            assert client.remove(KEYS) == len(KEYS)
            assert client.exists_batch(KEYS) == [False] * len(KEYS)
        client.flush(deadline_s=DEADLINE_S)
        assert client.get_batch(KEYS) == [None] * len(KEYS)
