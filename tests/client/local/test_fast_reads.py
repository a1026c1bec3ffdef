"""Promises of fast_reads.py: one message for a small value whose place is known, and everything else is left to operations.

Against a node that the test plays, over real sockets; the last ones against real daemons."""

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import xxhash

from kvstore.client import Client
from kvstore.client.config import ClientSettings
from kvstore.client.connections.locations import CachedLocation
from kvstore.client.connections.resources import ClientResources
from kvstore.client.local.fast_reads import SMALL_BYTES, FastReads
from kvstore.client.local.nodes import LocalNodes
from kvstore.client.local.reads import LocalReads
from kvstore.client.reads.replica_lookup import REMOTE_HINT_TTL_NS
from kvstore.protocol.errors import Full
from kvstore.protocol.frames import HEADER_BYTES, unpack_header
from kvstore.protocol.master_messages import NodeTable
from kvstore.protocol.message import Message
from kvstore.protocol.node_messages import DEFERRED, INLINE, MAPPED, ReadBlocks, ReadBlocksReply
from kvstore.protocol.session_messages import ROLE_CLIENT, SERVER_NODE, Failure, Hello, Welcome
from kvstore.rpc.client.connection_pool import ConnectionPool
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.config import TransferSettings
from tests.client.processes import cluster
from tests.rpc.raw_peers import RawAnswerer, frame, read

FAR, NEAR = 7, 8
NOW_NS = 10**15
VALUE = b"value" * 100
HINT = CachedLocation(FAR, 5, len(VALUE))
LONG_S = 60.0
Answer = Callable[[socket.socket, int], None]


def blocks(status: int = INLINE, *, value: bytes = VALUE, count: int = 1, lease: int = 0) -> ReadBlocksReply:
    sums = [xxhash.xxh3_64_intdigest(value)] * count
    return ReadBlocksReply(lease, 0, 0, bytes([status] * count), [len(value)] * count, sums, b"\2" * count, [0] * count, [0] * count)


def answers(message: Message, payload: bytes = b"") -> Answer:
    return lambda sock, request_id: sock.sendall(frame(message, request_id, payload=payload))


GOOD = answers(blocks(), VALUE)


class Scene:
    """A client's share of the matter, with one connection that is open already, and a node that answers reads as `answer` does."""

    def __init__(self, stack: ExitStack) -> None:
        self.asked: list[ReadBlocks] = []
        self.answer: Answer = GOOD
        self.name = "far"
        peer = stack.enter_context(RawAnswerer(self._play))
        self.tcp = peer.metadata.rpartition(b" ")[2].decode()
        self.resources = ClientResources(
            ClientSettings(master="master:1"), TransferSettings(), is_here=lambda unix, _: unix == "/here", spread=0
        )
        stack.callback(self.resources.close)
        self.tell_nodes()
        self.pool = ConnectionPool(
            Hello(ROLE_CLIENT), ClientSettings(max_channels=2, idle_ttl_s=LONG_S, connect_timeout_s=LONG_S, busy_poll_us=0)
        )
        stack.callback(self.pool.close)
        self.resources.hints.learn([(b"key", HINT)])
        self.local = LocalNodes(self.resources.daemons, self.resources.mapping)
        local_reads = LocalReads(self.resources.copier, verify_bytes=0, verifies_all=False)
        self.reads = FastReads(self.resources, self.local, local_reads, self.pool, lambda: NOW_NS)

    def tell_nodes(self, *, has_local: bool = False) -> None:
        """Set the master's node table: the remote node, and optionally a local one."""
        table = NodeTable([FAR], ["far"], [""], [""], [self.tcp], [0], [b""])
        if has_local:
            table = NodeTable([FAR, NEAR], ["far", "near"], ["", "host"], ["", "/here"], [self.tcp, "10.0.0.8:1"], [0, 0], [b"", b""])
        self.resources.daemons.nodes.replace(table)

    @property
    def address(self) -> Any:
        node = self.resources.daemons.nodes.get(FAR)
        assert node is not None
        return node.route.primary

    def connect(self) -> None:
        self.pool.take(self.address, Deadline(LONG_S)).release()

    def get(self, timeout_s: float = LONG_S) -> bytes | None:
        return self.reads.get_remote((), b"key", Deadline(timeout_s))

    def _play(self, sock: socket.socket) -> None:
        while True:
            header = unpack_header(read(sock, HEADER_BYTES))
            body = read(sock, header.body_bytes)
            if header.type == Hello.TYPE:
                sock.sendall(frame(Welcome(SERVER_NODE, self.name), header.request_id))
            else:
                self.asked.append(ReadBlocks.unpack(body))
                self.answer(sock, header.request_id)


@pytest.fixture
def scene() -> Iterator[Scene]:
    with ExitStack() as stack:
        scene = Scene(stack)
        scene.connect()
        yield scene


def test_a_small_value_costs_one_message(scene: Scene) -> None:
    assert scene.get() == VALUE
    [asked] = scene.asked
    assert (asked.keys, list(asked.generations), asked.engine) == ([b"key"], [5], 0)
    buffer = bytearray(len(VALUE) + 3)
    assert scene.reads.get_remote_into((), b"key", memoryview(buffer), Deadline(LONG_S)) == len(VALUE)
    assert buffer == VALUE + b"\0\0\0"
    exact = bytearray(len(VALUE))
    assert scene.reads.get_remote_into((), b"key", memoryview(exact), Deadline(LONG_S)) == len(VALUE)
    assert exact == VALUE
    stats = scene.resources.counters.snapshot()
    assert (stats.requests, stats.hits, stats.bytes_in, stats.hits_by_tier["dram"]) == (3, 3, 3 * len(VALUE), 3)
    assert scene.pool.counts(scene.address) == (0, 1)


