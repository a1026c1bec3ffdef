"""What a put promises by its `ack`, with SIGKILL to node, master and client between the put and the master's decision."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.client.sync import Client
from kvstore.protocol.errors import DeadlineExceeded, Unavailable
from tests.system.history import value_of
from tests.system.running import System, until

SIZES = (100, 4096, 200_000)
"""Inline values, and one that goes through shared memory."""
KEYS = [b"block-%d" % number for number in range(12)]
VALUES = [value_of(key, 0, SIZES[number % len(SIZES)]) for number, key in enumerate(KEYS)]
STORED = [True] * len(KEYS)
DEADLINE_S = 60.0


@pytest.fixture
def running(tmp_path: Path) -> Iterator[System]:
    with System(tmp_path, f"lmdb:{tmp_path / 'catalog'}") as started:
        started.start_master()
        started.start_node("n0", "--dram", "64MiB")
        yield started


def away(system: System) -> None:
    """The master is stopped: it decides nothing, and the node's link to it stays."""
    os.kill(system.masters[0].pid, signal.SIGSTOP)


def undecided(system: System, name: str = "n0") -> int:
    return system.node_status(name).counters["undecided"]


def test_a_put_for_the_node_is_read_by_its_client_before_the_master_knows_and_by_all_after_a_flush(running: System) -> None:
    with running.client(ack="node") as client, running.client() as other:
        client.put(b"first", b"so that the node is known")
        client.flush(deadline_s=DEADLINE_S)
        away(running)
        assert client.put_batch(KEYS, VALUES) == STORED
        assert client.put_batch(KEYS, VALUES) == [False] * len(KEYS)
        assert client.get_batch(KEYS) == VALUES
        with pytest.raises(DeadlineExceeded):
            client.flush(deadline_s=0.5)
        os.kill(running.masters[0].pid, signal.SIGCONT)
        client.flush(deadline_s=DEADLINE_S)
        assert other.exists_batch(KEYS) == STORED
        assert other.get_batch(KEYS) == VALUES


def test_what_was_put_for_the_node_outlives_a_master_that_is_killed_before_it_knew(running: System) -> None:
    with running.client(ack="node") as client:
        client.put(b"first", b"so that the node is known")
        client.flush(deadline_s=DEADLINE_S)
        away(running)
        assert client.put_batch(KEYS, VALUES) == STORED
        running.masters[0].kill()
        more = [b"without a master %d" % number for number in range(3)]
        assert client.put_batch(more, VALUES[:3]) == [True] * 3
        assert client.get_batch(KEYS) == VALUES
        running.start_master()
        running.await_alive("n0")
        client.flush(deadline_s=DEADLINE_S)
    with running.client() as newcomer:
        assert newcomer.get_batch(KEYS) == VALUES
        assert newcomer.get_batch(more) == VALUES[:3]


def put_and_be_killed(address: str) -> None:
    client = Client(address)
    assert client.put_batch(KEYS, VALUES, ack="node") == STORED
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_was_put_for_the_node_outlives_its_client(running: System) -> None:
    process = multiprocessing.get_context("spawn").Process(target=put_and_be_killed, args=(running.address,))
    process.start()
    process.join(DEADLINE_S)
    assert process.exitcode == -signal.SIGKILL
    process.close()
    with running.client() as other:
        other.flush(deadline_s=DEADLINE_S)
        until(lambda: all(other.exists_batch(KEYS)), "the node to have claimed what the killed client put")
        assert other.get_batch(KEYS) == VALUES


def test_what_the_master_did_not_know_goes_with_its_node_and_flush_says_so_once(running: System) -> None:
    with running.client(ack="node") as client:
        client.put(b"first", b"so that the node is known")
        client.flush(deadline_s=DEADLINE_S)
        away(running)
        assert client.put_batch(KEYS, VALUES) == STORED
        running.kill_node()
        os.kill(running.masters[0].pid, signal.SIGCONT)
        running.start_node()
        with pytest.raises(Unavailable, match="n0: gone, or started anew, and with it what was put there and was not known"):
            client.flush(deadline_s=DEADLINE_S)
        client.flush(deadline_s=DEADLINE_S)
        assert client.get_batch(KEYS) == [None] * len(KEYS)
        assert client.exists_batch(KEYS) == [False] * len(KEYS)
        assert client.put_batch(KEYS, VALUES) == STORED
        client.flush(deadline_s=DEADLINE_S)
        assert client.exists_batch(KEYS) == STORED


def test_a_put_for_the_cluster_is_not_answered_before_the_master_knows(running: System) -> None:
    with running.client(ack="node") as client:
        client.put(b"first", b"so that the node is known")
        away(running)
        for key, value in zip(KEYS[:3], VALUES[:3], strict=True):
            with pytest.raises(DeadlineExceeded):
                client.put(key, value, ack="cluster", deadline_s=0.5)
        os.kill(running.masters[0].pid, signal.SIGCONT)
        assert client.put_batch(KEYS[3:], VALUES[3:], ack="cluster", deadline_s=DEADLINE_S) == STORED[3:]
        running.masters[0].kill()
        running.start_master()
        running.await_alive("n0")
    with running.client() as newcomer:
        assert newcomer.get_batch(KEYS[3:]) == VALUES[3:]


@pytest.mark.parametrize("ack", ["node", "cluster"])
def test_a_remove_after_a_put_leaves_nothing_behind(running: System, ack: str) -> None:
    with running.client(ack=ack) as client:
        for _ in range(20):
            assert client.put_batch(KEYS, VALUES) == STORED
            assert client.remove(KEYS) == len(KEYS)
            assert client.exists_batch(KEYS) == [False] * len(KEYS)
        client.flush(deadline_s=DEADLINE_S)
        assert client.get_batch(KEYS) == [None] * len(KEYS)
        until(lambda: undecided(running) == 0, "no block to be undecided")


def test_pins_hold_what_was_just_put(running: System) -> None:
    with running.client(ack="node") as client:
        client.put_batch(KEYS, VALUES)
        assert client.pin(KEYS) == STORED
        assert client.remove(KEYS) == 0
        assert client.get_batch(KEYS) == VALUES


@pytest.fixture
def two_nodes(running: System) -> System:
    running.start_node("n1", "--dram", "64MiB")
    running.await_alive("n0", "n1")
    return running


def tied(system: System, name: str) -> Client:
    """A client for which the node `name` is that of this host, and puts of which are answered by it."""
    client = system.client(ack="node")
    client.exists(b"nothing")  # learns the nodes
    nodes = client._operations.resources.daemons.nodes
    client.put(b"warm-up", b"x", ack="cluster")
    nodes.local_id = next(node.node_id for node in system.status().nodes if node.name == name)
    return client


def test_what_another_node_has_becomes_a_replica_and_where_the_bytes_differ_the_clusters_win(two_nodes: System) -> None:
    with tied(two_nodes, "n0") as first, tied(two_nodes, "n1") as second:
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
        two_nodes.kill_node()
        until(lambda: second.locate([b"other"]) == [[]], "the master to know that n0 is gone")
        assert second.get(b"same") == b"1" * 5000


def test_nothing_of_it_is_undecided_for_long_and_nothing_is_lost_under_kills_of_the_master(running: System) -> None:
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
