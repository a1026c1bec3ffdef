"""Tests of in-place and socket puts over real sockets and shared memory: the stored bytes are those sent, visible once
the master has them."""

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.protocol.errors import (
    ChecksumMismatch,
    InvalidArgument,
    ProtocolError,
    Unauthorized,
)
from kvstore.protocol.event_messages import FetchEvents
from kvstore.protocol.message import BUSY, GRANTED, PRESENT
from kvstore.protocol.node_messages import ALREADY_STORED, RETRY_LATER, STORED, AbortPuts, CommitPuts, OpenSlots, OpenSlotsReply, Put
from kvstore.protocol.session_messages import Failure, Flags, Ok
from kvstore.store.block_table.block import NVME
from kvstore.tiers.tier import Record
from tests.rpc.wires import frame, read_frame
from tests.store.served import TIMEOUT_S, Client, Served, digest, in_background, served, until
from tests.store.tables import PUT_TTL_NS

KIB = 1024


# --- through shared memory ---


def test_shared_memory_puts_can_be_read(node: Served, client: Client) -> None:
    values = [b"a" * 3000, b"b" * 100, b"c"]
    opened = client.open({"a": 3000, "b": 100, "c": 1})
    assert list(opened.statuses) == [GRANTED] * 3
    assert len(set(opened.put_ids)) == 3
    assert client.read("a")[1] == [None], "not before the commit"
    for index, value in enumerate(values):
        client.write(opened, index, value)
    assert client.commit(opened, values) == [STORED] * 3
    assert client.read("a", "b", "c")[1] == values
    assert node.call(lambda: node.in_place_puts.in_bytes) == 3101


def test_a_batch_that_needs_no_master_is_committed_as_a_whole(node: Served, client: Client) -> None:
    asker = object()
    cursor = node.call(lambda: node.store.table.events.answer(asker, "red", FetchEvents(0, 100))).next_cursor
    values = {f"key{number}": bytes([number]) * 100 for number in range(30)}
    opened = client.open(dict.fromkeys(values, 100), generation=0)
    assert list(opened.statuses) == [GRANTED] * 30
    assert len(set(zip(opened.slabs, opened.offsets, strict=True))) == len(set(opened.put_ids)) == 30
    for index, value in enumerate(values.values()):
        client.write(opened, index, value)
    assert client.read("key7")[1] == [None], "not before the commit"
    assert client.commit(opened, list(values.values())) == [STORED] * 30
    assert client.read(*values)[1] == list(values.values())
    assert node.call(lambda: node.in_place_puts.in_bytes) == 3000
    recorded = node.call(lambda: node.store.table.events.answer(asker, "red", FetchEvents(cursor, 100)))
    assert recorded.keys[:30] == [name.encode() for name in values]
    assert client.commit(opened, list(values.values())) == [RETRY_LATER] * 30
    assert set(client.open(dict.fromkeys(values, 100), generation=0).statuses) == {PRESENT}


def test_a_present_key_and_one_being_written_are_not_granted(node: Served, client: Client) -> None:
    client.put({"there": b"x"})
    other = node.connect()
    other.open({"busy": 10})
    opened = client.open({"there": 1, "busy": 10, "new": 10})
    assert list(opened.statuses) == [PRESENT, BUSY, GRANTED]
    assert [bool(put_id) for put_id in opened.put_ids] == [False, False, True]
    other.close()


def test_open_needs_shared_memory(node: Served) -> None:
    client = node.connect(tcp=True)
    with pytest.raises(InvalidArgument, match="shared memory"):
        client.open({"a": 1})
    client.close()


@pytest.mark.promise("failures-typed")
def test_an_aborted_put_can_be_opened_again(node: Served, client: Client) -> None:
    opened = client.open({"a": 16 * KIB})
    other = node.connect()
    other.ask(AbortPuts(list(opened.put_ids)), Ok)
    assert list(client.open({"a": 16 * KIB}).statuses) == [BUSY], "another connection cannot abort it"
    client.ask(AbortPuts([*opened.put_ids, 99]), Ok)
    assert list(client.open({"a": 16 * KIB}).statuses) == [GRANTED]
    other.close()


