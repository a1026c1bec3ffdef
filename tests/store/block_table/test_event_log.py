"""Tests of event_log.py: the events that a recorder of one tenant receives, alone and over a node's sockets."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.protocol.catalog_messages import DeleteBlocks
from kvstore.protocol.errors import Denied, InvalidArgument
from kvstore.protocol.event_messages import READ, REMOVED, STORED, EventBatch, FetchEvents
from kvstore.protocol.node_messages import MAPPED
from kvstore.protocol.session_messages import ROLE_NODE, Hello
from kvstore.rpc.address import parse_address
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.store.block_table import event_log as events
from kvstore.store.block_table.block import Block
from kvstore.store.block_table.event_log import BlockEventLog
from tests.store.made import made
from tests.store.served import TIMEOUT_S, Client, Master, Served, served, until

KIB = 1024
KINDS = {STORED: "stored", READ: "read", REMOVED: "removed"}
Told = list[tuple[str, str]]


class Clock:
    now_us = 0

    def __call__(self) -> int:
        return self.now_us


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(clock: Clock) -> BlockEventLog:
    return BlockEventLog(clock)


def block(name: str, *, tenant: str = "red", parent: str = "") -> Block:
    return made(tenant, name.encode(), 100 + len(name), 1, "ns", parent.encode())


def blocks(names: str, *, tenant: str = "red") -> list[Block]:
    return [block(name, tenant=tenant) for name in names]


def told(batch: EventBatch) -> Told:
    """(kind, names of the blocks) of each event."""
    keys = iter(batch.keys)
    return [
        (KINDS[kind], "".join(next(keys).decode() for _ in range(count))) for kind, count in zip(batch.kinds, batch.blocks, strict=True)
    ]


def ask(log: BlockEventLog, cursor: int, *, tenant: str = "red", asker: object = "recorder", max_events: int = 1000) -> EventBatch:
    return log.answer(asker, tenant, FetchEvents(cursor, max_events))


# --- the log alone ---


def test_event_log_returns_events_since_the_first_poll_in_order(log: BlockEventLog, clock: Clock) -> None:
    log.stored("red", blocks("x"))
    first = ask(log, 0)
    clock.now_us = 5
    log.stored("red", [block("a"), block("bb", parent="a")])
    clock.now_us = 7
    log.read("red", blocks("a"), is_far=False)
    log.removed(block("bb", parent="a"))
    batch = ask(log, first.next_cursor)
    assert told(first) == []
    assert told(batch) == [("stored", "abb"), ("read", "a"), ("removed", "bb")]
    assert (list(batch.times_us), list(batch.sizes), batch.parents) == ([5, 7, 7], [101, 102, 101, 102], [b"", b"a", b"", b"a"])
    assert (batch.lost, told(ask(log, batch.next_cursor))) == (0, [])


def test_event_log_keeps_only_recorded_tenants(log: BlockEventLog) -> None:
    assert not log.is_recording
    cursor = ask(log, 0).next_cursor
    assert log.is_recording
    log.stored("blue", blocks("a", tenant="blue"))
    log.removed(block("b", tenant="blue"))
    log.read("red", [], is_far=False)
    assert told(ask(log, cursor)) == []
    log.forget_asker("recorder")
    assert not log.is_recording


def test_event_log_counts_reads_while_hot_blocks_are_polled(log: BlockEventLog) -> None:
    (read,) = blocks("a")
    log.read("red", [read], is_far=False)
    assert log.hottest(5, 0) == []
    assert log.is_recording
    log.read("red", [read, read], is_far=False)
    log.stored("red", [read])
    assert log.hottest(5, 1_000_000_000) == [(read, 2.0, 0.0)]
    ask(log, 0)
    log.hottest(0, 100_000_000_000)
    assert log.is_recording, "somebody records yet"
    log.forget_asker("recorder")
    assert not log.is_recording


def test_a_slow_recorder_receives_the_number_of_lost_events(log: BlockEventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "RING_EVENTS", 5)
    cursor = ask(log, 0).next_cursor
    for names in ("ab", "cd", "ef", "g"):
        log.stored("red", blocks(names))
    batch = ask(log, cursor)
    assert (batch.lost, told(batch)) == (2, [("stored", "cd"), ("stored", "ef"), ("stored", "g")])
    assert ask(log, batch.next_cursor).lost == 0


@pytest.mark.parametrize(("asker", "cursor", "tenant"), [("other", 1, "red"), ("recorder", 99, "red"), ("recorder", 1, "blue")])
def test_event_log_refuses_a_foreign_cursor(log: BlockEventLog, asker: str, cursor: int, tenant: str) -> None:
    ask(log, 0)
    with pytest.raises(InvalidArgument, match=f"cursor {cursor} is not of this connection"):
        ask(log, cursor, asker=asker, tenant=tenant)


# --- through a node ---


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path, dram_bytes=16 * KIB, nvme_bytes=1 << 20) as node:
        yield node


class Recorder:
    """One connection that records."""

    def __init__(self, node: Served, *, tenant: str = "red") -> None:
        self.client = node.connect(tenant=tenant)
        self.cursor = 0
        assert self.told() == []

    def told(self) -> Told:
        batch = self.client.ask(FetchEvents(self.cursor), EventBatch)
        assert batch.lost == 0
        self.cursor = batch.next_cursor
        return told(batch)


@pytest.fixture
def recorder(node: Served) -> Iterator[Recorder]:
    recorder = Recorder(node)
    yield recorder
    recorder.client.close()


def test_event_log_records_puts_reads_and_deletions(node: Served, client: Client, recorder: Recorder) -> None:
    client.put({"a": b"1" * KIB, "b": b"2" * KIB})
    opened = client.open({"a": KIB, "c": KIB})
    client.write(opened, 1, b"3" * KIB)
    client.commit(opened, [b"", b"3" * KIB])
    client.read("c", "x", "a")
    with node.link() as sock:
        Master(sock).ask(DeleteBlocks(0, "red", [b"b"], [9]))
    assert recorder.told() == [("stored", "ab"), ("stored", "c"), ("read", "ca"), ("removed", "b")]


def test_event_log_skips_other_tenants_and_node_reads(node: Served, client: Client, recorder: Recorder) -> None:
    other = node.connect(tenant="blue")
    other.put({"z": b"1"})
    client.put({"a": b"1"})
    peer = Client(Channel.open(parse_address(f"unix:{node.unix}"), Hello(ROLE_NODE, "red", "", "n", 0), Deadline(TIMEOUT_S)))
    assert peer.read("a", inline_bytes=KIB)[1] == [b"1"]
    assert list(peer.ask_blocks("a").statuses) == [MAPPED], "a place alone: nodes get no slabs"
    with pytest.raises(Denied):
        peer.ask(FetchEvents(0), EventBatch)
    assert recorder.told() == [("stored", "a")]
    for one in (peer, other):
        one.close()


def test_recording_ends_with_its_connection(node: Served, client: Client) -> None:
    recorder = Recorder(node)
    assert node.call(lambda: node.store.table.events.is_recording)
    recorder.client.close()
    until(node, lambda: not node.store.table.events.is_recording)
    client.put({"a": b"1"})
    assert client.read("a")[1] == [b"1"]


def test_reads_count_by_host_without_a_recorder() -> None:
    log = BlockEventLog(Clock())
    blocks = [made("red", b"%d" % number, 100, 1) for number in range(3)]
    log.read("red", blocks, is_far=False)
    log.read("red", blocks[:2], is_far=True)
    log.missed("red", 4)
    assert (log.local_reads, log.remote_reads) == (3 + 4, 2)
