"""Tests of commit_requests.py over real sockets: an unreserved put is stored when the master grants it, and leaves
nothing otherwise."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvstore.protocol.catalog_messages import EVENT_REMOVED, PHASE_STREAM, PHASE_SYNC, PHASE_SYNC_BEGIN, CommitBlocks, Publish
from kvstore.protocol.errors import CatalogUnavailable, KVStoreError, ProtocolError, StaleEpoch, Unavailable
from kvstore.protocol.event_messages import FetchEvents
from kvstore.protocol.master_messages import ReserveReply
from kvstore.protocol.message import GRANTED
from kvstore.protocol.node_messages import ALREADY_STORED, RETRY_LATER, STORED, AbortPuts, CommitPuts, Put
from kvstore.protocol.session_messages import Flags, Ok
from kvstore.store.block_table.block import Block
from tests.rpc.wires import frame, read_frame
from tests.store.integrity import check
from tests.store.made import made
from tests.store.served import TIMEOUT_S, Client, Served, digest, served, until
from tests.store.tables import PUT_TTL_NS

Answer = Callable[[ReserveReply | KVStoreError], None]


class Master:
    """The node's master, as far as claims go: it keeps what it is asked until the test decides."""

    def __init__(self, node: Served) -> None:
        self.node = node
        self.asked: list[tuple[CommitBlocks, Answer]] = []
        node.call(lambda: node.commit_requests.link_up(lambda claim, answer: self.asked.append((claim, answer)), 7))

    def decide(self, reply: ReserveReply | KVStoreError) -> CommitBlocks:
        until(self.node, lambda: bool(self.asked))
        claim, answer = self.asked.pop()
        self.node.call(lambda: answer(reply))
        return claim


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path) as node:
        yield node


@pytest.fixture
def master(node: Served) -> Master:
    return Master(node)


def put(client: Client, **values: bytes) -> tuple[threading.Thread, list[Any]]:
    """An unreserved put in a thread of its own; its flags or its exception will be in the list."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(client.put(values, generation=0))
        except KVStoreError as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def grants(*statuses: int, generation: int = 42) -> ReserveReply:
    return ReserveReply(bytes(statuses), [5] * len(statuses), [generation] * len(statuses))


def test_a_granted_put_has_the_masters_generation(node: Served, client: Client, master: Master) -> None:
    thread, results = put(client, a=b"aaa", b=b"b")
    until(node, lambda: bool(master.asked))
    assert node.call(lambda: node.store.table.find("red", b"a")) is None, "not before the master has decided"
    claim = master.decide(grants(GRANTED, GRANTED))
    thread.join(TIMEOUT_S)
    assert results == [[STORED, STORED]]
    assert (claim.epoch, claim.tenant, claim.namespace, claim.keys) == (7, "red", "ns", [b"a", b"b"])
    assert (list(claim.sizes), list(claim.checksums), claim.parents) == ([3, 1], [digest(b"aaa"), digest(b"b")], [b"", b""])
    assert client.read("a", "b", generations=[42, 42])[1] == [b"aaa", b"b"]
    assert node.call(lambda: node.replicator._seq) == 0, "the master knows already"


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_small_put_is_committed_on_every_path(node: Served, master: Master, is_whole: bool) -> None:
    sock = node.connect().channel.detach()
    sock.settimeout(TIMEOUT_S)
    sent = frame(Put("ns", [b"a"], [5], [0], [digest(b"value")], [b"above"]), 1, b"value")
    sock.sendall(sent[: None if is_whole else -2])
    if not is_whole:
        until(node, lambda: node.store.table.open_puts == 1)
        assert master.asked == []
        sock.sendall(sent[-2:])
    until(node, lambda: bool(master.asked))
    assert node.call(lambda: (node.store.names(), node.store.table.open_puts)) == ("", 1)
    claim = master.decide(grants(GRANTED))
    assert (claim.keys, list(claim.sizes), list(claim.checksums), claim.parents) == ([b"a"], [5], [digest(b"value")], [b"above"])
    assert read_frame(sock)[1] == Flags(bytes([STORED]))
    block = node.call(lambda: node.store.table.find("red", b"a"))
    assert block is not None
    assert (block.namespace, block.parent, block.checksum, block.generation) == ("ns", b"above", digest(b"value"), 42)
    slot = block.dram
    assert slot is not None
    assert node.call(lambda: bytes(node.store.dram.view(slot))) == b"value"
    node.call(lambda: check(node.store.table))
    sock.close()


def test_already_there_is_answered_once_durable(node: Served, client: Client, master: Master) -> None:
    node.acknowledges = False
    writer = node.connect()
    reserved = threading.Thread(target=lambda: writer.put({"old": b"o"}, generation=1))
    reserved.start()
    until(node, lambda: bool(node.unanswered))
    thread, results = put(client, old=b"o", new=b"n")
    master.decide(grants(GRANTED))
    node.settled()
    assert results == [], "what it would call there already can still be lost"
    node.call(lambda: node.unanswered.pop()(None))
    thread.join(TIMEOUT_S)
    reserved.join(TIMEOUT_S)
    assert results == [[ALREADY_STORED, STORED]]
    writer.close()


@pytest.mark.promise("put-ack-cluster")
def test_a_present_block_that_is_not_durable_is_retried(node: Served, client: Client, master: Master) -> None:
    """It was put a moment ago and may be lost with the node before a master has it."""
    node.acknowledges = False
    writer = node.connect()
    reserved = threading.Thread(target=lambda: writer.put({"old": b"o"}, generation=1))
    reserved.start()
    until(node, lambda: bool(node.unanswered))
    for durable, flag in ((False, RETRY_LATER), (True, ALREADY_STORED)):
        if durable:
            node.call(lambda: node.unanswered.pop()(None))
        thread, results = put(client, old=b"o", new=b"n")
        master.decide(Unavailable("the master is gone"))
        thread.join(TIMEOUT_S)
        assert results == [[flag, RETRY_LATER]]
    reserved.join(TIMEOUT_S)
    writer.close()


def published(node: Served, monkeypatch: pytest.MonkeyPatch) -> list[Publish]:
    """The node's later messages to its master, which no longer answers."""
    said: list[Publish] = []
    monkeypatch.setattr(node, "_publish", lambda message, _answered: said.append(message))
    node.call(lambda: node.replicator.link_up(node._publish, 1, lambda: None))
    return said


