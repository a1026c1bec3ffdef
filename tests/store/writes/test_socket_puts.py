"""Tests of inline puts in socket_puts.py over real sockets. Those with commit requests are in test_commit_requests.py."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.protocol.catalog_messages import DRAIN_OFF, DRAIN_SAVE, EVENT_REMOVED, CommitBlocks
from kvstore.protocol.errors import ChecksumMismatch, DeadlineExceeded, Draining, InvalidArgument, KVStoreError, ProtocolError, Unavailable
from kvstore.protocol.master_messages import ReserveReply
from kvstore.protocol.message import GRANTED
from kvstore.protocol.node_messages import (
    ACK_CLUSTER,
    ACK_NODE,
    ACK_NODE_NO_WAIT,
    ALREADY_STORED,
    RETRY_LATER,
    STORED,
    AbortPuts,
    OpenIndex,
    Put,
)
from kvstore.protocol.session_messages import Flags, Ok
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.server.session import Session
from kvstore.security.identity import Role
from kvstore.tiers.tier import Slot
from tests.rpc.wires import frame, read_frame
from tests.store.integrity import check
from tests.store.made import made
from tests.store.served import TIMEOUT_S, Client, Served, digest, in_background, served, until

KIB = 1024


def message(
    name: str, value: bytes, *, size: int | None = None, checksum: int | None = None, namespace: str = "ns", ack: int = ACK_NODE
) -> Put:
    told = digest(value) if checksum is None else checksum
    return Put(namespace, [name.encode()], [len(value) if size is None else size], [0], [told], [b"above"], ack)


def put(client: Client, name: str, value: bytes, ack: int = ACK_NODE) -> int | None:
    """As a client of this release: in one segment."""
    return client.channel.call_for_flag(Put.TYPE, message(name, value, ack=ack).pack(), value, Deadline(TIMEOUT_S))


class Shown:
    """Records which frames were served inline."""

    def __init__(self, node: Served) -> None:
        self.served: list[bool] = []
        at_once = node.socket_puts.inline
        serve = at_once.frame

        def noted(session: Session, tenant: str, frame: memoryview) -> bool:
            self.served.append(serve(session, tenant, frame))
            return self.served[-1]

        at_once.frame = noted  # type: ignore[method-assign]
        self._node = node

    def all(self) -> list[bool]:
        """Asked in the loop: the answer goes out before a call is over."""
        return self._node.call(lambda: list(self.served))


@pytest.fixture
def shown(node: Served) -> Shown:
    return Shown(node)


def test_an_inline_put_is_stored_and_visible(node: Served, client: Client, shown: Shown) -> None:
    client.channel.call_for_fds(OpenIndex(), Deadline(TIMEOUT_S))
    assert put(client, "a", b"x" * 5000) == STORED
    assert put(client, "a", b"y" * 5000) == ALREADY_STORED
    assert shown.all() == [True, True]
    assert client.read("a")[1] == [b"x" * 5000]
    block = node.call(lambda: node.store.table.find("red", b"a"))
    assert block is not None
    assert block.index_entry >= 0
    assert (block.namespace, block.checksum, block.generation) == ("ns", digest(b"x" * 5000), 0)
    assert node.call(lambda: (node.socket_puts.in_bytes, len(node.store.table.uncommitted))) == (5000, 1)
    node.call(lambda: check(node.store.table))


def test_a_block_whose_answer_fails_is_still_stored(node: Served, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would be visible but never committed or evicted."""
    with monkeypatch.context() as patch:
        patch.setattr(Session, "send_now", lambda session, data: 1 // 0)
        with pytest.raises(Unavailable):
            put(client, "a", b"value")
    other = node.connect()
    assert other.read("a")[1] == [b"value"]
    assert node.call(lambda: (node.socket_puts.in_bytes, len(node.store.table.uncommitted))) == (5, 1)
    node.call(lambda: check(node.store.table))
    other.close()


def test_an_inline_put_is_readable_when_its_answer_is_sent(node: Served, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, int]] = []
    send_now = Session.send_now

    def noted(session: Session, data: bytes) -> bytes:
        table = node.store.table
        seen.append((table.find("red", b"a") is not None, len(table.uncommitted)))
        return send_now(session, data)

    monkeypatch.setattr(Session, "send_now", noted)
    assert put(client, "a", b"value") == STORED
    assert seen == [(True, 0)]
    assert node.call(lambda: len(node.store.table.uncommitted)) == 1


