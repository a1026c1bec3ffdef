"""Tests of read_service.py over real sockets, shared memory and disks: readers get the block's bytes under any
concurrent change."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from kvstore.protocol.errors import KVStoreError, TierFailed, Unavailable
from kvstore.protocol.event_messages import EventBatch, FetchEvents
from kvstore.protocol.message import TIER_BITS
from kvstore.protocol.node_messages import DEFERRED, INLINE, MAPPED, MISS, ReadBlocks
from kvstore.protocol.session_messages import ROLE_NODE, Failure, Hello
from kvstore.rpc.address import parse_address
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.frame_writer import SendLimits
from kvstore.rpc.server.session import Session
from kvstore.store.block_table.block import NVME, Block
from kvstore.store.block_table.table import STAGED_SHARE
from kvstore.store.reads.read_request import ReadRequest
from kvstore.store.tiering.mover import SlowRead
from tests.rpc.traced import Spans, sampled
from tests.rpc.wires import frame, read_frame
from tests.store.engines import eventually
from tests.store.failing_tier import FailingNvme
from tests.store.served import MAX_LEASE_NS, MAX_WAITING, TIMEOUT_S, Client, Served, in_background, served, until

KIB = 1024
Done = Callable[[list[Exception | None]], None]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path, dram_bytes=16 * KIB, nvme_bytes=1 << 20) as node:
        yield node


def find(node: Served, name: str) -> Block:
    block = node.call(lambda: node.store.table.find("red", name.encode()))
    assert block is not None
    return block


def find_here(node: Served, name: str) -> Block:
    """For use in the loop's thread."""
    block = node.store.table.find("red", name.encode())
    assert block is not None
    return block


def readers(node: Served, *names: str) -> list[int]:
    return [find(node, name).readers for name in names]


def test_values_above_inline_bytes_are_mapped_under_one_lease(node: Served, client: Client) -> None:
    values = {"a": b"a" * 100, "b": b"b" * 5000, "c": b"c" * 101}
    client.put(values)
    blocks, found = client.read(*values, "x", inline_bytes=100)
    assert list(blocks.statuses) == [INLINE, MAPPED, MAPPED, MISS]
    assert found == [*values.values(), None]
    assert list(blocks.tiers) == [TIER_BITS["dram"]] * 3 + [0]
    assert blocks.lease != 0
    assert readers(node, *values) == [0, 1, 1]
    assert node.call(lambda: node.reads.out_bytes) == 5201
    client.release(blocks.lease)
    client.read("a")
    assert readers(node, "b", "c") == [0, 0]


@pytest.mark.promise("shm-reads-whole")
def test_a_generation_that_is_not_the_blocks_is_a_miss(client: Client) -> None:
    client.put({"a": b"a"}, generation=7)
    assert client.read("a", "a", "a", generations=[7, 6, 8])[1] == [b"a", None, None]
    assert [client.read("a", generations=[generation])[1] for generation in (7, 6, 8, 0)] == [[b"a"], [None], [None], [b"a"]]


