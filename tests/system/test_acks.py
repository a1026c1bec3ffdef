"""Promises of a put by its `ack`, with SIGKILL to node, master and client between the put and its commit to the directory.

The client is on the node's host, or on a host without a node.
"""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvstore.cli.main import kvstore
from kvstore.client.sync import Client
from kvstore.protocol.errors import DeadlineExceeded, Unavailable
from kvstore.transfer.config import TransferSettings
from tests.system.history import value_of
from tests.system.running import System, running_system, until

SIZES = (100, 4096, 200_000)
"""Inline values, and one that goes through shared memory."""
KEYS = [b"block-%d" % number for number in range(12)]
VALUES = [value_of(key, 0, SIZES[number % len(SIZES)]) for number, key in enumerate(KEYS)]
SMALL = [value_of(key, 0, 4096) for key in KEYS]
"""Values that a client on another host puts in one message."""
STORED = [True] * len(KEYS)
DEADLINE_S = 60.0
FAR_PUTS = 400


@pytest.fixture
def running(tmp_path: Path) -> Iterator[System]:
    with running_system(tmp_path, "--dram 64MiB", catalog="lmdb:") as started:
        yield started


@dataclass
class Side:
    """Host of a test's clients, and the values that they put."""

    make: Callable[..., Client]
    values: list[bytes]
    transfer: TransferSettings


@pytest.fixture(params=["on the node's host", "far"])
def side(running: System, request: pytest.FixtureRequest) -> Side:
    if request.param == "far":
        return Side(running.remote_client, SMALL, TransferSettings(transports="tcp"))
    return Side(running.client, VALUES, TransferSettings())


def away(system: System) -> None:
    """The master is stopped: it decides nothing, and the node's link to it stays."""
    os.kill(system.masters[0].pid, signal.SIGSTOP)


def back(system: System) -> None:
    os.kill(system.masters[0].pid, signal.SIGCONT)


def put_first(client: Client) -> None:
    """Locate the node with a put, and leave no uncommitted block."""
    client.put(os.urandom(16), os.urandom(4096))
    client.flush(deadline_s=DEADLINE_S)


def undecided(system: System, name: str = "n0") -> int:
    return system.node_status(name).counters["undecided"]


@pytest.mark.promise("put-ack-node")
@pytest.mark.promise("put-flush")
def test_put_is_read_by_its_client_and_by_all_after_flush(running: System, side: Side) -> None:
    with side.make(ack="node") as client, side.make() as other:
        put_first(client)
        away(running)
        assert [client.put(key, value) for key, value in zip(KEYS[:6], side.values[:6], strict=True)] == STORED[:6]
        assert client.put_batch(KEYS[6:], side.values[6:]) == STORED[6:]
        assert client.put_batch(KEYS, side.values) == [False] * len(KEYS)
        assert client.get_batch(KEYS) == side.values
        with pytest.raises(DeadlineExceeded):
            client.flush(deadline_s=0.5)
        back(running)
        client.flush(deadline_s=DEADLINE_S)
        assert other.exists_batch(KEYS) == STORED
        assert other.get_batch(KEYS) == side.values


@pytest.mark.promise("put-ack-node")
def test_put_outlives_a_master_that_is_killed_before_it_knew(running: System, side: Side) -> None:
    more = [b"without a master %d" % number for number in range(3)]
    with side.make(ack="node") as client:
        put_first(client)
        away(running)
        assert client.put_batch(KEYS, side.values) == STORED
        running.masters[0].kill()
        assert client.put_batch(more, side.values[:3]) == [True] * 3
        assert client.get_batch(KEYS) == side.values
        running.start_master()
        running.await_alive("n0")
        client.flush(deadline_s=DEADLINE_S)
    with running.client() as newcomer:
        assert newcomer.get_batch([*KEYS, *more]) == side.values + side.values[:3]