def test_a_commit_of_an_invalid_put_is_answered_ask_again(node: Served, client: Client) -> None:
    opened = client.open({"a": 1})
    other = node.connect()
    assert other.commit(opened, [b"x"]) == [RETRY_LATER]
    client.write(opened, 0, b"x")
    assert client.commit(opened, [b"x"]) == [STORED]
    assert client.commit(opened, [b"x"]) == [RETRY_LATER]
    other.close()


def test_an_expired_puts_slot_is_freed_after_its_writer_settles(node: Served, client: Client) -> None:
    opened = client.open({"a": 16 * KIB})
    later_ns = node.reactor.now_ns() + PUT_TTL_NS
    assert node.call(lambda: node.store.table.expire(now_ns=later_ns)) == 1
    assert node.call(lambda: node.store.dram.quarantined_bytes) == 16 * KIB
    assert client.commit(opened, [b"x" * 16 * KIB]) == [RETRY_LATER]
    assert node.call(lambda: node.store.dram.free_bytes) == 16 * KIB
    opened = client.open({"a": 16 * KIB})
    node.call(lambda: node.store.table.expire(now_ns=later_ns + node.reactor.now_ns()))
    client.ask(AbortPuts(list(opened.put_ids)), Ok)
    assert node.call(lambda: node.store.dram.free_bytes) == 16 * KIB


def test_a_disconnected_writer_leaves_no_open_put(node: Served, client: Client) -> None:
    other = node.connect()
    other.open({"a": 16 * KIB})
    thread, results = in_background(lambda: client.open({"b": 16 * KIB}))
    until(node, lambda: len(node.waiting) == 1)
    other.close()
    thread.join(TIMEOUT_S)
    assert list(results[0].statuses) == [GRANTED]


# --- through the socket ---


@pytest.mark.parametrize("tcp", [False, True])
def test_socket_puts_can_be_read(node: Served, tcp: bool) -> None:
    client = node.connect(tcp=tcp)
    values = {"a": b"a" * 5000, "b": b"b", "c": b"c" * 77}
    assert client.put(values) == [STORED] * 3
    assert client.read(*values, inline_bytes=1 << 20)[1] == list(values.values())
    client.close()


@pytest.mark.promise("get-exact-bytes")
def test_a_damaged_value_fails_its_whole_request(node: Served, client: Client) -> None:
    with pytest.raises(ChecksumMismatch, match="send it again"):
        client.put({"a": b"good", "b": b"bad"}, checksums=[digest(b"good"), digest(b"bat")])
    assert client.read("a", "b")[1] == [None, None]
    assert node.call(lambda: node.store.table.open_puts) == 0
    assert client.put({"a": b"good", "b": b"bad"}) == [STORED, STORED]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_put_that_expires_while_arriving_is_not_stored(node: Served, is_damaged: bool) -> None:
    sock = node.connect().channel.detach()
    sock.settimeout(TIMEOUT_S)
    checksums = [digest(b"abc"), digest(b"def") ^ is_damaged]
    whole = frame(Put("ns", [b"a", b"b"], [3, 3], [1, 1], checksums, [b"", b""]), payload=b"abcdef")
    sock.sendall(whole[:-1])
    until(node, lambda: node.store.table.open_puts == 2)
    later_ns = node.reactor.now_ns() + PUT_TTL_NS
    node.call(lambda: node.store.table.expire(now_ns=later_ns))
    sock.sendall(whole[-1:])
    answer = read_frame(sock)[1]
    if is_damaged:
        assert isinstance(answer, Failure)
        assert answer.code == ChecksumMismatch.code
    else:
        assert answer == Flags(bytes((RETRY_LATER, RETRY_LATER)))
    assert node.call(lambda: node.store.dram.quarantined_bytes) == 0
    sock.close()