def no_hint(scene: Scene) -> None:
    scene.resources.hints.forget([b"key"])


def several_replicas(scene: Scene) -> None:
    scene.resources.hints.learn([(b"key", HINT._replace(replicas=2))])


def large(scene: Scene) -> None:
    scene.resources.hints.learn([(b"key", HINT._replace(size_bytes=SMALL_BYTES + 1))])


def a_node_nobody_knows(scene: Scene) -> None:
    scene.resources.hints.learn([(b"key", HINT._replace(node_id=99))])


def an_old_hint_and_a_node_here(scene: Scene) -> None:
    scene.tell_nodes(has_local=True)
    scene.resources.hints.learn([(b"key", HINT._replace(asked_ns=NOW_NS - REMOTE_HINT_TTL_NS))])


def a_node_of_this_host(scene: Scene) -> None:
    node = scene.resources.daemons.nodes.get(FAR)
    assert node is not None
    node.route.offer("/here", "")


def another_daemon(scene: Scene) -> None:
    with scene.pool.take(scene.address, Deadline(LONG_S)) as connection:
        connection.discard()
    scene.name = "stranger"
    scene.connect()


@pytest.mark.parametrize(
    "unusual", [no_hint, several_replicas, large, a_node_nobody_knows, an_old_hint_and_a_node_here, a_node_of_this_host, another_daemon]
)
def test_what_is_out_of_the_ordinary_is_not_asked_for_here(scene: Scene, unusual: Callable[[Scene], None]) -> None:
    unusual(scene)
    assert scene.get() is None
    assert scene.reads.get_remote_into((), b"key", memoryview(bytearray(1 << 20)), Deadline(LONG_S)) is None
    assert not scene.asked


def test_neither_is_what_has_no_room_or_no_key_or_no_connection(scene: Scene) -> None:
    assert scene.reads.get_remote_into((), b"key", memoryview(bytearray(len(VALUE) - 1)), Deadline(LONG_S)) is None
    assert scene.reads.get_remote((), ["key"], Deadline(LONG_S)) is None  # type: ignore[arg-type]
    with scene.pool.take(scene.address, Deadline(LONG_S)):
        assert scene.get() is None
    assert not scene.asked


def test_a_damaged_value_is_never_returned(scene: Scene) -> None:
    scene.answer = answers(blocks(), b"!" + VALUE[1:])
    assert scene.get() is None
    assert scene.resources.counters.snapshot().checksum_failures == 1
    assert scene.pool.counts(scene.address) == (0, 1)
    scene.answer = GOOD
    assert scene.get() == VALUE


@pytest.mark.parametrize(
    ("answer", "idle"),
    [
        (answers(blocks(DEFERRED, value=b"")), 1),
        (answers(Failure(Full.code, "no")), 1),
        (answers(blocks(value=VALUE + b"more"), VALUE + b"more"), 0),
        (answers(blocks(MAPPED, lease=3)), 0),
        (answers(blocks(count=2), VALUE * 2), 0),
        (answers(blocks(count=0)), 0),
        (answers(Welcome(SERVER_NODE, "what?")), 0),
        (lambda sock, _: sock.shutdown(socket.SHUT_RDWR), 0),
    ],
)
def test_other_answers_leave_the_connection_in_step_or_end_it(scene: Scene, answer: Answer, idle: int) -> None:
    scene.answer = answer
    assert scene.get() is None
    assert scene.pool.counts(scene.address) == (0, idle)
    scene.answer = GOOD
    assert scene.get() == (VALUE if idle else None)


def test_a_deadline_that_passes_is_for_the_operation_to_tell(scene: Scene) -> None:
    scene.answer = lambda sock, request_id: None
    deadline = Deadline(0.2)
    assert scene.reads.get_remote((), b"key", deadline) is None
    assert time.monotonic_ns() >= deadline.at_ns
    assert scene.pool.counts(scene.address) == (0, 0)


def test_whatever_a_signal_handler_raises_ends_the_connection(scene: Scene) -> None:
    class Struck(Exception):
        pass

    def strike(_number: int, _frame: FrameType | None) -> None:
        raise Struck

    def strike_when_asked(_sock: socket.socket, _request_id: int) -> None:
        signal.pthread_kill(main, signal.SIGUSR1)

    main, scene.answer = threading.get_ident(), strike_when_asked
    old = signal.signal(signal.SIGUSR1, strike)
    try:
        with pytest.raises(Struck):
            scene.get()
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert scene.pool.counts(scene.address) == (0, 0)


def test_a_client_of_another_host_gets_what_is_there_and_no_more(tmp_path: Path) -> None:
    elsewhere = TransferSettings(transports="tcp")
    with cluster(tmp_path) as started, Client(started.address, transfer=elsewhere, deadline_s=LONG_S) as client:
        started.start_node("--dram", "64MiB")
        with Client(started.address, deadline_s=LONG_S) as other:
            client.put(b"key", VALUE)
            buffer = bytearray(len(VALUE))
            for _ in range(3):
                assert (client.get(b"key"), client.get_into(b"key", buffer), bytes(buffer)) == (VALUE, len(VALUE), VALUE)
            other.remove([b"key"])
            other.put(b"key", b"anew", ack="cluster")
            assert client.get(b"key") == b"anew"
            other.remove([b"key"])
            assert (client.get(b"key"), client.get_into(b"key", buffer)) == (None, None)
            stats = client.stats()
            assert (stats.requests - 1, stats.hits, stats.misses, stats.stale_hints) == (9, 7, 2, 2)
