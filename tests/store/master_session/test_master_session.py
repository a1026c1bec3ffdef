"""Promises of master_session.py: over a new link to the master all is said that it knows, and nothing that it does not."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.catalog_messages import Heartbeat, HeartbeatResponse, Publish, QueryVictims
from kvstore.protocol.errors import KVStoreError, Unavailable
from kvstore.store.config import NodeSettings
from kvstore.store.master_session.master_session import MasterSession
from kvstore.store.replication.last_replica import LastReplicaQueries
from kvstore.testing.transfer.awaited import eventually
from tests.rpc.wires import read_frame
from tests.store.served import TIMEOUT_S, Served, served

SIZE = 64 << 10


class Linked:
    """A node, and the master's ends of the links that it was given one after the other."""

    def __init__(self, node: Served) -> None:
        self.node = node
        node.victim_queries = self.victim_queries = LastReplicaQueries(
            node.store.table.lowest, node.partition_map, clock_ns=node.reactor.now_ns
        )
        self.reactor = node.reactor
        self.session = MasterSession(self, node, node.service, node.authenticator, NodeSettings(peer_timeout_s=TIMEOUT_S))

    def synced(self) -> None:
        return

    def lost(self, partition: int, registration_epoch: int) -> None:
        return

    def begin(self, epoch: int) -> socket.socket:
        ours, theirs = socket.socketpair()
        theirs.settimeout(TIMEOUT_S)
        reply = pb.RegisterReply(node_id=5, registration_epoch=epoch)
        self.node.call(lambda: self.session.begin(ours, reply, accepts_traces=False))
        return theirs

    def evict_and_ask(self) -> None:
        """One more block than there is room for; then what is due is asked."""

        def put() -> None:
            for name in "abcdefghijklmnopq":
                self.node.store.put(name, SIZE)
            self.victim_queries.step()
            self.node.replicator.flush_now()

        self.node.call(put)


@pytest.fixture
def linked(tmp_path: Path) -> Iterator[Linked]:
    with served(tmp_path) as node:
        yield Linked(node)


def said_until_commits(master: socket.socket) -> set[int]:
    """The types of what came up to the commits of the blocks, which are said last."""
    found = set[int]()
    while True:
        header, message, _payload = read_frame(master)
        found.add(header.type)
        if isinstance(message, Publish) and message.keys:
            return found


def test_victim_queries_use_the_newest_link(linked: Linked) -> None:
    with linked.begin(1), linked.begin(2) as master:
        linked.evict_and_ask()
        found = said_until_commits(master)
    assert {Publish.TYPE, QueryVictims.TYPE} <= found


def test_a_heartbeat_without_a_connection_fails_at_once(linked: Linked) -> None:
    heard: list[HeartbeatResponse | KVStoreError] = []

    def beat() -> None:
        linked.node.call(lambda: linked.session.send_heartbeat(b"said", heard.append, TIMEOUT_S))

    beat()
    assert isinstance(heard.pop(), Unavailable)
    with linked.begin(1) as master:
        beat()
        while True:
            _header, message, _payload = read_frame(master)
            if isinstance(message, Heartbeat):
                break
        assert message.request == b"said"
    eventually(lambda: bool(heard), "the connection is gone")
    assert isinstance(heard.pop(), Unavailable)
