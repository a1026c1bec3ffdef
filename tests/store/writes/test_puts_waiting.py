"""Tests of the timing of puts: which wait for a slot and how long, and that a put is answered once the master has it."""

from collections.abc import Iterator

import pytest

from kvstore.protocol.errors import (
    DeadlineExceeded,
    Full,
    TierFailed,
)
from kvstore.protocol.message import BUSY, GRANTED, PRESENT
from kvstore.protocol.node_messages import ALREADY_STORED, RETRY_LATER, STORED, AbortPuts, OpenSlots, Put
from kvstore.protocol.session_messages import Ok
from tests.rpc.traced import Spans, sampled
from tests.rpc.wires import frame
from tests.store.served import TIMEOUT_S, Client, Served, in_background, until

KIB = 1024


# --- waiting ---


@pytest.mark.parametrize("through_socket", [False, True])
def test_a_put_waits_for_a_free_slot(node: Served, client: Client, through_socket: bool) -> None:
    other = node.connect()
    held = other.open({"a": 16 * KIB})

    def ask() -> list[int]:
        return client.put({"b": bytes(16 * KIB)}) if through_socket else list(client.open({"b": 16 * KIB}).statuses)

    thread, results = in_background(ask)
    until(node, lambda: len(node.waiting) == 1)
    other.ask(AbortPuts(list(held.put_ids)), Ok)
    thread.join(TIMEOUT_S)
    assert results == [[STORED if through_socket else GRANTED]]
    other.close()


def test_a_traced_put_has_a_span_for_its_wait(node: Served) -> None:
    spans = Spans()
    node.server.tracer = spans
    client, other = node.connect(), node.connect()
    held = other.open({"a": 16 * KIB})

    def put() -> list[int]:
        with sampled():
            return client.put({"b": bytes(16 * KIB)})

    thread, results = in_background(put)
    until(node, lambda: len(node.waiting) == 1)
    assert spans.parts == []
    other.ask(AbortPuts(list(held.put_ids)), Ok)
    thread.join(TIMEOUT_S)
    assert results == [[STORED]]
    until(node, lambda: [kind for kind, _, _ in spans.told] == [Put.TYPE])
    assert spans.parts == [("kvstore.node.wait_for_room", {})]
    client.close()
    other.close()


@pytest.mark.promise("put-bounded-wait")
def test_a_put_that_waits_in_vain_fails_with_full(node: Served, client: Client) -> None:
    other = node.connect()
    other.open({"a": 16 * KIB})
    for message in (lambda: client.open({"b": KIB}), lambda: client.put({"b": bytes(KIB)})):
        thread, results = in_background(message)
        until(node, lambda: len(node.waiting) == 1)
        node.call(lambda: node.waiting.expire(now_ns=node.reactor.now_ns() + 3600 * 10**9))
        thread.join(TIMEOUT_S)
        assert isinstance(results[0], Full)
    other.close()
    until(node, lambda: node.store.table.open_puts == 0)
    assert client.put({"b": bytes(KIB)}) == [STORED]


def test_later_puts_queue_behind_earlier_ones(node: Served, client: Client) -> None:
    other, small = node.connect(), node.connect()
    held = other.open({"a": 12 * KIB})
    first, large_result = in_background(lambda: client.put({"large": bytes(16 * KIB)}))
    until(node, lambda: len(node.waiting) == 1)
    second, small_result = in_background(lambda: small.put({"small": b"x"}))
    until(node, lambda: len(node.waiting) == 2)
    other.ask(AbortPuts(list(held.put_ids)), Ok)
    first.join(TIMEOUT_S)
    second.join(TIMEOUT_S)
    assert (large_result, small_result) == ([[STORED]], [[STORED]])
    other.close()
    small.close()


@pytest.fixture
def waiting(node: Served, client: Client) -> Iterator[None]:
    """Tenant red has the block `old`, which is pinned, and 4 KiB free, and waits for 16 KiB."""

    def pin(pinned: bool) -> None:
        block = node.store.table.find("red", b"old")
        assert block is not None
        block.pinned = pinned

    client.put({"old": b"x"})
    node.call(lambda: pin(True))
    held = client.open({"held": 8 * KIB})
    other = node.connect()
    thread, results = in_background(lambda: other.put({"large": bytes(16 * KIB)}))
    until(node, lambda: len(node.waiting) == 1)
    yield
    assert results == []
    node.call(lambda: pin(False))
    client.ask(AbortPuts(list(held.put_ids)), Ok)
    thread.join(TIMEOUT_S)
    assert results == [[STORED]]
    other.close()


@pytest.mark.promise("no-wait-for-peers")
@pytest.mark.promise("put-bounded-wait")
@pytest.mark.parametrize("through_socket", [False, True])
@pytest.mark.usefixtures("waiting")
def test_a_put_waits_behind_its_own_tenant_only(node: Served, through_socket: bool) -> None:
    blue = node.connect(tenant="blue")
    if through_socket:
        assert blue.put({"a": bytes(KIB)}) == [STORED]
    else:
        opened = blue.open({"a": KIB})
        assert list(opened.statuses) == [GRANTED]
        blue.ask(AbortPuts(list(opened.put_ids)), Ok)
    blue.close()


