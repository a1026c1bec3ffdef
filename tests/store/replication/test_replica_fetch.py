"""Tests of replica_fetch.py, from a node on real sockets and from malicious peers."""

import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.protocol.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    InvalidTicket,
    KVStoreError,
    ProtocolError,
    StaleEpoch,
    StaleHandle,
    Unavailable,
)
from kvstore.protocol.message import Message
from kvstore.protocol.node_messages import INLINE, MAPPED, MISS, ReadBlocksReply
from kvstore.protocol.session_messages import ROLE_NODE, SERVER_NODE, Hello, Welcome
from kvstore.rpc.address import socket_id
from kvstore.rpc.deadline import Deadline
from kvstore.store.replication.replica_fetch import ENGINE_MIN_BYTES, ReplicaBlock, SourceNode, fetch
from kvstore.transfer.engine import TransferEngine
from tests.rpc.wires import frame, read_frame
from tests.store.engines import LOOPBACK
from tests.store.served import TIMEOUT_S, Served, digest, served, until

VALUES = {"a": b"A" * 1000, "b": b"B" * 3000, "c": b"C" * 5}
HELLO = Hello(ROLE_NODE, "red", name="asker")
NOWHERE = "127.0.0.1:1"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path, dram_bytes=1 << 16, nvme_bytes=1 << 20) as node:
        client = node.connect()
        client.put(VALUES)
        client.close()
        yield node


def source_of(node: Served, *, unix: str | None = None, host: str | None = None, tcp: str = "") -> SourceNode:
    return SourceNode(5, socket_id(node.unix) if host is None else host, node.unix if unix is None else unix, tcp or node.tcp)


class Room:
    """Memory for the values of `names`, and what it takes to ask for them."""

    def __init__(self, *names: str, generation: int = 1, checksum: int | None = None, size_bytes: int | None = None) -> None:
        self.memory = [bytearray(size_bytes or len(VALUES[name])) for name in names]
        self.wanted = [
            ReplicaBlock(name.encode(), generation, digest(VALUES[name]) if checksum is None else checksum, memoryview(memory))
            for name, memory in zip(names, self.memory, strict=True)
        ]

    def values(self) -> list[bytes]:
        return [bytes(memory) for memory in self.memory]


def kinds(answers: Sequence[int | KVStoreError]) -> list[type]:
    return [type(answer) for answer in answers]


def digests(*names: str) -> list[int]:
    return [digest(VALUES[name]) for name in names]


@pytest.mark.parametrize("host", [None, "another"], ids=["this host", "another host"])
def test_fetch_works_over_either_socket(node: Served, host: str | None) -> None:
    """Over the valid one: the other address is invalid."""
    source = source_of(node, tcp=NOWHERE) if host is None else source_of(node, unix="/nowhere", host=host)
    room = Room(*VALUES)
    assert fetch(source, HELLO, room.wanted, Deadline(TIMEOUT_S)) == digests(*VALUES)
    assert room.values() == list(VALUES.values())
    assert not node.call(lambda: len(node.leases))


