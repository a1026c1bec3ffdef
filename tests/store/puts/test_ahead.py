"""Promises of ahead.py, on real sockets: a value that lies in the slot which the connection was offered is stored by one message."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.client.local.writer_page import OfferedSlot
from kvstore.protocol.catalog_messages import DRAIN_CLOSED
from kvstore.protocol.errors import Draining, InvalidArgument, TierFailed
from kvstore.protocol.event_messages import STORED as TOLD_STORED
from kvstore.protocol.event_messages import EventBatch, Events
from kvstore.protocol.node_messages import ALREADY_THERE, ASK_AGAIN, STORED, OpenAhead, OpenIndex, PutAhead
from kvstore.protocol.session_messages import Flags
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.session import Session
from kvstore.security.quotas.quota import Quota, Quotas
from kvstore.store.blocks.free_slots import IDLE_NS
from tests.store.served import TIMEOUT_S, Client, Served, digest, in_background, served, until

KIB = 1024
VALUE = bytes(range(256)) * 16
SIZE = len(VALUE)
DRAM_BYTES = 16 * SIZE * 4
"""Four slots may be open ahead; there is room for 64."""


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
        """What is offered then, entered."""
        answer, fds = self.client.channel.call_for_fds(OpenAhead(size), Deadline(TIMEOUT_S))
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


def message(number: int, name: str, value: bytes = VALUE, *, next_bytes: int = 0, **other: Any) -> PutAhead:
    fields: dict[str, Any] = {"keys": [name.encode()], "sizes": [len(value)], "generations": [0], "checksums": [digest(value)]}
    return PutAhead(number, next_bytes, **({"namespace": "ns", "parents": [b""]} | fields | other))


@pytest.fixture
def writer(client: Client) -> Writer:
    return Writer(client)


@pytest.fixture(params=["at once", "read as ever"])
def way(request: pytest.FixtureRequest, node: Served, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a PutAhead is served."""
    if request.param == "read as ever":
        monkeypatch.setattr(node.in_place.ahead, "frame", lambda *_: False)
    return str(request.param)


@pytest.mark.usefixtures("way")
def test_a_value_in_its_slot_is_stored_shown_and_entered(node: Served, client: Client, writer: Writer) -> None:
    client.channel.call_for_fds(OpenIndex(), Deadline(TIMEOUT_S))
    cursor = client.ask(Events(0, 100), EventBatch).next_cursor
    writer.store("a")
    assert client.read("a")[1] == [VALUE]
    block = node.call(lambda: node.store.table.find("red", b"a"))
    assert block is not None
    assert block.shown >= 0
    assert (block.namespace, block.checksum, block.generation) == ("ns", digest(VALUE), 0)
    assert node.call(lambda: (node.in_place.in_bytes, node.in_place.ahead.puts, len(node.store.table.undecided))) == (SIZE, 1, 1)
    assert bytes(client.ask(Events(cursor, 100), EventBatch).kinds)[:1] == bytes([TOLD_STORED])
    assert node.call(lambda: len(node.store.table.ahead)) == 0
    node.call(node.store.table.check_integrity)


@pytest.mark.usefixtures("way")
def test_the_answer_brings_the_slot_of_the_next(node: Served, client: Client, writer: Writer) -> None:
    number = writer.write(writer.open())
    for name in "abcd":
        assert writer.put(number, name, next_bytes=SIZE) == STORED
        number = writer.write(writer.enter())
    assert client.read(*"abcd")[1] == [VALUE] * 4
    assert node.call(lambda: (len(node.store.table.ahead), node.store.dram.used_bytes)) == (1, 5 * SIZE)


@pytest.mark.usefixtures("way")
def test_a_key_that_is_there_is_a_success_and_the_slot_stays(node: Served, client: Client, writer: Writer) -> None:
    client.put({"a": b"other"})
    number = writer.write(writer.open())
    assert writer.put(number, "a") == ALREADY_THERE
    assert client.read("a")[1] == [b"other"]
    assert writer.put(number, "b") == STORED


@pytest.mark.usefixtures("way")
def test_a_slot_that_is_not_the_connections_is_asked_for_again(node: Served, writer: Writer) -> None:
    other = Writer(node.connect())
    number = other.write(other.open())
    mine = writer.write(writer.open())
    assert writer.put(number, "a") == ASK_AGAIN
    assert writer.put(mine + 100, "a") == ASK_AGAIN
    assert writer.put(mine, "a", VALUE[1:]) == ASK_AGAIN, "of another size"
    assert node.call(lambda: node.store.table.find("red", b"a")) is None
    other.client.close()


