"""Promises of events.py: what a recorder is told of a tenant's blocks, alone and through a node's real sockets."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.catalog_messages import Drop
from kvstore.protocol.errors import Denied, InvalidArgument, Unavailable
from kvstore.protocol.event_messages import READ, REMOVED, STORED, EventBatch, Events
from kvstore.protocol.master_messages import Grants
from kvstore.protocol.message import GRANTED, PRESENT
from kvstore.protocol.node_messages import MAPPED
from kvstore.protocol.session_messages import ROLE_NODE, Hello
from kvstore.rpc.address import parse_address
from kvstore.rpc.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.store.blocks import events
from kvstore.store.blocks.block import Block
from kvstore.store.blocks.events import MAX_TENANTS, EventLog
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
def log(clock: Clock) -> EventLog:
    return EventLog(clock)


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


def ask(log: EventLog, cursor: int, *, tenant: str = "red", asker: object = "recorder", max_events: int = 1000) -> EventBatch:
    return log.answer(asker, tenant, Events(cursor, max_events))


# --- the log alone ---


def test_what_happens_after_the_first_question_is_told_in_order_with_times_and_parents(log: EventLog, clock: Clock) -> None:
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


def test_nothing_is_kept_while_nobody_records_and_nothing_of_other_tenants(log: EventLog) -> None:
    assert not log.is_recording
    cursor = ask(log, 0).next_cursor
    assert log.is_recording
    log.stored("blue", blocks("a", tenant="blue"))
    log.removed(block("b", tenant="blue"))
    log.read("red", [], is_far=False)
    assert told(ask(log, cursor)) == []
    log.forget_asker("recorder")
    assert not log.is_recording


def test_reads_are_counted_while_somebody_asks_for_the_hottest_whether_anybody_records_or_not(log: EventLog) -> None:
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


def test_what_nothing_is_known_of_is_lost_wherever_it_comes(log: EventLog) -> None:
    cursor = ask(log, 0).next_cursor
    log.missed("red", 2)
    log.read("red", blocks("ab"), is_far=False)
    log.missed("red", 3)
    log.read("red", blocks("c"), is_far=False)
    log.missed("red", 4)
    log.missed("blue", 100)
    heard = []
    for _ in range(3):
        batch = ask(log, cursor)
        heard.append((batch.lost, told(batch)))
        cursor = batch.next_cursor
    assert heard == [(5, [("read", "ab"), ("read", "c")]), (4, []), (0, [])]


def test_a_recorder_that_falls_behind_is_told_how_many_it_lost(log: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "RING_EVENTS", 5)
    cursor = ask(log, 0).next_cursor
    for names in ("ab", "cd", "ef", "g"):
        log.stored("red", blocks(names))
    batch = ask(log, cursor)
    assert (batch.lost, told(batch)) == (2, [("stored", "cd"), ("stored", "ef"), ("stored", "g")])
    assert ask(log, batch.next_cursor).lost == 0


def test_an_answer_has_whole_events_up_to_the_number_asked_for_and_at_least_one(log: EventLog) -> None:
    cursor = ask(log, 0).next_cursor
    for names in ("abc", "d", "e", "fg"):
        log.stored("red", blocks(names))
    seen = []
    while told(batch := ask(log, cursor, max_events=2)):
        cursor = batch.next_cursor
        seen.append("|".join(names for _, names in told(batch)))
    assert seen == ["abc", "d|e", "fg"]


def test_one_recorder_of_a_tenant_takes_nothing_from_another(log: EventLog) -> None:
    one = ask(log, 0, asker="one").next_cursor
    log.stored("red", blocks("a"))
    two = ask(log, 0, asker="two").next_cursor
    log.stored("red", blocks("b"))
    log.forget_asker("three")
    assert told(ask(log, one, asker="one")) == [("stored", "a"), ("stored", "b")]
    log.forget_asker("one")
    assert told(ask(log, two, asker="two")) == [("stored", "b")]


@pytest.mark.parametrize(("asker", "cursor", "tenant"), [("other", 1, "red"), ("recorder", 99, "red"), ("recorder", 1, "blue")])
def test_a_cursor_that_this_connection_was_not_given_is_refused(log: EventLog, asker: str, cursor: int, tenant: str) -> None:
    ask(log, 0)
    with pytest.raises(InvalidArgument, match=f"cursor {cursor} is none of this connection's"):
        ask(log, cursor, asker=asker, tenant=tenant)


def test_only_so_many_tenants_are_recorded_at_once(log: EventLog) -> None:
    for number in range(MAX_TENANTS):
        ask(log, 0, tenant=str(number), asker=number)
    with pytest.raises(Unavailable, match=f"records for {MAX_TENANTS} tenants already"):
        ask(log, 0)
    log.forget_asker(3)
    ask(log, 0)


@given(st.lists(st.integers(1, 6)), st.integers(1, 12), st.integers(1, 8), st.data())
def test_what_is_told_and_what_is_lost_is_all_there_was(sizes: list[int], ring: int, max_events: int, data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(events, "RING_EVENTS", max(ring, max(sizes, default=1)))
        log, heard, lost, number = EventLog(lambda: 0), [], 0, 0
        cursor = ask(log, 0).next_cursor
        for size in [*sizes, 0]:
            log.stored("red", [block(str(number + index)) for index in range(size)])
            number += size
            if not size or data.draw(st.booleans()):
                batch = ask(log, cursor, max_events=max_events if size else 10_000)
                cursor, lost = batch.next_cursor, lost + batch.lost
                heard += [int(key) for key in batch.keys]
    assert heard == sorted(set(heard))
    assert len(heard) + lost == number
    assert heard[-1:] == ([number - 1] if number else [])


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
        batch = self.client.ask(Events(self.cursor), EventBatch)
        assert batch.lost == 0
        self.cursor = batch.next_cursor
        return told(batch)


@pytest.fixture
def recorder(node: Served) -> Iterator[Recorder]:
    recorder = Recorder(node)
    yield recorder
    recorder.client.close()


def test_puts_on_both_ways_reads_and_deletions_are_told(node: Served, client: Client, recorder: Recorder) -> None:
    client.put({"a": b"1" * KIB, "b": b"2" * KIB})
    opened = client.open({"a": KIB, "c": KIB})
    client.write(opened, 1, b"3" * KIB)
    client.commit(opened, [b"", b"3" * KIB])
    client.read("c", "x", "a")
    with node.link() as sock:
        Master(sock).ask(Drop(0, "red", [b"b"], [9]))
    assert recorder.told() == [("stored", "ab"), ("stored", "c"), ("read", "ca"), ("removed", "b")]


def test_a_put_that_stores_nothing_and_a_read_that_finds_nothing_are_no_events(client: Client, recorder: Recorder) -> None:
    client.put({"a": b"1" * KIB})
    assert recorder.told() == [("stored", "a")]
    client.put({"a": b"1" * KIB})
    client.read("b")
    client.read("a", generations=[77])
    client.commit(client.open({"a": KIB}), [b""])
    assert recorder.told() == []


def test_blocks_of_a_lower_tier_are_read_in_the_order_of_their_keys(node: Served, client: Client, recorder: Recorder) -> None:
    client.put({"a": b"1" * KIB, "b": b"2" * KIB, "c": b"3" * KIB})
    node.demote("a", "c")
    client.read("a", "b", "c")
    assert recorder.told() == [("stored", "abc"), ("read", "abc")]


def test_what_the_master_grants_of_a_claim_is_stored(node: Served, client: Client, recorder: Recorder) -> None:
    node.call(lambda: node.claims.link_up(lambda message, decided: decided(Grants(bytes([GRANTED, PRESENT]), [5, 0], [8, 0])), 1))
    assert client.put({"a": b"1", "b": b"2"}, generation=0) == [1, 0]
    assert recorder.told() == [("stored", "a")]


def test_other_tenants_and_what_nodes_read_of_one_another_are_not_told(node: Served, client: Client, recorder: Recorder) -> None:
    other = node.connect(tenant="blue")
    other.put({"z": b"1"})
    client.put({"a": b"1"})
    peer = Client(Channel.open(parse_address(f"unix:{node.unix}"), Hello(ROLE_NODE, "red", "", "n", 0), Deadline(TIMEOUT_S)))
    assert peer.read("a", inline_bytes=KIB)[1] == [b"1"]
    assert list(peer.ask_blocks("a").statuses) == [MAPPED], "a place alone: nodes get no slabs"
    with pytest.raises(Denied):
        peer.ask(Events(0), EventBatch)
    assert recorder.told() == [("stored", "a")]
    for one in (peer, other):
        one.close()


def test_recording_ends_with_the_connection_that_asked(node: Served, client: Client) -> None:
    recorder = Recorder(node)
    assert node.call(lambda: node.store.table.events.is_recording)
    recorder.client.close()
    until(node, lambda: not node.store.table.events.is_recording)
    client.put({"a": b"1"})
    assert client.read("a")[1] == [b"1"]