def put_and_be_killed(address: str, values: list[bytes], transfer: TransferSettings) -> None:
    client = Client(address, transfer=transfer)
    client.put(b"first", b"so that the node is known")
    assert client.put(KEYS[0], values[0], ack="node")
    assert client.put_batch(KEYS[1:], values[1:], ack="node") == STORED[1:]
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.promise("put-ack-node")
def test_put_outlives_its_client(running: System, side: Side) -> None:
    arguments = (running.address, side.values, side.transfer)
    process = multiprocessing.get_context("spawn").Process(target=put_and_be_killed, args=arguments)
    process.start()
    process.join(DEADLINE_S)
    assert process.exitcode == -signal.SIGKILL
    process.close()
    with running.client() as other:
        other.flush(deadline_s=DEADLINE_S)
        until(lambda: all(other.exists_batch(KEYS)), "the node to have claimed what the killed client put")
        assert other.get_batch(KEYS) == side.values


@pytest.mark.promise("put-ack-node")
def test_put_goes_with_its_node_and_flush_says_so_once(running: System, side: Side) -> None:
    with side.make(ack="node") as client:
        put_first(client)
        away(running)
        assert client.put_batch(KEYS, side.values) == STORED
        running.kill_node()
        back(running)
        running.start_node()
        with pytest.raises(Unavailable, match="uncommitted blocks are lost, because these nodes died or restarted: n0"):
            client.flush(deadline_s=DEADLINE_S)
        client.flush(deadline_s=DEADLINE_S)
        assert client.get_batch(KEYS) == [None] * len(KEYS)
        assert client.exists_batch(KEYS) == [False] * len(KEYS)
        assert client.put_batch(KEYS, side.values) == STORED
        client.flush(deadline_s=DEADLINE_S)
        assert client.get_batch(KEYS) == side.values


@pytest.mark.promise("put-ack-node")
@pytest.mark.promise("put-flush")
@pytest.mark.parametrize("ack", ["node", "cluster"])
def test_remove_after_a_put_leaves_nothing_behind(running: System, side: Side, ack: str) -> None:
    with side.make(ack=ack) as client:
        put_first(client)
        for _ in range(20):
            assert client.put_batch(KEYS, side.values) == STORED
            assert client.remove(KEYS) == len(KEYS)
            assert client.exists_batch(KEYS) == [False] * len(KEYS)
        client.flush(deadline_s=DEADLINE_S)
        assert client.get_batch(KEYS) == [None] * len(KEYS)
        until(lambda: undecided(running) == 0, "no block to be undecided")


@pytest.mark.promise("put-ack-cluster")
def test_put_ack_cluster_waits_for_the_master(running: System) -> None:
    with running.client(ack="node") as client:
        put_first(client)
        away(running)
        for key, value in zip(KEYS[:3], VALUES[:3], strict=True):
            with pytest.raises(DeadlineExceeded):
                client.put(key, value, ack="cluster", deadline_s=0.5)
        back(running)
        assert client.put_batch(KEYS[3:], VALUES[3:], ack="cluster", deadline_s=DEADLINE_S) == STORED[3:]
        running.masters[0].kill()
        running.start_master()
        running.await_alive("n0")
    with running.client() as newcomer:
        assert newcomer.get_batch(KEYS[3:]) == VALUES[3:]


@pytest.mark.promise("put-flush")
def test_pins_hold_what_was_just_put(running: System) -> None:
    with running.client(ack="node") as client:
        client.put_batch(KEYS, VALUES)
        assert client.pin(KEYS) == STORED
        assert client.remove(KEYS) == 0
        assert client.get_batch(KEYS) == VALUES


def tied(system: System, name: str) -> Client:
    """A client for which the node `name` is that of this host, and puts of which are answered by it."""
    client = system.client(ack="node")
    client.exists(b"nothing")  # learns the nodes
    nodes = client._operations.resources.daemons.nodes
    client.put(b"warm-up", b"x", ack="cluster")
    nodes.local_id = next(node.node_id for node in system.status().nodes if node.name == name)
    return client