@pytest.mark.promise("put-conflicts")
def test_a_commit_follows_the_eviction_of_the_former_block(
    node: Served, client: Client, master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even beyond the window. Otherwise the master answers PRESENT because of the former block and then receives its
    eviction."""
    said = published(node, monkeypatch)
    for name in (b"a", b"b", b"c"):
        node.call(lambda name=name: node.replicator.emit(EVENT_REMOVED, made("red", name, 1, 7)))  # type: ignore[misc]
        node.call(node.replicator.flush_now)
    assert sum(message.keys == [b"c"] for message in said) == 0, "the window is full"
    other, _ = put(client, z=b"z")
    claimed = master.decide(grants(GRANTED)).keys
    other.join(TIMEOUT_S)
    assert (claimed, sum(message.keys == [b"c"] for message in said)) == ([b"z"], 0), "that concerns it not"
    thread, results = put(client, c=b"c")
    until(node, lambda: bool(master.asked))
    assert said[-1].keys == [b"c"]
    master.decide(grants(GRANTED))
    thread.join(TIMEOUT_S)
    assert results == [[STORED]]


@pytest.mark.promise("put-conflicts")
def test_a_commit_during_the_inventory_follows_the_eviction(
    node: Served, client: Client, master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the inventory does not contain the former block."""
    assert client.put({f"{number}": b"v" for number in range(400)}) == [STORED] * 400
    said = published(node, monkeypatch)
    gone = node.call(lambda: node.store.table.find("red", b"0"))
    assert gone is not None
    node.call(lambda: node.store.table.copies.drop(gone))
    thread, results = put(client, **{"0": b"w"})
    master.decide(grants(GRANTED))
    thread.join(TIMEOUT_S)
    assert results == [[STORED]]
    assert [message.phase for message in said] == [PHASE_SYNC_BEGIN, *[PHASE_SYNC] * 3, PHASE_STREAM]
    assert list(said[-1].keys) == [b"0"]


@pytest.mark.promise("put-ack-cluster")
def test_a_put_without_a_master_link_is_retried(node: Served, client: Client, master: Master) -> None:
    node.call(node.commit_requests.link_down)
    assert client.put({"a": b"a"}, generation=0) == [RETRY_LATER]
    assert node.call(lambda: node.store.dram.used_bytes) == 0


@pytest.mark.promise("put-ack-cluster")
@pytest.mark.parametrize("reply", [Unavailable("the connection broke"), StaleEpoch("another master owns the catalog")])
def test_a_put_of_a_lost_master_is_retried(node: Served, client: Client, master: Master, reply: KVStoreError) -> None:
    thread, results = put(client, a=b"a", b=b"b")
    master.decide(reply)
    thread.join(TIMEOUT_S)
    assert results == [[RETRY_LATER, RETRY_LATER]]
    assert node.call(lambda: (node.store.names(), node.store.table.open_puts, node.store.dram.used_bytes)) == ("", 0, 0)


@pytest.mark.parametrize("reply", [CatalogUnavailable("etcd is away"), grants(GRANTED)])
def test_a_failed_or_malformed_reply_leaves_nothing(
    node: Served, client: Client, master: Master, reply: ReserveReply | KVStoreError
) -> None:
    thread, results = put(client, a=b"a", b=b"b")
    master.decide(reply)
    thread.join(TIMEOUT_S)
    assert type(results[0]) is (ProtocolError if isinstance(reply, ReserveReply) else CatalogUnavailable)
    assert node.call(lambda: (node.store.names(), node.store.table.open_puts, node.store.dram.used_bytes)) == ("", 0, 0)


def test_a_put_that_expires_before_its_grant_is_retracted(node: Served, client: Client, master: Master) -> None:
    thread, results = put(client, a=b"a")
    until(node, lambda: bool(master.asked))
    later_ns = node.reactor.now_ns() + PUT_TTL_NS
    emitted: list[tuple[int, int]] = []
    node.store.emit = lambda kind, block: emitted.append((kind, block.generation))
    node.call(lambda: node.store.table.expire(now_ns=later_ns))
    master.decide(grants(GRANTED))
    thread.join(TIMEOUT_S)
    assert results == [[RETRY_LATER]]
    assert emitted == [(EVENT_REMOVED, 42)]
    assert node.call(lambda: (node.store.names(), node.store.dram.quarantined_bytes)) == ("", 0)


@pytest.mark.promise("failures-typed")
def test_an_internal_error_in_the_reply_leaves_nothing_open(
    node: Served, client: Client, master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    thread, results = put(client, a=b"a", b=b"b")
    monkeypatch.setattr(node.store.table, "commit_granted", fail)
    master.decide(grants(GRANTED, GRANTED))
    thread.join(TIMEOUT_S)
    assert [str(result) for result in results] == ["internal error: RuntimeError: a bug"]
    assert node.call(lambda: (node.store.names(), node.store.table.open_puts, len(node.commit_waits))) == ("", 0, 0)


def test_a_disconnect_before_the_reply_leaves_nothing(node: Served, master: Master) -> None:
    client = node.connect()
    thread, _results = put(client, a=b"a")
    until(node, lambda: bool(master.asked))
    for session in node.call(lambda: list(node.server.sessions)):
        node.call(session.close)
    thread.join(TIMEOUT_S)
    master.decide(grants(GRANTED))
    assert node.call(lambda: (node.store.names(), node.store.dram.used_bytes, len(node.commit_waits))) == ("", 0, 0)
    client.close()


@pytest.mark.promise("failures-typed")
@pytest.mark.parametrize("is_expired", [False, True])
def test_a_pending_put_cannot_be_ended_by_its_id(node: Served, master: Master, is_expired: bool) -> None:
    """Ids can be guessed. A block made visible without a generation would be retracted by the reply although it is
    visible."""
    sock = node.connect().channel.detach()
    sock.settimeout(TIMEOUT_S)
    sock.sendall(frame(Put("ns", [b"a"], [1], [0], [digest(b"x")], [b""]), 1, b"x"))
    until(node, lambda: bool(master.asked))
    put = node.call(lambda: node.store.table.puts.of_key("red", b"a"))
    assert put is not None
    if is_expired:
        node.call(lambda: node.store.table.expire(now_ns=node.reactor.now_ns() + PUT_TTL_NS))
    sock.sendall(frame(CommitPuts([put.put_id], [digest(b"x")]), 2) + frame(AbortPuts([put.put_id]), 3))
    assert [read_frame(sock)[1] for _ in range(2)] == [Flags(bytes([RETRY_LATER])), Ok()]
    assert node.call(lambda: (node.store.names(), node.store.table.open_puts)) == ("", not is_expired)
    master.decide(grants(GRANTED))
    assert read_frame(sock)[1] == Flags(bytes([RETRY_LATER if is_expired else STORED]))
    node.call(lambda: check(node.store.table))
    assert node.call(lambda: (node.store.names(), node.store.dram.used_bytes)) == (("", 0) if is_expired else ("a", 1))
    sock.close()


def test_each_masters_reply_is_applied_at_once(node: Served, client: Client) -> None:
    """The master may remove the blocks from then on; blocks removed before the end are not recorded as stored."""
    asked: dict[int, tuple[CommitBlocks, Answer]] = {}
    asker = object()

    def link_up() -> int:
        node.partition_map.set_count(2)
        node.replicators.add_partitions()
        for partition in (0, 1):
            node.commit_requests.link_up(partial(ask, partition), 7, partition)
        return node.store.table.events.answer(asker, "red", FetchEvents(0, 100)).next_cursor

    def ask(partition: int, claim: CommitBlocks, answer: Answer) -> None:
        asked[partition] = claim, answer

    def decide(partition: int) -> list[bytes]:
        claim, answer = asked[partition]
        node.call(lambda: answer(grants(*[GRANTED] * len(claim.keys))))
        return claim.keys

    def blocks(keys: list[bytes]) -> list[Block]:
        return node.call(lambda: [block for key in keys if (block := node.store.table.find("red", key)) is not None])

    cursor = node.call(link_up)
    names = [f"key-{number}" for number in range(6)]
    thread, results = put(client, **dict.fromkeys(names, b"v"))
    until(node, lambda: len(asked) == 2)
    first = decide(1)
    assert [(block.key, block.generation) for block in blocks(first)] == [(key, 42) for key in first]
    assert results == []
    removed = first[0]
    for block in blocks([removed]):
        node.call(partial(node.store.table.copies.drop, block))
    decide(0)
    thread.join(TIMEOUT_S)
    assert results == [[STORED] * len(names)]
    told = node.call(lambda: node.store.table.events.answer(asker, "red", FetchEvents(cursor, 100)))
    assert told.keys == [removed, *(name.encode() for name in names if name.encode() != removed)]
    assert blocks([removed]) == []