@pytest.mark.usefixtures("way")
def test_a_key_that_another_writes_is_asked_for_again(node: Served, client: Client, writer: Writer) -> None:
    with_open = node.connect()
    opened = with_open.open({"a": 100})
    number = writer.write(writer.open())
    assert writer.put(number, "a") == ASK_AGAIN
    assert with_open.commit(opened, [bytes(100)]) == [STORED]
    assert writer.put(number, "b") == STORED
    with_open.close()


def test_what_is_not_about_one_unreserved_block_is_refused(client: Client, writer: Writer) -> None:
    number = writer.write(writer.open())
    for wrong in (
        {"generations": [5]},
        {"ack": 0},
        {"keys": [b"a", b"b"], "parents": [b"", b""], "sizes": [1, 1], "generations": [0, 0], "checksums": [0, 0]},
    ):
        with pytest.raises(InvalidArgument):
            writer.put(number, "a", **wrong)
    assert writer.put(number, "a") == STORED


def test_only_a_writer_of_this_host_is_offered_a_slot(node: Served) -> None:
    far = node.connect(tcp=True)
    with pytest.raises(InvalidArgument, match="Unix socket"):
        far.channel.call_for_fds(OpenAhead(SIZE), Deadline(TIMEOUT_S))
    far.close()


def test_a_node_that_ends_opens_and_stores_nothing(node: Served, writer: Writer) -> None:
    number = writer.write(writer.open())
    node.call(lambda: node.leaving.drain(DRAIN_CLOSED))
    with pytest.raises(Draining):
        writer.put(number, "a")
    with pytest.raises(Draining):
        writer.open()
    until(node, lambda: not node.store.table.find("red", b"a"))


def test_without_memory_for_the_page_the_writer_is_told(node: Served, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise TierFailed("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("kvstore.store.puts.ahead.make_page", refuse)
        with pytest.raises(TierFailed):
            client.channel.call_for_fds(OpenAhead(SIZE), Deadline(TIMEOUT_S))
    Writer(client).store("a")


def test_a_block_whose_answer_fails_is_entered_all_the_same(node: Served, writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    number = writer.write(writer.open())
    with monkeypatch.context() as patch:
        patch.setattr(Session, "send_now", lambda session, data: 1 // 0)
        with pytest.raises(Exception, match="connection"):
            writer.put(number, "a")
    assert node.call(lambda: len(node.store.table.undecided)) == 1
    node.call(node.store.table.check_integrity)


def test_an_answer_that_the_socket_does_not_take_at_once_comes_later(node: Served, writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    number = writer.write(writer.open())
    monkeypatch.setattr(Session, "send_now", lambda session, data: data)
    assert writer.put(number, "a") == STORED


def test_an_idle_slot_goes_back_and_one_in_use_does_not(node: Served, writer: Writer) -> None:
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


def test_a_put_without_room_has_that_of_an_idle_slot(node: Served, client: Client, writer: Writer) -> None:
    """All else is pinned. A slot that is being written is waited for."""
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


def test_nobody_is_offered_what_others_of_the_tenant_wait_for(node: Served, writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    number = writer.write(writer.open())
    monkeypatch.setattr(node.waiting, "has", lambda line: line == "red")
    assert writer.put(number, "a", next_bytes=SIZE) == STORED
    assert writer.enter() is None
    assert writer.open() is None


def test_the_end_of_a_connection_frees_its_slot(node: Served) -> None:
    writer = Writer(node.connect())
    assert writer.open() is not None
    assert node.call(lambda: node.store.dram.used_bytes) == SIZE
    writer.client.close()
    until(node, lambda: not node.store.dram.used_bytes)


def test_slots_ahead_count_for_the_tenants_quota(node: Served, client: Client, writer: Writer) -> None:
    node.call(lambda: node.store.table.quotas.set(Quotas(tenants={"red": Quota(dram_bytes=2 * SIZE)})))
    number = writer.write(writer.open())
    assert writer.put(number, "a", next_bytes=SIZE) == STORED
    assert node.call(lambda: node.store.dram.tenant_bytes["red"]) == 2 * SIZE
    number = writer.write(writer.enter())
    assert writer.put(number, "b", next_bytes=SIZE) == STORED
    assert node.call(lambda: node.store.dram.tenant_bytes["red"]) == 2 * SIZE, "the coldest of its own has left for the next slot"
    assert client.read("a", "b")[1] == [None, VALUE]