@pytest.mark.parametrize(
    "other",
    [
        message("a", b"value", checksum=7),
        message("a", b"value", checksum=7, ack=ACK_CLUSTER),
        message("a", b"value", size=6),
        message("a", b"value", size=17 * KIB),
        Put("ns", [b"a"], [5], [9], [digest(b"value")], [b""], ACK_CLUSTER),
        Put("ns", [b"a", b"b"], [2, 3], [0, 0], [digest(b"va"), digest(b"lue")], [b"", b""], ACK_NODE),
    ],
)
def test_other_puts_take_the_general_path(node: Served, other: Put) -> None:
    """Several blocks, reserved puts, invalid puts."""
    data = memoryview(frame(other, 7, b"value"))
    assert not node.call(lambda: node.socket_puts.inline.frame(session_of(node), "red", data))
    assert is_empty(node)


class Master:
    """A master that answers commit requests on the test's command, and records the slot's content at that time."""

    def __init__(self, node: Served) -> None:
        self.node = node
        self.asked: list[tuple[CommitBlocks, Callable[[ReserveReply | KVStoreError], None]]] = []
        self.fault: Exception | None = None
        self.answer_at_once: KVStoreError | None = None
        node.call(lambda: node.commit_requests.link_up(self.ask, 7))

    def ask(self, claim: CommitBlocks, answer: Callable[[ReserveReply | KVStoreError], None]) -> None:
        if self.fault is not None:
            raise self.fault
        if self.answer_at_once is not None:
            answer(self.answer_at_once)
        else:
            self.asked.append((claim, answer))

    def grant(self, generation: int) -> None:
        until(self.node, lambda: bool(self.asked))
        self.node.call(lambda: self.asked.pop(0)[1](ReserveReply(bytes((GRANTED,)), [5], [generation])))


def test_an_inline_put_with_a_commit_counts_as_in_flight(node: Served, client: Client, shown: Shown) -> None:
    master = Master(node)
    thread, results = in_background(lambda: put(client, "a", b"value", ACK_CLUSTER))
    until(node, lambda: bool(master.asked))
    assert shown.all() == [True]
    assert node.call(lambda: node.service.loads.of("red")) == (1, 1)
    assert node.call(lambda: (node.store.table.find("red", b"a"), node.store.table.open_puts)) == (None, 1)
    master.grant(9)
    thread.join(TIMEOUT_S)
    assert results == [STORED]
    assert node.call(lambda: node.service.loads.of("red")) == (1, 0)
    assert client.read("a", generations=[9])[1] == [b"value"]
    node.call(lambda: check(node.store.table))
    assert node.call(lambda: node.socket_puts.in_bytes) == 5