def test_a_stalled_expired_put_frees_its_slots_at_once(node: Served, client: Client) -> None:
    """Its writer may stall within a value; bytes that arrive later do not reach the slot's next block."""
    sock = node.connect().channel.detach()
    sock.settimeout(TIMEOUT_S)
    kept, late, others = b"k" * 4 * KIB, b"l" * 4 * KIB, {name: name.encode() * 4 * KIB for name in "bcd"}
    client.put({"kept": kept})
    message = Put("ns", [b"a", b"kept"], [len(late), len(kept)], [1, 1], [digest(late), digest(kept)], [b"", b""])
    whole = frame(message, payload=late + kept)
    sock.sendall(whole[: -5 * KIB])
    until(node, lambda: node.store.table.open_puts == 1)
    node.call(node.socket_puts.expire)
    assert node.call(lambda: node.store.table.open_puts) == 1, "its time is not over"
    node.call(lambda: node.store.table.expire(now_ns=node.reactor.now_ns() + PUT_TTL_NS))
    assert node.call(lambda: node.store.dram.quarantined_bytes) > 0
    node.call(node.socket_puts.expire)
    assert node.call(lambda: node.store.dram.quarantined_bytes) == 0
    assert client.put(others) == [STORED] * 3
    sock.sendall(whole[-5 * KIB :])
    assert read_frame(sock)[1] == Flags(bytes((RETRY_LATER, ALREADY_STORED)))
    assert client.read(*others)[1] == list(others.values())
    assert node.call(lambda: node.store.table.find("red", b"a")) is None
    sock.close()


def test_a_connection_lost_within_a_value_leaves_nothing(node: Served) -> None:
    client = node.connect()
    sock = client.channel.detach()
    sock.sendall(frame(Put("ns", [b"a"], [100], [1], [0], [b""]), payload=bytes(100))[:-1])
    until(node, lambda: node.store.table.open_puts == 1)
    sock.close()
    until(node, lambda: node.store.table.open_puts == 0)
    assert node.call(lambda: node.store.dram.used_bytes) == 0


@pytest.mark.parametrize(
    ("message", "payload"),
    [
        (Put("ns", [b"a"], [5], [1], [0], [b""]), b"abc"),
        (Put("ns", [], [], [], [], []), b"abc"),
        (Put("ns", [b"a"], [5], [1], [0], [b""]), b""),
        (Put("ns", [], [], [], [], []), b""),
    ],
)
def test_mismatched_sizes_fail_the_request_only(client: Client, message: Put, payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        client.ask(message, Flags, payload=[payload] if payload else [])
    assert client.put({"a": b"abc"}) == [STORED]


def test_a_namespace_too_long_for_the_master_is_refused(client: Client) -> None:
    for namespace in ("n" * 256, "é" * 128):
        with pytest.raises(InvalidArgument, match="namespace"):
            client.ask(OpenSlots(namespace, [b"a"], [1], [1], [b""]), OpenSlotsReply)
    assert list(client.ask(OpenSlots("é" * 127, [b"a"], [1], [1], [b""]), OpenSlotsReply).statuses) == [GRANTED]


def test_puts_before_hello_are_refused(node: Served) -> None:
    client = node.connect()

    def forget_hello() -> None:
        for session in node.server.sessions:
            session.context = None

    node.call(forget_hello)
    for message, payload in (
        (OpenSlots("ns", [b"a"], [1], [1], [b""]), b""),
        (CommitPuts([1], [1]), b""),
        (AbortPuts([1]), b""),
        (Put("ns", [b"a"], [1], [1], [0], [b""]), b"x"),
    ):
        with pytest.raises(Unauthorized, match="a tenant's token with role write"):
            client.ask(message, Flags, payload=[payload] if payload else [])
    client.close()


# --- with NVMe below ---


@pytest.mark.promise("put-bounded-wait")
@pytest.mark.parametrize("demotion_wait_s", [0, 0.05])
def test_a_put_waits_for_a_hanging_disk_up_to_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demotion_wait_s: float) -> None:
    """Then the coldest block that is not being demoted is evicted."""
    let_go = threading.Event()
    with served(tmp_path, dram_bytes=4 * KIB, nvme_bytes=1 << 20, demotion_wait_s=demotion_wait_s) as node:
        write = node.store.tiers[NVME].write_batch

        def hang(records: Sequence[Record]) -> None:
            let_go.wait(TIMEOUT_S)
            write(records)

        monkeypatch.setattr(node.store.tiers[NVME], "write_batch", hang)
        client = node.connect()
        assert client.put({"a": b"a" * KIB, "b": b"b" * KIB, "c": b"c" * KIB, "d": b"d" * KIB}) == [STORED] * 4
        try:
            assert client.put({"e": b"e" * KIB}) == [STORED]
            assert client.put({"f": b"f" * KIB}) == [STORED]
            kept = [name for name in "abcdef" if client.read(name)[1] != [None]]
        finally:
            let_go.set()
        assert kept[-2:] == ["e", "f"]
        assert len(kept) == 4
        client.close()