@pytest.mark.promise("right-daemon")
def test_fetch_ignores_a_socket_of_another_node(node: Served, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with served(tmp_path / "other") as other:
        other.authenticator.node_id = 6
        moved = SourceNode(5, socket_id(other.unix), other.unix, node.tcp)
        room = Room(*VALUES)
        assert fetch(moved, HELLO, room.wanted, Deadline(TIMEOUT_S)) == digests(*VALUES)
        with pytest.raises(Unavailable, match="is 'node', not node 5"):
            fetch(source_of(node, unix="", tcp=other.tcp), HELLO, room.wanted, Deadline(TIMEOUT_S))


def test_fetch_reports_errors_per_block(node: Served) -> None:

    def drop() -> None:
        block = node.store.table.find("red", b"c")
        assert block is not None
        node.store.table.copies.drop(block)

    node.call(drop)
    wanted = [Room("a", generation=2).wanted[0], Room("b").wanted[0], Room("c").wanted[0], Room("a", checksum=7).wanted[0]]
    assert kinds(fetch(source_of(node), HELLO, wanted, Deadline(TIMEOUT_S))) == [StaleHandle, int, StaleHandle, ChecksumMismatch]
    assert bytes(wanted[1].destination) == VALUES["b"]


def test_fetch_refuses_a_value_of_another_size(node: Served) -> None:
    with pytest.raises(ProtocolError, match="node 5 has 1000 bytes for a block of 999"):
        fetch(source_of(node), HELLO, Room("a", size_bytes=999).wanted, Deadline(TIMEOUT_S))


def test_fetch_presents_the_pass_of_the_order(tmp_path: Path) -> None:
    with served(tmp_path, needs_tickets=True) as node:
        client = node.connect(ticket=node.ticket())
        client.put(VALUES)
        client.close()
        node.authenticator.master_epochs[0] = 3
        generation = Room("a").wanted[0].generation
        shown = node.call(lambda: node.issuer.issue_pass(5, "red", [b"a"], [generation], node.reactor.now_ns()))

        def attempt(epoch: int, ticket: bytes) -> list[int | KVStoreError]:
            return fetch(source_of(node), Hello(ROLE_NODE, "red", "", "asker", epoch, ticket), Room("a").wanted, Deadline(TIMEOUT_S))

        assert attempt(3, shown) == digests("a")
        for wrong in (node.ticket(), b""):
            with pytest.raises(InvalidTicket):
                attempt(3, wrong)
        with pytest.raises(StaleEpoch, match="node 'asker' is registered under master epoch 2, this node under epoch 3"):
            attempt(2, shown)


class Liar:
    """A peer that sends Welcome, one fixed answer with a truncated payload, and closes. None: it answers nothing until
    released."""

    def __init__(self, answer: Message | None, payload_bytes: int = 0) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.source = SourceNode(5, "another", "", f"127.0.0.1:{self._listener.getsockname()[1]}")
        self._answer, self._payload = answer, bytes(payload_bytes)
        self._let_go = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        peer, _ = self._listener.accept()
        with peer:
            read_frame(peer)
            peer.sendall(frame(Welcome(SERVER_NODE, "liar", 5)))
            read_frame(peer)
            if self._answer is None:
                self._let_go.wait(TIMEOUT_S)
            else:
                peer.sendall(frame(self._answer, request_id=2, payload=self._payload)[: -1 if self._payload else None])

    def close(self) -> None:
        self._let_go.set()
        self._thread.join()
        self._listener.close()


def _blocks(status: int, count: int = 1) -> ReadBlocksReply:
    zeros = [0] * count
    return ReadBlocksReply(0, 0, 0, bytes([status]) * count, [1000] * count, zeros, bytes(count), zeros, zeros)


@pytest.mark.parametrize(
    ("answer", "payload_bytes", "error"),
    [
        (_blocks(MISS, 2), 0, ProtocolError),
        (_blocks(MAPPED), 0, ProtocolError),
        (_blocks(9), 0, ProtocolError),
        (_blocks(INLINE), 999, ProtocolError),
        (_blocks(INLINE), 1000, Unavailable),
        (None, 0, DeadlineExceeded),
    ],
    ids=["too many", "mapped", "unknown", "too few bytes", "hangs up within the value", "silent"],
)
def test_fetch_fails_in_time_for_a_bad_or_silent_source(
    answer: ReadBlocksReply | None, payload_bytes: int, error: type[KVStoreError]
) -> None:
    liar = Liar(answer, payload_bytes)
    try:
        with pytest.raises(error):
            fetch(liar.source, HELLO, Room("a").wanted, Deadline(0.2 if answer is None else TIMEOUT_S))
    finally:
        liar.close()


# --- by the transfer engine ---

LARGE = {"large": b"L" * ENGINE_MIN_BYTES, "larger": b"M" * (2 * ENGINE_MIN_BYTES + 3)}


@pytest.fixture
def far(tmp_path: Path) -> Iterator[tuple[Served, TransferEngine]]:
    """A node with an engine that holds LARGE, and its engine. Of what is below DRAM it may have `large` at a time there for readers."""
    with TransferEngine("far", LOOPBACK) as engine, served(tmp_path, dram_bytes=16 << 20, nvme_bytes=16 << 20, engine=engine) as node:
        client = node.connect()
        client.put(LARGE)
        client.close()
        yield node, engine


@pytest.fixture
def near() -> Iterator[TransferEngine]:
    with TransferEngine("near", LOOPBACK) as engine:
        yield engine


def large_room() -> tuple[list[bytearray], list[ReplicaBlock]]:
    memory = [bytearray(len(value)) for value in LARGE.values()]
    columns = zip(LARGE.items(), memory, strict=True)
    return memory, [ReplicaBlock(name.encode(), 1, digest(value), memoryview(one)) for (name, value), one in columns]


def by_engine(node: Served, transfer: bytes, engine: TransferEngine) -> None:
    """Fetch all of LARGE over TCP, and check that it has come."""
    memory, wanted = large_room()
    source = SourceNode(5, "another", "", node.tcp, transfer)
    assert fetch(source, HELLO, wanted, Deadline(TIMEOUT_S), engine) == [digest(value) for value in LARGE.values()]
    assert memory == list(LARGE.values())
    until(node, lambda: not len(node.leases))


def test_large_batches_are_fetched_by_the_engine(far: tuple[Served, TransferEngine], near: TransferEngine) -> None:
    node, engine = far
    whole = sum(map(len, LARGE.values()))
    by_engine(node, engine.describe(), near)
    until(node, lambda: engine.served_bytes == whole)  # counted once it is sent, by a thread of the engine's
    node.demote("large")
    by_engine(node, engine.describe(), near)
    until(node, lambda: engine.served_bytes == 2 * whole)  # what was not in DRAM, too: the source has read it into a slot for this
    node.demote("larger")
    by_engine(node, engine.describe(), near)
    without = 3 * whole - len(LARGE["larger"])
    until(node, lambda: engine.served_bytes == without)  # what has no room there comes with the answer
    by_engine(node, b"", near)
    assert engine.served_bytes == without


@pytest.mark.parametrize("transfer", [b"of a later release", "gone"], ids=["nonsense", "unreachable"])
def test_fetch_falls_back_to_messages(
    far: tuple[Served, TransferEngine], near: TransferEngine, transfer: bytes | str, caplog: pytest.LogCaptureFixture
) -> None:
    node, engine = far
    if isinstance(transfer, str):
        with TransferEngine("another", LOOPBACK) as other:
            transfer = other.describe()
    by_engine(node, transfer, near)
    assert engine.served_bytes == 0
    assert "transfer from node 5 failed, fetching by message" in caplog.text
