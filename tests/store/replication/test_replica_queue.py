"""Tests of replica_queue.py: replicas become visible only after the master's confirmation; any failure leaves nothing
behind and logs one line."""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest

from kvstore.protocol.catalog_messages import COPY_HOME, COPY_REASONS, EVENT_COMMIT, EVENT_REMOVED, CopyBlocks, CopyResult
from kvstore.protocol.errors import DeadlineExceeded, KVStoreError, StaleEpoch, Unavailable
from kvstore.protocol.message import BUSY
from kvstore.protocol.node_messages import ReadBlocks
from kvstore.protocol.session_messages import ROLE_NODE, Failure, Flags, Hello
from kvstore.rpc.address import socket_id
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.tracing import CALL, SampledCall
from kvstore.store.block_table.block import DRAM, Block
from kvstore.store.block_table.uncommitted import UNCOMMITTED
from kvstore.store.replication import replica_queue as copies
from kvstore.store.replication.replica_fetch import ReplicaBlock, SourceNode, fetch
from kvstore.transfer.paths.path_chooser import MeasuredRate
from tests.rpc.traced import PLACE, Part, Spans
from tests.store.engines import eventually
from tests.store.integrity import check
from tests.store.made import made
from tests.store.served import Client, Master, Served, digest, in_background, served
from tests.store.tensors import after, tensor_value

KIB = 1024
VALUES = {f"k{number}": bytes([number]) * (700 + 100 * number) for number in range(40)}
EPOCH = 9


class Ruler:
    """A master's last word on copies: yes to what has arrived, unless told otherwise, or nothing until `decide`."""

    def __init__(self) -> None:
        self.reports: list[CopyResult] = []
        self.calls: list[SampledCall | None] = []
        """For whose sake each report is made."""
        self.refuses: set[bytes] = set()
        self.failure: KVStoreError | None = None
        self.is_silent = False
        self.waiting: list[tuple[CopyResult, Callable[[Flags | KVStoreError], None]]] = []

    def ask(self, message: CopyResult, decided: Callable[[Flags | KVStoreError], None]) -> None:
        self.reports.append(message)
        self.calls.append(CALL.get())
        self.waiting.append((message, decided))
        if not self.is_silent:
            self.decide()

    def decide(self) -> None:
        waiting, self.waiting = self.waiting, []
        for message, decided in waiting:
            said = [arrived and key not in self.refuses for key, arrived in zip(message.keys, message.arrived, strict=True)]
            decided(self.failure or Flags(bytes(said)))


class Pair:
    """A source that holds VALUES at generation 1, a target under orders of `master`, and `ruler`, which confirms the target's replicas."""

    def __init__(self, source: Served, target: Served) -> None:
        self.source, self.target, self.ruler = source, target, Ruler()
        self.link = target.link()
        self.master = Master(self.link)
        target.call(lambda: target.replica_queue.link_up(self.ruler.ask, EPOCH))
        source.authenticator.master_epochs[0] = 1
        client = source.connect()
        assert set(client.put(VALUES)) == {1}
        client.close()

    def order(self, names: Sequence[str], *, tcp: str = "", tenant: str = "red", generation: int = 1, epoch: int = 1) -> CopyBlocks:
        """Over the host's own socket, or with `tcp` that address."""
        values = [VALUES[name] for name in names]
        return CopyBlocks(
            epoch,
            tenant,
            "ns",
            5,
            "another" if tcp else socket_id(self.source.unix),
            self.source.unix,
            tcp,
            [name.encode() for name in names],
            [len(value) for value in values],
            [digest(value) for value in values],
            [generation] * len(names),
            [b"parent"] * len(names),
            [],
        )

    def send(self, order: CopyBlocks) -> list[int]:
        answer = self.master.ask(order)
        assert isinstance(answer, Flags), answer
        return list(answer.flags)

    def copy(self, *names: str, tcp: str = "", generation: int = 1) -> list[int]:
        """Have these copied, and come back when all is over: the flags of the order."""
        flags = self.send(self.order(names, tcp=tcp, generation=generation))
        self.settle()
        return flags

    def settle(self) -> None:
        self.until(lambda: not len(self.target.replica_queue))

    def until(self, condition: Callable[[], bool]) -> None:
        """Come back when the condition holds in the target's loop."""
        eventually(lambda: self.target.call(condition))

    def blocks(self) -> dict[str, Block]:
        return self.target.call(lambda: {block.key.decode(): block for block in self.target.store.table.blocks()})

    def arrived(self) -> dict[bytes, int]:
        return {key: flag for report in self.ruler.reports for key, flag in zip(report.keys, report.arrived, strict=True)}

    def check(self) -> None:
        """Nothing is under way, and no slot, put or lease is held for it."""
        target, store = self.target, self.target.store

        def is_over() -> bool:
            check(store.table)
            return (len(target.replica_queue), store.table.open_puts, len(target.leases), len(target.waiting)) == (0, 0, 0, 0)

        def bytes_held_by_no_block() -> tuple[int, int]:
            for block in list(store.table.blocks()):
                store.table.copies.drop(block)
            return store.dram.used_bytes, store.dram.quarantined_bytes

        self.until(is_over)
        assert target.call(bytes_held_by_no_block) == (0, 0)
        eventually(lambda: self.source.call(lambda: len(self.source.leases) == 0))

    def counters(self) -> tuple[int, int, int]:
        found = self.target.call(self.target.replica_queue.counters)
        return found["copied_blocks"], found["copied_bytes"], found["copies_failed"]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    (tmp_path / "s").mkdir()
    (tmp_path / "t").mkdir()
    with served(tmp_path / "s", dram_bytes=1 << 20, nvme_bytes=1 << 20) as source, served(tmp_path / "t", dram_bytes=256 * KIB) as target:
        pair = Pair(source, target)
        yield pair
        pair.check()
        pair.master.close()


