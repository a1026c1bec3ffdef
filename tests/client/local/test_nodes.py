"""Attaching to the shared-memory indexes of local nodes, and the logged reason if that fails."""

import os
import threading
from collections.abc import Iterator

import pytest

from kvstore.client import Client
from kvstore.client.connections.routes import KnownNode
from kvstore.client.core.effects import Operation
from kvstore.client.local.nodes import RETRY_NS, LocalNodes
from kvstore.protocol.errors import Broken, DeadlineExceeded, Full, KVStoreError, NoOwner, Unavailable
from kvstore.protocol.master_messages import Nodes, NodeTable
from kvstore.protocol.node_messages import OpenIndex
from kvstore.rpc.deadline import Deadline
from kvstore.testing.transfer.awaited import eventually
from kvstore.transfer.memory.mapped_memory import MappedSlab
from tests.client.oracle import Oracle, OracleNode
from tests.client.processes import Cluster, cluster


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster")) as started:
        started.start_node("--dram", "64MiB")
        yield started


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Of two nodes on this host."""
    with cluster(tmp_path_factory.mktemp("pair")) as started:
        started.start_node("--dram", "64MiB")
        started.start_node("--dram", "64MiB")
        yield started


def reasons(error: KVStoreError, node: OracleNode) -> dict[str, str]:
    """Diagnostics of a client whose local node answered OpenIndex with `error`."""
    oracle = Oracle(node)
    oracle.script[OpenIndex].append(error)
    local = LocalNodes(oracle.resources.daemons, oracle.resources.mapping)
    oracle.run(local.attach(oracle.deadline()))
    assert local.ready == ()
    assert len(oracle.sent(OpenIndex)) == 1
    assert oracle.all_given_back()
    return oracle.resources.daemons.shm_diagnostics.reasons()


@pytest.mark.promise("observable")
@pytest.mark.parametrize("error", [Full("no desk is left"), Broken("cannot map a slab")])
def test_a_node_that_refuses_its_index_is_told_of(node: OracleNode, error: KVStoreError) -> None:
    assert reasons(error, node) == {"n1": str(error)}


def test_rejected_ticket_is_replaced_at_once(node: OracleNode) -> None:
    oracle = Oracle(node)
    oracle.ticket = oracle.issued = b"first"
    oracle.run(oracle.resources.daemons.refresh_nodes(oracle.deadline()))
    oracle.ticket = oracle.issued = b"second"
    oracle.hellos.clear()
    local = LocalNodes(oracle.resources.daemons, oracle.resources.mapping)
    oracle.script[OpenIndex].append(Unavailable("as far as this test goes"))
    oracle.run(local.attach(oracle.deadline()))
    assert [hello.ticket for hello in oracle.hellos if hello is not None] == [b"first", b"second"]
    assert len(oracle.sent(OpenIndex)) == 1


@pytest.mark.parametrize("is_reachable", [True, False])
def test_a_node_that_has_not_registered_yet_is_asked_for_again(node: OracleNode, is_reachable: bool) -> None:
    """It answers a moment after its start, when the master does not name it."""
    oracle = Oracle(node)
    oracle.ticket = oracle.issued = b"first"
    oracle.run(oracle.resources.daemons.refresh_nodes(oracle.deadline()))
    oracle.ticket = b"second"
    now_ns = [0]
    local = LocalNodes(oracle.resources.daemons, oracle.resources.mapping, clock_ns=lambda: now_ns[0])
    oracle.script[Nodes].append(NodeTable([], [], [], [], [], [], []))
    oracle.run(local.attach(oracle.deadline()))
    assert oracle.sent(OpenIndex) == []
    oracle.issued = b"second"
    if not is_reachable:
        oracle.script[Nodes].append(NoOwner("no master owns the catalog"))
    oracle.script[OpenIndex] += [Unavailable("as far as this test goes")] * 2
    now_ns[0] += RETRY_NS
    assert local.is_due()
    oracle.run(local.attach(oracle.deadline()))
    assert len(oracle.sent(OpenIndex)) == is_reachable
    now_ns[0] += 100 * RETRY_NS
    oracle.run(local.attach(oracle.deadline()))
    assert len(oracle.sent(Nodes)) == 3, "one that does not come back is not asked for for ever"


def test_unmappable_slab_is_diagnosed_until_mapped(
    running: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def out_of_addresses(fd: int, size_bytes: int, *, writable: bool, transparent_hugepages: bool) -> MappedSlab:
        os.close(fd)
        raise Broken("cannot map a slab: Cannot allocate memory")

    key = os.urandom(16)
    with Client(running.address) as writer:
        writer.put(key, b"value", ack="cluster")  # a reader that cannot map it asks the master
    with Client(running.address) as reader, monkeypatch.context() as patch:
        [name] = reader.shared_memory()
        patch.setattr("kvstore.client.connections.slabs.map_slab", out_of_addresses)
        for _ in range(3):
            assert reader.get(key) == b"value"
        assert reader.shared_memory() == {name: "cannot map a slab: Cannot allocate memory"}
        assert [record.getMessage() for record in caplog.records] == [
            f"node {name!r} of this host is not reached through shared memory: cannot map a slab: Cannot allocate memory"
        ]
        patch.undo()
        assert reader.get(key) == b"value"
        assert reader.shared_memory() == {name: ""}


@pytest.mark.promise("failover")
def test_node_stays_readable_during_a_failover(running: Cluster) -> None:
    key = os.urandom(16)
    with Client(running.address) as client:
        client.put(key, b"value")
        assert client.get(key) == b"value"
        local, nodes = client._operations.local, client._operations.resources.daemons.nodes
        [attached] = local.ready
        nodes.note_master_epoch(1 << 62)
        nodes.replace(NodeTable([], [], [], [], [], [], []))
        local._drop_lost()
        assert local.ready == (attached,)
        nodes.replace(NodeTable([9], ["another"], [""], [""], ["h:1"], [0], [b""]))
        local._drop_lost()
        assert len(local.ready) == 0


def ready_names(client: Client) -> list[str]:
    """Of the nodes read through shared memory, after a call."""
    client.get(os.urandom(16))
    return sorted(node.name for node in client._operations.local.ready)


def test_missing_node_is_retried_in_the_background(pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[threading.Thread] = []
    attach_to = LocalNodes._attach_to

    def once_in_vain(local: LocalNodes, node: KnownNode, deadline: Deadline) -> Operation[None]:
        if node.name == "n1":
            tries.append(threading.current_thread())
            if len(tries) == 1:
                raise DeadlineExceeded("it is busy")
        return attach_to(local, node, deadline)

    monkeypatch.setattr(LocalNodes, "_attach_to", once_in_vain)
    with Client(pair.address) as client:
        assert ready_names(client) == ["n0"]
        eventually(lambda: ready_names(client) == ["n0", "n1"], "the other node to be read too")
    assert len(tries) == 2
    assert tries[0] is threading.current_thread() is not tries[1]
