"""Tests of slots_ahead.py over real sockets: a value written into an offered slot is stored by one message."""

import os
import select
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.client.local.fast_puts import OfferedSlot
from kvstore.protocol.catalog_messages import DRAIN_CLOSED
from kvstore.protocol.errors import Broken, Draining, InvalidArgument, TierFailed
from kvstore.protocol.event_messages import STORED as TOLD_STORED
from kvstore.protocol.event_messages import EventBatch, FetchEvents
from kvstore.protocol.node_messages import RETRY_LATER, STORED, OpenIndex, OpenSlotAhead, PutFromSlot
from kvstore.protocol.session_messages import Flags
from kvstore.protocol.writer_page import PAGE_BYTES
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.server.session import Session
from kvstore.security.quotas.quota import Quota, Quotas
from kvstore.store.block_table.free_slots import IDLE_NS
from kvstore.store.writes.slots_ahead import WriterPage, make_page
from tests.store.integrity import check
from tests.store.served import TIMEOUT_S, Client, Served, digest, in_background, served, until

VALUE = bytes(range(256)) * 16

SIZE = len(VALUE)

DRAM_BYTES = 16 * SIZE * 4
"""Four slots may be open ahead; there is room for 64."""

KEPT, MOST_S = 1_000, 10.0
"""It ends once a slot that was being written was in the way so often."""

Sides = tuple[WriterPage, OfferedSlot]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path, dram_bytes=DRAM_BYTES) as node:
        yield node


class Writer:
    """A client that puts into slots opened ahead."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.page: OfferedSlot | None = None

    def open(self, size: int = SIZE) -> tuple[int, int, int] | None:
        """Record the present offer."""
        answer, fds = self.client.channel.call_for_fds(OpenSlotAhead(size), Deadline(TIMEOUT_S))
        assert bool(fds) is bool(answer.sizes[0]) is (self.page is None), "the page is given once"
        for fd in fds:
            self.page = OfferedSlot(fd, answer.sizes[0])
            os.close(fd)
        return self.enter(size)

    def enter(self, size: int = SIZE) -> tuple[int, int, int] | None:
        assert self.page is not None
        return self.page.enter(size)

    def write(self, entered: tuple[int, int, int] | None, value: bytes = VALUE) -> int:
        """Into the slot: its number."""
        assert entered is not None
        number, slab, offset = entered
        self.client.map(slab, writable=True)[offset : offset + len(value)] = value
        return number

    def put(self, number: int, name: str, value: bytes = VALUE, **other: Any) -> int:
        """The answer. `next_bytes`: of the next slot."""
        return self.client.ask(message(number, name, value, **other), Flags).flags[0]

    def store(self, name: str, value: bytes = VALUE) -> None:
        assert self.put(self.write(self.open(len(value)), value), name, value) == STORED
        assert self.page is not None
        self.page.leave()


def message(number: int, name: str, value: bytes = VALUE, *, next_bytes: int = 0, **other: Any) -> PutFromSlot:
    fields: dict[str, Any] = {"keys": [name.encode()], "sizes": [len(value)], "generations": [0], "checksums": [digest(value)]}
    return PutFromSlot(number, next_bytes, **({"namespace": "ns", "parents": [b""]} | fields | other))


@pytest.fixture
def writer(client: Client) -> Writer:
    return Writer(client)


@pytest.fixture(params=["at once", "read as ever"])
def way(request: pytest.FixtureRequest, node: Served, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path on which a PutFromSlot is served."""
    if request.param == "read as ever":
        monkeypatch.setattr(node.in_place_puts.ahead, "frame", lambda *_: False)
    return str(request.param)


@pytest.mark.usefixtures("way")
def test_a_put_from_a_slot_ahead_is_stored_and_visible(node: Served, client: Client, writer: Writer) -> None:
    client.channel.call_for_fds(OpenIndex(), Deadline(TIMEOUT_S))
    cursor = client.ask(FetchEvents(0, 100), EventBatch).next_cursor
    writer.store("a")
    assert client.read("a")[1] == [VALUE]
    block = node.call(lambda: node.store.table.find("red", b"a"))
    assert block is not None
    assert block.index_entry >= 0
    assert (block.namespace, block.checksum, block.generation) == ("ns", digest(VALUE), 0)
    assert node.call(lambda: (node.in_place_puts.in_bytes, node.in_place_puts.ahead.puts, len(node.store.table.uncommitted))) == (
        SIZE,
        1,
        1,
    )
    assert bytes(client.ask(FetchEvents(cursor, 100), EventBatch).kinds)[:1] == bytes([TOLD_STORED])
    assert node.call(lambda: len(node.store.table.ahead)) == 0
    node.call(lambda: check(node.store.table))