def test_a_failed_value_is_retracted_when_granted(node: Served, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The master is asked before the value is in its slot."""
    master = Master(node)

    def fail(_slot: Slot, _value: memoryview) -> tuple[int, int]:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(node.store.dram, "fill", fail)
        with pytest.raises(KVStoreError, match="internal error"):
            put(client, "a", b"value", ACK_CLUSTER)
    heard: list[int] = []
    node.store.emit = lambda kind, _block: heard.append(kind)
    master.grant(9)
    assert node.call(lambda: node.store.table.find("red", b"a")) is None
    assert heard == [EVENT_REMOVED]
    assert is_empty(node)


@pytest.mark.parametrize("is_commit_in_flight", [False, True])
def test_a_present_or_in_flight_key_takes_the_general_path(node: Served, client: Client, shown: Shown, is_commit_in_flight: bool) -> None:
    Master(node)
    if is_commit_in_flight:
        node.call(lambda: node.store.table.uncommitted.begin([made("red", b"a", 5, 0)]))
    else:
        put(client, "a", b"value")
    assert put(client, "a", b"value", ACK_CLUSTER) == RETRY_LATER
    assert shown.all()[-1:] == [False]
    if is_commit_in_flight:
        node.call(lambda: node.store.table.uncommitted.end([made("red", b"a", 5, 0)]))


def test_a_key_with_an_open_put_takes_the_general_path(node: Served, client: Client, shown: Shown) -> None:
    other = node.connect()
    other.open({"a": 5})
    assert put(client, "a", b"value") == RETRY_LATER
    assert shown.all() == [False]
    other.close()


def test_without_a_free_slot_no_put_is_inline(node: Served, client: Client, shown: Shown) -> None:
    writer = node.connect()
    opened = writer.open({"held": 16 * KIB})
    with pytest.raises(DeadlineExceeded):
        client.channel.call_for_flag(Put.TYPE, message("a", b"value").pack(), b"value", Deadline(0.5))
    assert shown.all() == [False]
    assert len(opened.put_ids) == 1
    writer.close()


@pytest.mark.promise("put-ack-node")
def test_an_inline_ack_put_is_refused_without_a_free_slot(node: Served, client: Client) -> None:
    writer, waiter = node.connect(), node.connect()
    opened = writer.open({"held": 16 * KIB})
    assert put(client, "a", b"value", ACK_NODE_NO_WAIT) == RETRY_LATER
    thread, results = in_background(lambda: put(waiter, "b", b"value"))
    until(node, lambda: len(node.waiting) == 1)
    assert put(client, "a", b"value", ACK_NODE_NO_WAIT) == RETRY_LATER, "behind who waits, too"
    writer.ask(AbortPuts(list(opened.put_ids)), Ok)
    thread.join(TIMEOUT_S)
    assert results == [STORED]
    assert put(client, "a", b"value", ACK_NODE_NO_WAIT) == STORED
    node.call(lambda: check(node.store.table))
    writer.close()
    waiter.close()


def test_a_draining_node_takes_no_inline_puts(node: Served, client: Client, shown: Shown) -> None:
    node.call(lambda: node.drainer.drain(DRAIN_SAVE))
    with pytest.raises(Draining):
        put(client, "a", b"value")
    assert shown.all() == []
    node.call(lambda: node.drainer.drain(DRAIN_OFF))
    assert put(client, "a", b"value") == STORED


def test_a_read_only_caller_has_no_inline_puts(tmp_path: Path) -> None:
    with served(tmp_path, needs_tickets=True) as node:
        for role, may_put in ((Role.READ, False), (Role.WRITE, True)):
            client = node.connect(ticket=node.ticket(role=role))
            assert node.call(lambda: [session.fast_path is not None for session in node.server.sessions]) == [may_put]
            client.close()
            until(node, lambda: not node.server.sessions)


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_put_is_the_same_however_it_arrives(node: Served, is_whole: bool) -> None:
    sock = node.connect().channel.detach()
    sock.settimeout(TIMEOUT_S)
    sent = frame(message("a", b"value"), payload=b"value")
    sock.sendall(sent[: None if is_whole else -2])
    if not is_whole:
        until(node, lambda: node.store.table.open_puts == 1)
        sock.sendall(sent[-2:])
    assert read_frame(sock)[1] == Flags(bytes([STORED]))
    assert node.call(lambda: node.socket_puts.in_bytes) == 5
    sock.close()


def test_several_puts_in_one_segment_are_all_answered(node: Served) -> None:
    sock = node.connect().channel.detach()
    sock.settimeout(TIMEOUT_S)
    sock.sendall(b"".join(frame(message(name, b"value"), number, b"value") for number, name in enumerate("abca", 1)))
    answers = [read_frame(sock) for _ in range(4)]
    assert [header.request_id for header, _, _ in answers] == [1, 2, 3, 4]
    assert [answer for _, answer, _ in answers] == [Flags(bytes([flag])) for flag in (STORED, STORED, STORED, ALREADY_STORED)]
    sock.close()


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (message("a", b"value", checksum=7), ChecksumMismatch),
        (message("a", b"value", size=6), ProtocolError),
        (message("a", b"value", namespace="n" * 256), InvalidArgument),
        (message("a", b"value", size=17 * KIB), KVStoreError),
        (message("a", b"value", checksum=7, ack=ACK_CLUSTER), ChecksumMismatch),
        (message("a", b"value", size=6, ack=ACK_CLUSTER), ProtocolError),
    ],
)
def test_an_invalid_put_is_refused_and_leaves_nothing(node: Served, client: Client, wrong: Put, error: type[Exception]) -> None:
    with pytest.raises(error):
        client.ask(wrong, Flags, payload=[b"value"])
    assert is_empty(node)
    assert put(client, "a", b"value") == STORED, "the connection lives on"


def session_of(node: Served) -> Session:
    """A session without a peer: it must send nothing."""
    return Session.__new__(Session)


def is_empty(node: Served) -> bool:
    node.call(lambda: check(node.store.table))
    return node.call(lambda: (node.store.dram.used_bytes, node.store.table.open_puts, len(list(node.store.table.blocks())))) == (0, 0, 0)