@pytest.fixture
def client(pair: Pair) -> Iterator[Client]:
    client = pair.target.connect()
    yield client
    client.close()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "kvstore.store")
    return lambda: [record.getMessage() for record in caplog.records]


# --- copies ---


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_replicas_are_copied_in_batches_with_their_generation(pair: Pair, client: Client, way: str) -> None:
    names = list(VALUES)
    assert pair.copy(*names, tcp=pair.source.tcp if way == "tcp" else "") == [1] * len(names)
    _, found = client.read(*names, generations=[1] * len(names))
    assert found == list(VALUES.values())
    block = pair.blocks()["k3"]
    assert (block.namespace, block.parent, block.checksum, block.tier_mask()) == ("ns", b"parent", digest(VALUES["k3"]), 2)
    assert pair.counters() == (len(names), sum(map(len, VALUES.values())), 0)
    assert [key for report in pair.ruler.reports for key in report.keys] == [name.encode() for name in names], "in the order asked for"
    assert {(report.epoch, report.tenant) for report in pair.ruler.reports} == {(EPOCH, "red")}
    assert len(pair.ruler.reports) > 3, "a batch has 16 KiB here"


@pytest.mark.promise("copies-versioned")
def test_a_replica_is_invisible_until_the_master_confirms(pair: Pair, client: Client) -> None:
    pair.ruler.is_silent = True
    assert pair.send(pair.order(["k0", "k1"])) == [1, 1]
    pair.until(lambda: bool(pair.ruler.waiting))
    assert client.read("k0")[1] == [None]
    assert list(client.open({"k0": 10}).statuses) == [BUSY], "a key has one writer at a time"
    assert pair.target.call(lambda: len(pair.target.replica_queue)) == 2
    pair.target.call(pair.ruler.decide)
    pair.settle()
    assert client.read("k0")[1] == [VALUES["k0"]]


def test_present_blocks_and_a_full_queue_are_refused(pair: Pair, client: Client) -> None:
    client.put({"k0": b"mine"}, generation=7)
    client.open({"k1": 10})
    assert pair.copy("k0", "k1", "k2") == [0, 0, 1]
    assert pair.blocks()["k0"].generation == 7
    client.close()
    pair.until(lambda: not pair.target.store.table.open_puts)
    pair.ruler.is_silent = True
    pair.send(pair.order(["k3"]))
    assert pair.send(pair.order([f"k{number}" for number in range(4, 40)] * 3)) == [1] * 100 + [0] * 8
    pair.target.call(pair.target.replica_queue.link_down)
    pair.target.call(pair.ruler.decide)


# --- what may happen meanwhile ---