@pytest.mark.usefixtures("way")
def test_the_answer_offers_the_next_slot(node: Served, client: Client, writer: Writer) -> None:
    number = writer.write(writer.open())
    for name in "abcd":
        assert writer.put(number, name, next_bytes=SIZE) == STORED
        number = writer.write(writer.enter())
    assert client.read(*"abcd")[1] == [VALUE] * 4
    assert node.call(lambda: (len(node.store.table.ahead), node.store.dram.used_bytes)) == (1, 5 * SIZE)


@pytest.mark.usefixtures("way")
def test_a_foreign_slot_is_answered_ask_again(node: Served, writer: Writer) -> None:
    other = Writer(node.connect())
    number = other.write(other.open())
    mine = writer.write(writer.open())
    assert writer.put(number, "a") == RETRY_LATER
    assert writer.put(mine + 100, "a") == RETRY_LATER
    assert writer.put(mine, "a", VALUE[1:]) == RETRY_LATER, "of another size"
    assert node.call(lambda: node.store.table.find("red", b"a")) is None
    other.client.close()


@pytest.mark.usefixtures("way")
def test_a_key_with_another_writer_is_answered_ask_again(node: Served, client: Client, writer: Writer) -> None:
    with_open = node.connect()
    opened = with_open.open({"a": 100})
    number = writer.write(writer.open())
    assert writer.put(number, "a") == RETRY_LATER
    assert with_open.commit(opened, [bytes(100)]) == [STORED]
    assert writer.put(number, "b") == STORED
    with_open.close()


def test_put_from_slot_takes_one_unreserved_block(client: Client, writer: Writer) -> None:
    number = writer.write(writer.open())
    for wrong in (
        {"generations": [5]},
        {"ack": 0},
        {"keys": [b"a", b"b"], "parents": [b"", b""], "sizes": [1, 1], "generations": [0, 0], "checksums": [0, 0]},
    ):
        with pytest.raises(InvalidArgument):
            writer.put(number, "a", **wrong)
    assert writer.put(number, "a") == STORED


def test_a_draining_node_opens_no_slots_ahead(node: Served, writer: Writer) -> None:
    number = writer.write(writer.open())
    node.call(lambda: node.drainer.drain(DRAIN_CLOSED))
    with pytest.raises(Draining):
        writer.put(number, "a")
    with pytest.raises(Draining):
        writer.open()
    until(node, lambda: not node.store.table.find("red", b"a"))