@pytest.mark.promise("no-wait-for-peers")
@pytest.mark.promise("put-bounded-wait")
@pytest.mark.usefixtures("waiting")
def test_a_put_of_a_present_key_does_not_wait(client: Client) -> None:
    assert client.put({"old": b"x"}) == [ALREADY_STORED]
    assert list(client.open({"old": 1}).statuses) == [PRESENT]
    assert client.put({"old": b"x", "new": b"y"}) == [ALREADY_STORED, RETRY_LATER], (
        "and the rest of its batch waits when it is asked for alone"
    )
    assert list(client.open({"new": 1, "old": 1}).statuses) == [BUSY, PRESENT]


def test_a_disconnected_waiting_put_is_dropped(node: Served, client: Client) -> None:
    other = node.connect()
    other.open({"a": 16 * KIB})
    sock = client.channel.detach()
    sock.sendall(frame(OpenSlots("ns", [b"b"], [KIB], [1], [b""])))
    until(node, lambda: len(node.waiting) == 1)
    sock.close()
    until(node, lambda: len(node.waiting) == 0)
    other.close()


def test_a_put_without_system_memory_leaves_nothing_open(node: Served, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's refusal is injected below the tier, where a slab's memory is allocated."""

    def refuse(slab: int, slot_bytes: int, count: int, tenant: str) -> int:
        raise TierFailed("no descriptor is left")

    client.put({"warm": bytes(KIB)})
    monkeypatch.setattr(node.store.dram._pool, "acquire", refuse)
    with pytest.raises(TierFailed):
        client.open({"a": KIB, "b": 2 * KIB})
    assert node.call(lambda: node.store.table.open_puts) == 0
    with pytest.raises(TierFailed):
        client.put({"a": bytes(KIB), "b": bytes(2 * KIB)})
    assert node.call(lambda: node.store.table.open_puts) == 0
    assert client.put({"a": bytes(KIB)}) == [STORED]
    other = node.connect()
    assert list(other.open({"c": KIB}).slabs_ahead) == [], "a slab ahead of need is no reason to fail"
    other.close()


# --- faults of ours ---


@pytest.mark.promise("failures-typed")
@pytest.mark.parametrize("is_waiting", [False, True])
@pytest.mark.parametrize("through_socket", [False, True])
def test_an_internal_error_in_a_put_leaves_nothing_open(
    node: Served, client: Client, monkeypatch: pytest.MonkeyPatch, through_socket: bool, is_waiting: bool
) -> None:
    """In its own frame or in another's."""

    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    other = node.connect()
    held = other.open({"held": 16 * KIB}) if is_waiting else None
    thread, results = in_background(lambda: client.put({"a": bytes(KIB)}) if through_socket else client.open({"a": KIB}))
    if held is not None:
        until(node, lambda: len(node.waiting) == 1)
        with monkeypatch.context() as patch:
            patch.setattr(node.store.dram, "view" if through_socket else "locate_all", fail)
            other.ask(AbortPuts(list(held.put_ids)), Ok)
            thread.join(TIMEOUT_S)
    else:
        thread.join(TIMEOUT_S)
        with monkeypatch.context() as patch:
            patch.setattr(node.store.dram, "view" if through_socket else "locate_all", fail)
            thread, results = in_background(lambda: client.put({"b": bytes(KIB)}) if through_socket else client.open({"b": KIB}))
            thread.join(TIMEOUT_S)
    assert [str(result) for result in results] == ["internal error: RuntimeError: a bug"]
    assert node.call(lambda: node.store.table.puts.of_key("red", b"b" if held is None else b"a")) is None
    assert client.put({"c": b"c"}) == [STORED]
    other.close()


# --- publication ---


def test_a_put_is_answered_once_the_master_has_it(node: Served, client: Client) -> None:
    node.acknowledges = False
    thread, results = in_background(lambda: client.put({"a": b"x"}))
    until(node, lambda: len(node.unanswered) == 1)
    assert results == []
    node.call(lambda: node.unanswered.pop()(None))
    thread.join(TIMEOUT_S)
    assert results == [[STORED]]


def test_an_unreachable_master_is_a_deadline_and_keeps_the_block(node: Served, client: Client) -> None:
    node.acknowledges = False
    thread, results = in_background(lambda: client.put({"a": b"x"}))
    until(node, lambda: len(node.unanswered) == 1)
    assert node.call(lambda: node.commit_waits.expire(now_ns=node.reactor.now_ns())) == 0
    assert node.call(lambda: node.commit_waits.expire(now_ns=node.reactor.now_ns() + 10 * 10**9)) == 1
    thread.join(TIMEOUT_S)
    assert isinstance(results[0], DeadlineExceeded)
    assert "not confirmed" in str(results[0])
    node.call(lambda: node.unanswered.pop()(None))
    assert client.put({"a": b"x"}) == [ALREADY_STORED]
    assert client.read("a")[1] == [b"x"]