def test_a_replica_removed_meanwhile_is_dropped(pair: Pair, lines: Callable[[], list[str]]) -> None:
    pair.ruler.refuses = {b"k1"}
    pair.copy("k0", "k1", "k2")
    assert set(pair.blocks()) == {"k0", "k2"}
    assert pair.counters()[2] == 1
    assert lines() == ["dropped 1 of 3 blocks copied from node 5: removed or replaced meanwhile"]


@pytest.mark.promise("copies-versioned")
def test_a_damaged_replica_is_dropped(pair: Pair, lines: Callable[[], list[str]]) -> None:
    order = pair.order(["k0", "k1"])
    order.checksums = [digest(VALUES["k0"]), 7]
    pair.send(order)
    pair.settle()
    assert set(pair.blocks()) == {"k0"}
    assert lines() == [
        "1 of 2 blocks not copied from node 5: ChecksumMismatch: node 5 sent a value that does not match the recorded xxh3_64"
    ]


@pytest.mark.promise("copies-versioned")
def test_a_dead_source_fails_its_orders_only(pair: Pair, lines: Callable[[], list[str]]) -> None:
    assert pair.copy("k0", "k1", tcp="127.0.0.1:1") == [1, 1]
    assert pair.arrived() == {b"k0": 0, b"k1": 0}
    assert pair.counters() == (0, 0, 2)
    assert [line.startswith("2 of 2 blocks not copied from node 5: Unavailable: ") for line in lines()] == [True]
    assert pair.copy("k0", "k1") == [1, 1]
    assert set(pair.blocks()) == {"k0", "k1"}