@pytest.mark.promise("put-conflicts")
def test_existing_block_becomes_replica_and_cluster_bytes_win(running: System) -> None:
    running.start_node("n1", "--dram", "64MiB")
    running.await_alive("n0", "n1")
    with tied(running, "n0") as first, tied(running, "n1") as second:
        assert first.put(b"same", b"1" * 5000) is True
        assert first.put(b"other", b"2" * 5000) is True
        first.flush(deadline_s=DEADLINE_S)
        assert second.put_batch([b"same", b"other"], [b"1" * 5000, b"3" * 5000]) == [True, True], "its node had neither"
        second.flush(deadline_s=DEADLINE_S)
        same, other = second.locate([b"same", b"other"])
        assert sorted(location.node for location in same) == ["n0", "n1"]
        assert len({location.generation for location in same}) == 1
        assert [location.node for location in other] == ["n0"]
        assert second.get_batch([b"same", b"other"]) == [b"1" * 5000, b"2" * 5000]
        running.kill_node()
        until(lambda: second.locate([b"other"]) == [[]], "the master to know that n0 is gone")
        assert second.get(b"same") == b"1" * 5000


@pytest.mark.promise("put-ack-node")
def test_master_kills_lose_nothing_nor_leave_uncommitted(running: System) -> None:
    with running.client(ack="node") as client:
        for turn in range(3):
            keys = [b"turn %d %d" % (turn, number) for number in range(200)]
            assert client.put_batch(keys, [key * 100 for key in keys]) == [True] * 200
            running.masters[0].kill()
            running.start_master()
            running.await_alive("n0")
            client.flush(deadline_s=DEADLINE_S)
            assert client.exists_batch(keys) == [True] * 200
            assert client.get_batch(keys) == [key * 100 for key in keys]
        until(lambda: undecided(running) == 0, "no block to be undecided")


# --- clients of a host without a node ---


def target_of(client: Client) -> str:
    """Name of the node that the client's next small put goes to."""
    resources = client._operations.resources
    node = resources.daemons.nodes.get(resources.put_targets.node_id(4096))
    assert node is not None
    return node.name


@pytest.mark.promise("put-ack-node")
def test_puts_go_on_at_another_node_when_the_target_is_killed(running: System) -> None:
    """Each put that returned is read as it was put, or is a miss where the killed node had it."""
    running.start_node("n1", "--dram", "64MiB")
    with running.remote_client(ack="node") as client:
        keys = [b"of many-%d" % number for number in range(FAR_PUTS)]
        for number, key in enumerate(keys):
            assert client.put(key, value_of(key, 0, 4096), deadline_s=DEADLINE_S)
            if number == FAR_PUTS // 2:
                running.kill_node(target_of(client))
        with contextlib.suppress(Unavailable):  # where the master did not know the last ones before the kill
            client.flush(deadline_s=DEADLINE_S)
        values = client.get_batch(keys)
        assert all(value in (None, value_of(key, 0, 4096)) for key, value in zip(keys, values, strict=True))
        assert None not in values[FAR_PUTS // 2 + 1 :], "what was put after the kill is at the other node"
        assert values[0] is None


@pytest.mark.promise("put-ack-node")
def test_puts_go_to_another_node_while_the_target_is_drained(running: System) -> None:
    running.start_node("n1", "--dram", "64MiB")
    with running.remote_client(ack="node") as client:
        put_first(client)
        client.put(KEYS[0], SMALL[0])
        arguments = ["drain", target_of(client), "--master", running.address]
        assert CliRunner().invoke(kvstore, arguments, catch_exceptions=False).exit_code == 0
        put_first(client)
        assert client.put_batch(KEYS[1:], SMALL[1:]) == STORED[1:]
        client.flush(deadline_s=DEADLINE_S)
        assert client.get_batch(KEYS) == SMALL