@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
def test_a_read_is_recorded_before_its_answer_is_sent(
    node: Served, client: Client, monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    """The client may read from another node next; that event must have a later time."""
    client.put({"a": b"a" * 100, "b": b"b" * 100})
    recorder = node.connect()
    recorder.ask(FetchEvents(0, 100), EventBatch)
    order: list[str] = []
    reply, read = Session.reply, node.store.table.events.read

    def noted(what: str, function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: object, **options: object) -> None:
            order.append(what)
            function(*args, **options)

        return call

    monkeypatch.setattr(node.store.table.events, "read", noted("recorded", read))
    monkeypatch.setattr(Session, "reply", noted("answered", reply))
    client.read(*names, inline_bytes=100)
    assert order == ["recorded", "answered"]
    recorder.close()


def test_a_removed_block_stays_readable_under_its_lease(node: Served, client: Client) -> None:
    client.put({"a": b"a" * 16 * KIB})
    blocks = client.ask_blocks("a")
    block = find(node, "a")
    node.call(lambda: node.store.table.copies.drop(block))
    assert client.map(blocks.slabs[0])[blocks.offsets[0] : 16 * KIB] == b"a" * 16 * KIB
    assert client.read("a")[1] == [None]
    client.release(blocks.lease)
    assert client.put({"b": b"b" * 16 * KIB}) == [1]


def test_an_nvme_block_is_promoted_on_its_second_hit(node: Served, client: Client) -> None:
    values = {"a": b"a" * 3000, "b": b"b" * 3000}
    client.put(values)
    node.demote("a", "b")
    blocks, found = client.read("a", "b")
    assert (list(blocks.statuses), list(blocks.tiers), found) == ([INLINE] * 2, [TIER_BITS["nvme"]] * 2, [*values.values()])
    assert find(node, "a").tier_mask() == 4
    blocks, found = client.read("a")
    assert (list(blocks.statuses), list(blocks.tiers), found) == ([MAPPED], [TIER_BITS["nvme"]], [values["a"]])
    assert find(node, "a").tier_mask() == 6
    blocks, found = client.read("a")
    assert (list(blocks.tiers), found) == ([TIER_BITS["dram"]], [values["a"]])
    client.release(1, 2, 3)
    client.read("x")
    assert readers(node, "a", "b") == [0, 0]


@pytest.fixture
def roomy(tmp_path: Path) -> Iterator[Served]:
    """Two values of 3,000 bytes may be staged at once."""
    with served(tmp_path, dram_bytes=6000 * STAGED_SHARE, nvme_bytes=1 << 20) as node:
        yield node


def staged_bytes(node: Served) -> int:
    return node.call(lambda: node.store.dram.quarantined_bytes)


def test_a_cold_value_is_staged_in_dram_for_its_reader(roomy: Served) -> None:
    client = roomy.connect()
    values = {name: name.encode() * 3000 for name in "abc"}
    client.put(values)
    roomy.demote(*values)
    blocks, found = client.read(*values)
    assert list(blocks.statuses) == [MAPPED, MAPPED, INLINE], "the third goes along: no more may be staged"
    assert (list(blocks.tiers), found) == ([TIER_BITS["nvme"]] * 3, [*values.values()])
    assert staged_bytes(roomy) == 6000
    assert [find(roomy, name).tier_mask() for name in values] == [4, 4, 4], "no place in DRAM is earned"
    client.release(blocks.lease)
    until(roomy, lambda: roomy.store.dram.quarantined_bytes == 0)
    until(roomy, lambda: not any(find_here(roomy, name).readers for name in values))
    assert roomy.call(lambda: roomy.reads._limiter.held_bytes) == 0
    client.close()


@pytest.mark.promise("no-partial-blocks")
def test_a_staged_value_is_readable_until_its_lease_ends(roomy: Served) -> None:
    client = roomy.connect()
    client.put({"a": b"a" * 3000})
    roomy.demote("a")
    blocks = client.ask_blocks("a")
    roomy.call(lambda: roomy.store.table.copies.drop(find_here(roomy, "a")))
    client.put({name: name.encode() * 3000 for name in "bcdefgh"})
    memory = client.map(blocks.slabs[0])
    assert memory[blocks.offsets[0] : blocks.offsets[0] + 3000] == b"a" * 3000
    assert roomy.call(lambda: roomy.leases.expire(now_ns=roomy.reactor.now_ns() + MAX_LEASE_NS)) == 1
    assert staged_bytes(roomy) == 0
    client.close()


@pytest.mark.promise("no-partial-blocks")
def test_an_unreadable_cold_value_is_a_miss_and_frees_its_slot(roomy: Served) -> None:
    client = roomy.connect()
    client.put({"a": b"a" * 3000, "b": b"b" * 3000})
    find(roomy, "a").checksum ^= 1
    roomy.demote("a", "b")
    blocks, found = client.read("a", "b")
    assert (list(blocks.statuses), found) == ([MISS, MAPPED], [None, b"b" * 3000])
    assert roomy.call(lambda: roomy.store.table.find("red", b"a")) is None
    assert staged_bytes(roomy) == 3000
    nvme = roomy.store.tiers[NVME]
    assert isinstance(nvme, FailingNvme)
    nvme.read_failure = TierFailed("EIO")
    find(roomy, "b").hits = 0
    assert client.read("b")[1] == [None]
    assert staged_bytes(roomy) == 3000
    client.close()


@pytest.mark.promise("no-partial-blocks")
def test_a_disconnect_while_staging_releases_everything(roomy: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    client = roomy.connect()
    client.put({"a": b"a" * 3000})
    roomy.demote("a")
    late: list[Callable[[], None]] = []
    read = roomy.mover.read
    monkeypatch.setattr(roomy.mover, "read", lambda wanted, done: late.append(lambda: read(wanted, done)))
    sock = roomy.connect().channel.detach()
    sock.sendall(frame(ReadBlocks([b"a"], [0], 0, 1000)))
    sock.close()
    until(roomy, lambda: len(late) == 1 and len(roomy.server.sessions) == 1)
    assert staged_bytes(roomy) == 3000, "the disk may still write there"
    roomy.call(late[0])
    until(roomy, lambda: not find_here(roomy, "a").readers and not roomy.store.dram.quarantined_bytes)
    client.close()


def test_a_damaged_value_is_a_miss_and_its_copy_dropped(tmp_path: Path) -> None:
    with served(tmp_path, nvme_bytes=1 << 20) as node:
        client = node.connect()
        client.put({"a": b"a" * 3000, "b": b"b" * 3000})
        node.demote("a", "b")
        path = tmp_path / "nvme" / "values"
        with path.open("r+b") as file:
            at = file.read().index(b"a" * 3000)
            file.seek(at + 17)
            file.write(b"!")
        assert client.read("a", "b")[1] == [None, b"b" * 3000]
        assert node.call(lambda: (node.store.table.corrupt_reads, node.store.names())) == (1, "b")
        assert client.put({"a": b"a" * 3000}) == [1]
        client.close()


def test_an_unreadable_tier_is_a_miss_and_keeps_its_blocks(node: Served, client: Client) -> None:
    client.put({"a": b"a" * 3000, "b": b"b"})
    node.demote("a")
    nvme = node.store.tiers[NVME]
    assert isinstance(nvme, FailingNvme)
    nvme.read_failure = TierFailed("EIO")
    assert client.read("a", "b")[1] == [None, b"b"]
    nvme.read_failure = None
    assert client.read("a")[1] == [b"a" * 3000]


@pytest.mark.parametrize("hits", [0, 5])
def test_a_block_removed_while_fetched_is_sent_or_a_miss(node: Served, client: Client, monkeypatch: pytest.MonkeyPatch, hits: int) -> None:
    """A promotion's slot is free by then and may hold another block."""
    client.put({"a": b"a" * 3000})
    node.demote("a")
    block = find(node, "a")
    block.hits = hits
    read = node.mover.read

    def removed_meanwhile(wanted: Sequence[SlowRead], done: Done) -> None:
        def then(answers: list[Exception | None]) -> None:
            node.store.table.copies.drop(block)
            done(answers)

        read(wanted, then)

    monkeypatch.setattr(node.mover, "read", removed_meanwhile)
    assert client.read("a")[1] == [None if hits else b"a" * 3000]
    assert node.call(lambda: (node.store.dram.used_bytes, node.store.dram.quarantined_bytes, block.readers)) == (0, 0, 0)


def test_a_disconnect_while_fetching_releases_everything(node: Served, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.put({"a": b"a" * 3000, "b": b"b" * 3000})
    node.demote("a")
    find(node, "a").hits = 5
    late: list[Callable[[], None]] = []
    read = node.mover.read
    monkeypatch.setattr(node.mover, "read", lambda wanted, done: late.append(lambda: read(wanted, done)))
    sock = node.connect().channel.detach()
    sock.sendall(frame(ReadBlocks([b"a", b"b"], [0, 0], 0, 1000)))
    sock.close()
    until(node, lambda: len(late) == 1 and len(node.server.sessions) == 1)
    assert readers(node, "a", "b") == [1, 1]
    node.call(late[0])
    until(node, lambda: not find_here(node, "a").readers)
    assert readers(node, "a", "b") == [0, 0]


@pytest.mark.promise("memory-bounded")
def test_values_beyond_one_answer_are_answered_later(tmp_path: Path) -> None:
    with served(tmp_path, dram_bytes=16 * KIB, nvme_bytes=1 << 20, limits=SendLimits(queued_bytes=7000)) as node:
        client = node.connect()
        client.put({"a": b"a" * 3000, "b": b"b" * 3000, "c": b"c" * 3000})
        node.demote("a", "c")
        find(node, "a").hits = 5
        assert list(client.ask_blocks("x", "a", "c", "b", "a", inline_bytes=5000).statuses) == [MISS, INLINE, INLINE, DEFERRED, DEFERRED]
        client.channel.read_into([memoryview(bytearray(6000))], Deadline(TIMEOUT_S))
        assert find(node, "b").hits == 0, "it was not read"
        assert node.call(lambda: node.store.table.misses) == 1
        assert client.read("b", "a", inline_bytes=5000)[1] == [b"b" * 3000, b"a" * 3000]
        assert client.read("a", "b", "b", "b")[1] == [b"a" * 3000] + [b"b" * 3000] * 3, "mapped ones do not count"
        client.close()
        until(node, lambda: not find_here(node, "a").readers + find_here(node, "b").readers + find_here(node, "c").readers)


class Held:
    """A node that has room for one value of 3,000 bytes on its way from NVMe, which a reader takes that does not read; and another
    connection's read, which waits for its turn."""

    def __init__(self, node: Served) -> None:
        self.node = node
        self.client = node.connect()
        self.client.put({"big": b"X" * (6 << 20), "a": b"a" * 3000})
        node.demote("big", "a")
        self.idle = node.connect(tcp=True).channel.detach()
        self.idle.sendall(frame(ReadBlocks([b"big"], [0], 1 << 30, 1000)))
        until(node, lambda: node.reads._limiter.held_bytes > 6 << 20)

    def ask(self) -> tuple[threading.Thread, list[object]]:
        found = in_background(lambda: self.client.read("a")[1])
        until(self.node, lambda: len(self.node.reads._waiting) == 1)
        assert readers(self.node, "a") == [0], "it holds nothing"
        assert find(self.node, "a").hits == 0
        return found


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    with served(tmp_path, dram_bytes=16 << 20, nvme_bytes=32 << 20, read_bytes=1000) as node:
        held = Held(node)
        yield held
        held.idle.close()
        held.client.close()


@pytest.mark.promise("memory-bounded")
def test_nvme_reads_wait_for_the_limiter_and_dram_reads_do_not(held: Held) -> None:
    thread, results = held.ask()
    other = held.node.connect()
    assert other.put({"b": b"b" * 3000}) == [1]
    assert other.read("b", "a", inline_bytes=5000)[0].statuses == bytes((INLINE, DEFERRED))
    other.close()
    held.idle.close()
    thread.join(TIMEOUT_S)
    assert results == [[b"a" * 3000]]
    until(held.node, lambda: held.node.reads._limiter.held_bytes == 0)


def test_queued_reads_are_tried_up_to_the_first_refusal(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each answer would have every queued read examined: quadratic work for many readers."""
    reads, clients = held.node.reads, [held.node.connect() for _ in range(8)]
    waiting = [in_background(partial(client.read, "a", inline_bytes=5000)) for client in clients]
    until(held.node, lambda: len(reads._waiting) == len(clients))
    tried, gather = list[object](), reads._gather

    def counted(request: ReadRequest) -> int:
        tried.append(request)
        return gather(request)

    monkeypatch.setattr(reads, "_gather", counted)
    held.node.call(reads._waiting.retry)
    assert tried == []
    held.idle.close()
    for thread, results in waiting:
        thread.join(TIMEOUT_S)
        assert [values for _, values in results] == [[b"a" * 3000]]
    assert len(tried) <= 2 * len(clients)
    for client in clients:
        client.close()


def test_a_traced_read_has_spans_for_wait_and_fetch(tmp_path: Path) -> None:
    spans = Spans()
    with served(tmp_path, dram_bytes=16 << 20, nvme_bytes=32 << 20, read_bytes=1000) as node:
        node.server.tracer = spans
        held = Held(node)

        def read() -> list[bytes | None]:
            with sampled():
                return held.client.read("a", inline_bytes=5000)[1]

        thread, results = in_background(read)
        until(node, lambda: len(node.reads._waiting) == 1)
        assert spans.parts == []
        held.idle.close()
        thread.join(TIMEOUT_S)
        assert results == [[b"a" * 3000]]
        until(node, lambda: [kind for kind, _, _ in spans.told] == [ReadBlocks.TYPE])
        assert sorted(name for name, _ in spans.parts) == ["kvstore.node.fetch", "kvstore.node.wait_for_turn"]
        assert dict(spans.parts)["kvstore.node.fetch"] == {"kvstore.tier": "nvme", "kvstore.blocks": 1}
        held.client.close()


def test_queued_reads_are_bounded_and_end_with_the_connection(held: Held) -> None:
    sock = held.client.channel.detach()
    sock.settimeout(TIMEOUT_S)
    sock.sendall(b"".join(frame(ReadBlocks([b"a"], [0], 0, 0), request_id) for request_id in range(1, MAX_WAITING + 2)))
    header, answer, _ = read_frame(sock)
    assert isinstance(answer, Failure)
    assert (header.request_id, answer.code) == (MAX_WAITING + 1, Unavailable.code)
    sock.close()
    until(held.node, lambda: len(held.node.reads._waiting) == 0)


@pytest.mark.promise("failures-typed")
def test_an_internal_error_in_a_read_releases_everything(node: Served, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    client.put({"a": b"a" * 3000, "b": b"b" * 3000})
    node.demote("a")
    find(node, "a").hits = 5
    for fault in ("misses", "corrupt"):
        with monkeypatch.context() as patch:
            if fault == "misses":
                patch.setattr(node.mover, "read", fail)
            else:
                patch.setattr(node.leases, "grant", fail)
            with pytest.raises(KVStoreError, match="internal error: RuntimeError: a bug"):
                client.read("b", "a")
        assert readers(node, "a", "b") == [0, 0]
        assert node.call(lambda: node.reads._limiter.held_bytes) == 0
    assert client.read("b", "a")[1] == [b"b" * 3000, b"a" * 3000]


def test_a_large_answer_holds_its_blocks_until_sent(tmp_path: Path) -> None:
    with served(tmp_path / "large", dram_bytes=32 << 20) as large:
        client = large.connect()
        value = bytes(range(256)) * (24 << 12)
        client.put({"a": value})
        sock = client.channel.detach()
        sock.sendall(frame(ReadBlocks([b"a"], [0], 1 << 30, 1000)))
        until(large, lambda: find_here(large, "a").readers == 1)
        block = find(large, "a")
        large.call(lambda: large.store.table.copies.drop(block))
        assert large.call(lambda: large.store.dram.quarantined_bytes) == len(value)
        sock.settimeout(TIMEOUT_S)
        got = bytearray()
        while len(got) < len(value):
            got += sock.recv(1 << 20)
        assert bytes(got).endswith(value[-(1 << 20) :])
        sock.close()


@pytest.mark.promise("memory-bounded")
def test_a_stalled_reader_is_closed_after_the_send_timeout(tmp_path: Path) -> None:
    with served(tmp_path, dram_bytes=32 << 20, limits=SendLimits(timeout_s=0.3)) as node:
        client = node.connect(tcp=True)
        client.put({"a": bytes(24 << 20)})
        sock = client.channel.detach()
        sock.sendall(frame(ReadBlocks([b"a"], [0], 1 << 30, 1000)))
        until(node, lambda: find_here(node, "a").readers == 1)
        eventually(lambda: not find(node, "a").readers)
        assert node.call(lambda: len(node.server.sessions)) == 0
        other = node.connect()
        assert other.put({"b": bytes(24 << 20)}) == [1], "there is room"
        other.close()
        sock.close()


@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
def test_a_copy_to_another_node_is_no_access(node: Served, client: Client, names: list[str]) -> None:
    """Neither the eviction policy nor the hit count may take a home copy for a reader's return."""
    client.put({name: name.encode() for name in names})
    hello = Hello(ROLE_NODE, "red", name="other")
    with contextlib.closing(Client(Channel.open(parse_address(f"unix:{node.unix}"), hello, Deadline(TIMEOUT_S)))) as peer:
        assert peer.read(*names, inline_bytes=100)[1] == [name.encode() for name in names]
        assert peer.read("absent", inline_bytes=100)[1] == [None]
    assert [find(node, name).hits for name in names] == [0] * len(names)
    assert node.call(lambda: node.store.table.misses) == 0
    client.read(*names, inline_bytes=100)
    assert [find(node, name).hits for name in names] == [1] * len(names)