@pytest.mark.promise("no-wait-for-peers")
def test_orders_from_a_silent_source_end_together(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """One timeout for all orders that were queued by then; those from other nodes go on."""
    monkeypatch.setattr(pair.target.replica_queue, "_timeout_s", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "{}:{}".format(*silent.getsockname())
        for name in ("k0", "k1", "k2", "k3"):
            assert pair.send(pair.order([name], tcp=address)) == [1]
        assert pair.send(pair.order(["k4"])) == [1]
        pair.settle()
        assert pair.arrived() == {b"k0": 0, b"k1": 0, b"k2": 0, b"k3": 0, b"k4": 1}
        assert accepted(silent) == 1
        assert pair.copy("k5", tcp=address) == [1]
        assert accepted(silent) == 1, "a later order is tried"
    assert pair.counters() == (1, len(VALUES["k4"]), 5)


def accepted(listener: socket.socket) -> int:
    """Accept the connections that wait; return their number."""
    listener.setblocking(False)
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            listener.accept()[0].close()
            count += 1
    return count


def test_fetch_too_slow_for_its_batch_reports_its_rate(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = MeasuredRate(1000.0, 1 << 20, 1)

    def expire(*_: object) -> None:
        raise DeadlineExceeded("the batch took longer than copy_timeout_s")

    monkeypatch.setattr(copies, "fetch", expire)
    monkeypatch.setattr(copies.ReplicaQueue, "_measured", lambda _self, _source: measured)
    noted: list[tuple[int, MeasuredRate | None]] = []
    monkeypatch.setattr(pair.target.replica_queue.rates, "note", lambda node_id, rate: noted.append((node_id, rate)))
    pair.copy("k0")
    assert noted == [(5, measured)]


def test_a_refused_or_malformed_confirmation_drops_the_replicas(pair: Pair, lines: Callable[[], list[str]]) -> None:
    pair.ruler.failure = StaleEpoch("registration 9 is over")
    pair.copy("k0")
    pair.ruler.failure = None
    pair.ruler.is_silent = True
    pair.send(pair.order(["k1"]))
    pair.until(lambda: bool(pair.ruler.waiting))
    ((_, decided),) = pair.ruler.waiting
    pair.target.call(lambda: decided(Flags(b"\1\1")))
    pair.settle()
    assert not pair.blocks()
    assert lines() == [
        "dropped 1 of 1 blocks copied from node 5: StaleEpoch: registration 9 is over",
        "dropped 1 of 1 blocks copied from node 5: ProtocolError: the master answered CopyResult with a wrong number of flags",
    ]


@pytest.mark.promise("copies-versioned")
def test_orders_end_with_their_link(pair: Pair, monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]) -> None:
    """Queued orders end at once, the one in progress after its fetch; the next link starts empty."""
    gate = Gate(monkeypatch)
    pair.send(pair.order(["k0"]))
    pair.send(pair.order(["k1", "k2"]))
    gate.await_fetch()
    pair.target.call(lambda: pair.target.replica_queue.link_up(pair.ruler.ask, EPOCH + 1))
    assert pair.target.call(lambda: len(pair.target.replica_queue)) == 1
    gate.open()
    pair.settle()
    assert not pair.ruler.reports
    assert not pair.blocks()
    assert pair.counters() == (0, 0, 3)
    assert lines() == ["dropped 1 of 1 blocks copied from node 5: Unavailable: the link that ordered the copies was lost"]
    pair.copy("k1")
    assert pair.ruler.reports[0].epoch == EPOCH + 1


# --- time ---


class Gate:
    """Holds fetches back before they begin, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._begun, self._open = threading.Event(), threading.Event()

        def held(
            source: SourceNode, hello: object, wanted: Sequence[ReplicaBlock], deadline: Deadline, *how: object
        ) -> list[int | KVStoreError]:
            self._begun.set()
            assert self._open.wait(10)
            return fetch(source, hello, wanted, deadline)  # type: ignore[arg-type]

        monkeypatch.setattr(copies, "fetch", held)

    def await_fetch(self) -> None:
        assert self._begun.wait(10)

    def open(self) -> None:
        self._open.set()


def test_a_late_fetch_writes_into_no_reused_slot(pair: Pair, monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]) -> None:
    gate = Gate(monkeypatch)
    pair.send(pair.order(["k0"]))
    gate.await_fetch()
    table = pair.target.store.table
    assert pair.target.call(lambda: table.expire(now_ns=pair.target.reactor.now_ns())) == 1
    assert pair.target.call(lambda: pair.target.store.dram.quarantined_bytes) > 0, "the thread may still write"
    gate.open()
    pair.settle()
    assert lines() == ["1 of 1 blocks not copied from node 5: DeadlineExceeded: its slot expired before it arrived (put_ttl_s)"]


def test_a_replica_that_expires_before_its_grant_is_retracted(pair: Pair) -> None:
    pair.ruler.is_silent = True
    pair.send(pair.order(["k0"]))
    pair.until(lambda: bool(pair.ruler.waiting))
    events: list[tuple[int, bytes, int]] = []

    def expire_and_decide() -> None:
        pair.target.store.emit = lambda kind, block: events.append((kind, block.key, block.generation))
        pair.target.store.table.expire(now_ns=pair.target.reactor.now_ns())
        pair.ruler.decide()

    pair.target.call(expire_and_decide)
    pair.settle()
    assert events == [(EVENT_REMOVED, b"k0", 1)]
    assert EVENT_COMMIT not in {kind for kind, *_ in events}


# --- room ---


def test_orders_without_a_free_slot_are_given_up_in_turn(
    pair: Pair, client: Client, monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(copies, "ROOM_WAIT_NS", 1 << 62)
    opened = client.open({f"p{number}": 4 * KIB for number in range(64)})
    assert set(opened.statuses) == {0}
    assert pair.send(pair.order(["k0", "k1"])) == [1, 1]
    assert pair.send(pair.order(["k2"])) == [1]
    step, waits = pair.target.replica_queue.step, pair.target.replica_queue
    pair.target.call(step)
    assert pair.target.call(lambda: len(waits)) == 3, "not at once"
    monkeypatch.setattr(copies, "ROOM_WAIT_NS", 0)
    pair.target.call(step)
    pair.until(lambda: len(waits) == 1)
    client.close()
    pair.until(lambda: not pair.target.store.table.open_puts)
    pair.target.call(step)
    pair.settle()
    assert set(pair.blocks()) == {"k2"}
    assert pair.arrived() == {b"k0": 0, b"k1": 0, b"k2": 1}
    assert lines() == ["2 of 2 blocks not copied from node 5: Full: no slot became free within 0 s"]


@pytest.mark.promise("no-wait-for-peers")
@pytest.mark.promise("put-bounded-wait")
def test_waiting_puts_of_another_tenant_delay_no_order(pair: Pair, client: Client) -> None:
    other = pair.target.connect(tenant="blue")
    opened = other.open({f"p{number}": 4 * KIB for number in range(63)})
    assert set(opened.statuses) == {0}
    thread, results = in_background(lambda: other.put({"waits": bytes(8 * KIB)}))
    pair.until(lambda: len(pair.target.waiting) == 1)
    assert pair.copy("k0") == [1]
    assert pair.arrived() == {b"k0": 1}, "it may have left again for the put"
    for session in pair.target.call(lambda: list(pair.target.server.sessions)):
        pair.target.call(session.close)
    thread.join()
    assert isinstance(results[0], Unavailable)
    other.close()


@pytest.mark.promise("no-wait-for-peers")
def test_orders_without_a_slot_delay_no_other_tenant(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "ROOM_WAIT_NS", 1 << 62)
    other = pair.target.connect(tenant="blue")
    opened = other.open({f"p{number}": 4 * KIB for number in range(63)})
    assert set(opened.statuses) == {0}
    thread, results = in_background(lambda: other.put({"waits": bytes(8 * KIB)}))
    pair.until(lambda: len(pair.target.waiting) == 1)
    assert pair.send(pair.order(["k0", "k1"], tenant="blue")) == [1, 1]
    assert pair.send(pair.order(["k2"])) == [1]
    pair.until(lambda: pair.arrived() == {b"k2": 1})
    assert pair.target.call(lambda: len(pair.target.replica_queue)) == 2
    pair.target.call(pair.target.replica_queue.link_down)
    for session in pair.target.call(lambda: list(pair.target.server.sessions)):
        pair.target.call(session.close)
    thread.join()
    assert isinstance(results[0], Unavailable)
    other.close()


def test_tenants_have_their_orders_copied_in_turn(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    client = pair.source.connect(tenant="blue")
    assert set(client.put(VALUES)) == {1}
    client.close()
    gate = Gate(monkeypatch)
    for name in ("k0", "k1", "k2"):
        assert pair.send(pair.order([name])) == [1]
    gate.await_fetch()
    assert pair.send(pair.order(["k0"], tenant="blue")) == [1]
    gate.open()
    pair.settle()
    assert [report.tenant for report in pair.ruler.reports] == ["red", "red", "blue", "red"]


@pytest.mark.promise("failures-typed")
@pytest.mark.parametrize("place", ["store.table.commit_granted", "replica_queue._sort_out"])
def test_an_internal_error_ends_only_its_batch(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    def fail(*_: object) -> bool:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        owner, _, name = place.rpartition(".")
        patch.setattr(attrgetter(owner)(pair.target), name, fail)
        pair.send(pair.order(["k0", "k1"]))
        pair.until(lambda: not len(pair.target.replica_queue))
    assert "a bug" in caplog.text
    assert pair.target.call(lambda: pair.target.store.table.open_puts) == 0
    assert pair.copy("k2") == [1]
    assert set(pair.blocks()) == {"k2"}


@pytest.mark.promise("copies-versioned")
def test_waiting_puts_precede_replicas(pair: Pair, client: Client) -> None:
    opened = client.open({f"p{number}": 4 * KIB for number in range(64)})
    assert set(opened.statuses) == {0}
    other = pair.target.connect()
    thread, results = in_background(lambda: other.put({"waits": bytes(4 * KIB)}))
    pair.until(lambda: len(pair.target.waiting) == 1)
    pair.send(pair.order(["k0"]))
    client.close()
    thread.join()
    other.close()
    assert results == [[1]]
    pair.target.call(pair.target.replica_queue.step)
    pair.settle()
    assert set(pair.blocks()) == {"waits", "k0"}


def put_undecided(pair: Pair, name: str, value: bytes) -> Block:
    """A block that a client of the target has put, and that the master has not decided about."""

    def put() -> Block:
        table = pair.target.store.table
        opened = table.open(made("red", name.encode(), len(value), UNCOMMITTED), "writer", now_ns=0)
        assert opened is not None
        pair.target.store.dram.view(opened.slot)[:] = value
        return table.store_uncommitted(opened, digest(value))

    return pair.target.call(put)


def test_a_replica_of_an_uncommitted_key_waits_for_its_commit(pair: Pair) -> None:
    ours = put_undecided(pair, "k1", b"mine")
    assert pair.send(pair.order(["k0", "k1"])) == [1, 1], "else the master takes the node for a full one"
    pair.until(lambda: sum(pair.target.replica_queue.copied_blocks) == 1)
    assert pair.target.call(lambda: (len(pair.target.replica_queue), pair.target.store.table.uncommitted.is_awaited)) == (1, True)
    pair.target.call(lambda: pair.target.store.table.copies.drop(ours))
    pair.settle()
    assert {name: block.checksum for name, block in pair.blocks().items()} == {name: digest(VALUES[name]) for name in ("k0", "k1")}


def test_a_lost_order_of_an_uncommitted_key_frees_its_share(pair: Pair) -> None:
    """Else its prefetch counts against the limit, and is not requested again, until it expires."""
    ours, prefetched = put_undecided(pair, "k1", b"mine"), pair.target.store.table.prefetched
    pair.target.call(lambda: prefetched.await_copies("red", [b"k1"], pair.target.replica_queue._reactor.now_ns()))
    assert pair.send(pair.order(["k1"])) == [1]
    pair.target.call(lambda: pair.target.replica_queue.link_up(pair.ruler.ask, EPOCH + 1))
    pair.target.call(lambda: pair.target.store.table.copies.drop(ours))
    pair.settle()
    assert pair.counters() == (0, 0, 1)
    assert pair.target.call(lambda: (prefetched.awaited, prefetched.unread_bytes)) == (0, 0)


def test_replicas_are_counted_by_reason(pair: Pair) -> None:
    assert pair.send(replace(pair.order(["k0", "k1"]), reason=COPY_HOME)) == [1, 1]
    assert pair.send(pair.order(["k2"])) == [1]
    pair.settle()
    found = pair.target.call(pair.target.replica_queue.counters)
    assert {name.removeprefix("copied_blocks_"): count for name, count in found.items() if name.startswith("copied_blocks_") and count} == {
        "home": 2,
        "replica": 1,
    }
    assert found["copied_bytes_home"] == len(VALUES["k0"]) + len(VALUES["k1"])
    answer = pair.master.ask(replace(pair.order(["k3"]), reason=len(COPY_REASONS)))
    assert isinstance(answer, Failure)
    assert "reason 5" in answer.text


def test_a_quantized_replica_keeps_the_blocks_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = tensor_value(1)
    monkeypatch.setitem(VALUES, "tensor", value)
    (tmp_path / "s").mkdir()
    (tmp_path / "t").mkdir()
    with (
        served(tmp_path / "s", dram_bytes=1 << 20, nvme_bytes=1 << 20, codec="fp8-head") as source,
        served(tmp_path / "t", dram_bytes=1 << 20, nvme_bytes=1 << 20, codec="int8") as target,
    ):
        pair = Pair(source, target)
        source.demote("tensor", "k1")
        assert pair.copy("tensor", "k1", "k2") == [1, 1, 1]
        block = pair.blocks()["tensor"]
        assert (block.size_bytes, block.checksum, block.generation) == (len(value), digest(value), 1), "as the master knows it"
        assert block.checksum_in(DRAM) == digest(after("fp8-head", value))
        assert not pair.blocks()["k1"].lossy
        client = target.connect()
        assert client.read("tensor", "k1", inline_bytes=1 << 20)[1] == [after("fp8-head", value), VALUES["k1"]]
        for _ in range(2):  # the target's own codec would change it once more, so it is refused
            target.call(lambda: target.store.table.evictor.evict(block, target.store.table._ingest_tier))
            target.settled()
        assert block.tier_mask() == 4
        assert client.read("tensor")[1] == [after("fp8-head", value)]
        client.close()
        pair.check()
        pair.master.close()


def test_batches_of_a_traced_order_have_child_spans(pair: Pair) -> None:
    spans = Spans()
    pair.source.server.tracer = spans
    assert pair.copy("k1") == [1]
    assert (spans.told, pair.ruler.calls) == ([], [None])
    order = pair.order(["k2", "k3"])
    hello = Hello(ROLE_NODE, order.tenant, "", "target", order.epoch)
    assert list(pair.target.call(lambda: pair.target.replica_queue.take(order, hello, Part(spans, "order")))) == [1, 1]
    pair.settle()
    assert spans.parts == [("kvstore.node.fetch_copies", {"kvstore.blocks": 2})]
    assert {(kind, parent) for kind, parent, _error in spans.told} == {(ReadBlocks.TYPE, PLACE)}
    [_, call] = pair.ruler.calls
    assert call is not None
    assert call.parent == PLACE
    pair.check()