def test_a_block_whose_answer_fails_is_still_stored(node: Served, writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    number = writer.write(writer.open())
    with monkeypatch.context() as patch:
        patch.setattr(Session, "send_now", lambda session, data: 1 // 0)
        with pytest.raises(Exception, match="connection"):
            writer.put(number, "a")
    assert node.call(lambda: len(node.store.table.uncommitted)) == 1
    node.call(lambda: check(node.store.table))


def test_an_idle_slot_ahead_is_freed_and_one_in_use_is_not(node: Served, writer: Writer) -> None:
    entered = writer.open()
    assert entered is not None
    node.call(lambda: node.store.table.expire(now_ns=node.reactor.now_ns() + IDLE_NS))
    assert writer.put(writer.write(entered), "a") == STORED
    assert writer.page is not None
    writer.open()
    writer.page.leave()
    node.call(lambda: node.store.table.expire(now_ns=node.reactor.now_ns() + IDLE_NS))
    assert writer.enter() is None
    assert node.call(lambda: (len(node.store.table.ahead), node.store.table.ahead.taken_back)) == (0, 1)


def test_a_put_without_a_free_slot_takes_an_idle_slot_ahead(node: Served, client: Client, writer: Writer) -> None:
    """All others are pinned. A slot that is being written is waited for."""
    other = node.connect()
    assert writer.open() is not None
    assert writer.page is not None
    names = [f"{number}" for number in range(63)]
    assert other.put(dict.fromkeys(names, VALUE)) == [STORED] * 63

    def pin() -> None:
        for name in names:
            block = node.store.table.find("red", name.encode())
            assert block is not None
            block.pinned = True

    node.call(pin)
    thread, results = in_background(lambda: other.put({"a": VALUE}))
    until(node, lambda: len(node.waiting) == 1)
    writer.page.leave()
    node.call(node.waiting.retry)
    thread.join()
    assert results == [[STORED]]
    assert writer.enter() is None
    assert node.call(lambda: node.store.table.ahead.taken_back) == 1
    other.close()


def test_a_disconnect_frees_the_slot_ahead(node: Served) -> None:
    writer = Writer(node.connect())
    assert writer.open() is not None
    assert node.call(lambda: node.store.dram.used_bytes) == SIZE
    writer.client.close()
    until(node, lambda: not node.store.dram.used_bytes)


@pytest.mark.promise("tenant-quotas")
def test_slots_ahead_count_for_the_tenants_quota(node: Served, client: Client, writer: Writer) -> None:
    node.call(lambda: node.store.table.quotas.set(Quotas(tenants={"red": Quota(dram_bytes=2 * SIZE)})))
    number = writer.write(writer.open())
    assert writer.put(number, "a", next_bytes=SIZE) == STORED
    assert node.call(lambda: node.store.dram.tenant_bytes["red"]) == 2 * SIZE
    number = writer.write(writer.enter())
    assert writer.put(number, "b", next_bytes=SIZE) == STORED
    assert node.call(lambda: node.store.dram.tenant_bytes["red"]) == 2 * SIZE, "the coldest of its own has left for the next slot"
    assert client.read("a", "b")[1] == [None, VALUE]


@pytest.fixture
def sides() -> Iterator[Sides]:
    """The node's and the client's."""
    page, fd = make_page()
    try:
        yield page, OfferedSlot(fd, PAGE_BYTES)
    finally:
        os.close(fd)


def test_a_malformed_writer_page_is_refused() -> None:
    fd = os.memfd_create("other")
    try:
        os.ftruncate(fd, 2 * PAGE_BYTES)
        for size in (PAGE_BYTES, 2 * PAGE_BYTES):
            with pytest.raises(Broken):
                OfferedSlot(fd, size)
    finally:
        os.close(fd)


def test_a_slot_ahead_without_descriptors_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(24, "Too many open files")

    before = len(os.listdir("/proc/self/fd"))
    for name in ("memfd_create", "ftruncate"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, refuse)
            with pytest.raises(TierFailed, match="Too many open files"):
                make_page()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.promise("slots-not-reused-early")
def test_a_withdrawn_slot_is_never_written(sides: Sides) -> None:
    """Two processes. The writer marks the slot that it writes in their own memory; a withdrawal must find no mark."""
    page, offered = sides
    reader, writer = os.pipe()
    shared_fd = os.memfd_create("shared")
    os.ftruncate(shared_fd, 4096)
    child = os.fork()
    if not child:
        os.close(writer)
        os._exit(_write_slots(offered, shared_fd, reader))
    os.close(reader)
    wrong, kept, number, until_s = 0, 0, 0, time.monotonic() + MOST_S
    with os.fdopen(writer, "wb"):
        while kept < KEPT and time.monotonic() < until_s:
            number += 1
            page.offer(number, 0, 0, 100)
            for _ in range(number % 30):  # now sooner, now later
                os.pread(shared_fd, 8, 0)
            kept += not page.withdraw(number)
            while not page.withdraw(number):
                os.sched_yield()
            for _ in range(10):  # nor is one begun to be written later
                wrong += bool(int.from_bytes(os.pread(shared_fd, 8, 0), "little"))
    _, status = os.waitpid(child, 0)
    os.close(shared_fd)
    assert os.waitstatus_to_exitcode(status) == 0, "nothing was ever written"
    assert kept
    assert not wrong


def _write_slots(offered: OfferedSlot, shared_fd: int, until_closed: int) -> int:
    """The writer's process: 0 if it has written some, once the pipe is closed."""
    written = 0
    while not select.select([until_closed], (), (), 0)[0]:
        entered = offered.enter(100)
        if entered is not None:
            os.pwrite(shared_fd, entered[0].to_bytes(8, "little"), 0)
            written += 1
            os.pwrite(shared_fd, bytes(8), 0)
            offered.leave()
    return 0 if written else 1
