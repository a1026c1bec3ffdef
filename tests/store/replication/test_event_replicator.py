"""Tests of event_replicator.py: the inventory first, then events in order; waiters are notified exactly when the master
has made their events durable, over any number of links."""

import random
from collections.abc import Callable, Iterator, Sequence
from unittest.mock import patch

import pytest

from kvstore.protocol.catalog_messages import (
    EVENT_COMMIT,
    EVENT_MOVED,
    EVENT_REMOVED,
    PHASE_STREAM,
    PHASE_SYNC,
    PHASE_SYNC_BEGIN,
    PHASE_SYNC_END,
    Digests,
    Publish,
)
from kvstore.protocol.errors import InvalidArgument, KVStoreError, Unavailable
from kvstore.protocol.session_messages import Flags
from kvstore.protocol.traceparent import TraceParent
from kvstore.rpc.tracing import CALL, SampledCall
from kvstore.store.block_table.block import DRAM, NVME, Block
from kvstore.store.block_table.partition_map import PartitionMap
from kvstore.store.replication.event_replicator import PARTS_PER_MESSAGE, EventReplicator, EventReplicators
from kvstore.store.replication.inventory_comparison import InventoryComparison
from kvstore.tiers.tier import Slot
from tests.rpc.traced import Part, Spans
from tests.store.made import made

Answer = Callable[[KVStoreError | None], None]

FROM = 64
"""Blocks that are known, from which on inventories are compared."""

Answered = Callable[[KVStoreError | None], None]

COUNT = 3

BLOCKS = [made("red", b"key-%d" % number, 1, 1) for number in range(20)]


class Link:
    """A link to a master that answers on the test's command."""

    def __init__(self) -> None:
        self.sent: list[Publish] = []
        self.answers: list[Answer] = []

    def send(self, message: Publish, answered: Answer) -> None:
        self.sent.append(Publish.unpack(message.pack()))
        self.answers.append(answered)

    def answer(self, count: int = 1) -> None:
        for _ in range(count):
            self.answers.pop(0)(None)

    def answer_all(self) -> None:
        while self.answers:
            self.answers.pop(0)(None)

    def said(self) -> list[tuple[int, str]]:
        """(phase, keys) of each message so far."""
        said = [(message.phase, b"".join(message.keys).decode()) for message in self.sent]
        self.sent.clear()
        return said


class Node:
    """A publisher, the blocks it is to know, and what it called back."""

    def __init__(self, *, batch_events: int = 3, max_in_flight: int = 2, holds_back: bool = False) -> None:
        self.blocks: dict[str, Block] = {}
        self.timers: list[Callable[[], None]] = []
        """Callbacks of the batching delay."""
        self.replicator = EventReplicator(
            self.parts,
            batch_events=batch_events,
            max_in_flight=max_in_flight,
            later=self.timers.append if holds_back else None,
        )
        self.synced = 0
        self.heard: list[str] = []
        self.refusals: list[KVStoreError] = []
        self.replicator.on_refused = self.refusals.append

    def parts(self) -> Iterator[list[Block]]:
        return iter([list(self.blocks.values())])

    def link_up(self, epoch: int = 1) -> Link:
        link = Link()
        self.replicator.link_up(link.send, epoch, self._on_synced)
        return link

    def synced_link(self) -> Link:
        link = self.link_up()
        link.answer_all()
        link.sent.clear()
        return link

    def commit(self, name: str, tenant: str = "red", namespace: str = "ns") -> Block:
        block = made(tenant, name.encode(), 10, 1, namespace, b"p", checksum=7)
        block.set_slot(DRAM, Slot(1, 1, 10))
        self.blocks[name] = block
        self.replicator.emit(EVENT_COMMIT, block)
        return block

    def gone(self, name: str) -> None:
        block = self.blocks.pop(name)
        block.is_dropped = True
        self.replicator.emit(EVENT_REMOVED, block)

    def wait_for(self, name: str, seq: int | None = None) -> None:
        seq = self.replicator._seq if seq is None else seq
        self.replicator.when_published(seq, lambda error: self.heard.append(name if error is None else f"{name}: {type(error).__name__}"))

    def _on_synced(self) -> None:
        self.synced += 1


@pytest.fixture
def node() -> Node:
    return Node()


def blocks(*names: str) -> list[Block]:
    """New ones, of these keys."""
    return [made("red", name.encode(), 10, 0) for name in names]


def test_evictions_are_sent_beyond_the_window_before_a_commit() -> None:
    node = Node(batch_events=1, max_in_flight=1)
    link = node.synced_link()
    for name in "abc":
        node.commit(name)
    node.gone("b")
    node.replicator.send_evictions(blocks("a", "c"))
    assert link.said() == [(PHASE_STREAM, "a")], "of these nothing is to be said"
    node.commit("d")
    node.replicator.send_evictions(blocks("a", "b"))
    assert link.said() == [(PHASE_STREAM, name) for name in "bcb"]
    node.replicator.send_evictions(blocks("b"))
    assert link.said() == []
    link.answer_all()
    node.replicator.flush_now()
    assert link.said() == [(PHASE_STREAM, "d")]


def test_an_eviction_is_sent_before_the_inventory_is_complete() -> None:
    node = Node(max_in_flight=2)
    for name in "abcdefg":
        node.commit(name)
    link = node.link_up()
    node.gone("a")
    node.gone("d")
    node.replicator.send_evictions(blocks("b", "new"))
    assert link.said() == [(PHASE_SYNC_BEGIN, ""), (PHASE_SYNC, "abc")]
    node.replicator.send_evictions(blocks("d"))
    assert link.said() == [(PHASE_STREAM, "ad")]
    link.answer_all()
    assert link.said() == [(PHASE_SYNC, "ef"), (PHASE_SYNC, "g"), (PHASE_SYNC_END, "")]


@pytest.mark.promise("no-wait-for-peers")
def test_a_message_of_the_inventory_reads_few_parts() -> None:
    """Of many partitions: nearly all of a part belongs to others, and the loop must not stop for a full message."""
    read = list[int]()

    def parts() -> Iterator[list[Block]]:
        for number in range(40):
            read.append(number)
            yield BLOCKS[number : number + 1] if number in (9, 10) else []

    link = Link()
    replicator = EventReplicator(parts, batch_events=100, max_in_flight=1)
    replicator.link_up(link.send, 1, lambda: None)
    most = 0
    while link.answers:
        before = len(read)
        link.answer()
        most = max(most, len(read) - before)
    assert (most, len(read)) == (PARTS_PER_MESSAGE, 40)
    said = [keys for phase, keys in link.said() if phase == PHASE_SYNC and keys]
    assert said == ["key-9key-10"]
    assert replicator.is_synced


def test_events_without_waiters_are_batched() -> None:
    node = Node(holds_back=True)
    link = node.synced_link()
    assert node.timers == [], "an inventory waits for nothing"
    for name in "ab":
        node.commit(name)
        node.replicator.flush()
    assert link.said() == []
    assert not node.replicator.has_sent_all
    assert len(node.timers) == 1
    node.timers.pop()()
    node.replicator.flush()
    assert link.said() == [(PHASE_STREAM, "ab")]
    node.commit("c")
    node.replicator.flush()
    assert link.said() == [], "and so do the next ones"
    assert len(node.timers) == 1


def test_awaited_events_and_earlier_ones_are_sent_at_once() -> None:
    node = Node(holds_back=True)
    link = node.synced_link()
    node.commit("a")
    node.replicator.flush()
    waited_for = node.commit("b")
    answers: list[KVStoreError | None] = []
    node.replicator.when_published(waited_for.event_seq, answers.append)
    node.replicator.flush()
    assert link.said() == [(PHASE_STREAM, "ab")]
    node.commit("c")
    node.replicator.flush_now()
    assert link.said() == [(PHASE_STREAM, "c")]
    link.answer_all()
    assert answers == [None]


def test_event_columns_describe_their_block(node: Node) -> None:
    link = node.link_up(epoch=9)
    link.answer_all()
    first, second = node.commit("a"), node.commit("b", "blue", "other")
    second.set_slot(NVME, Slot(2, 1, 10))
    link.sent.clear()
    node.replicator.flush()
    assert link.sent == [
        Publish(
            epoch=9,
            phase=PHASE_STREAM,
            tenants=["red", "blue"],
            namespaces=["ns", "other"],
            keys=[b"a", b"b"],
            kinds=bytes((EVENT_COMMIT, EVENT_COMMIT)),
            tenant_indexes=link.sent[0].tenant_indexes,
            namespace_indexes=link.sent[0].namespace_indexes,
            sizes=link.sent[0].sizes,
            checksums=link.sent[0].checksums,
            generations=link.sent[0].generations,
            tiers=bytes((2, 6)),
            parents=[b"p", b"p"],
        )
    ]
    message = link.sent[0]
    assert list(message.tenant_indexes) == list(message.namespace_indexes) == [0, 1]
    assert (list(message.sizes), list(message.checksums), list(message.generations)) == ([10] * 2, [7] * 2, [1] * 2)
    assert first.event_seq == 1
    assert second.event_seq == 2


def test_moves_of_a_queued_block_are_coalesced(node: Node) -> None:
    """So the queue does not grow by moves while the master accepts nothing."""
    link = node.link_up()
    link.answer_all()
    said = node.commit("a")
    node.replicator.flush()
    unsaid = node.commit("b")
    for slot in (Slot(2, 1, 10), None) * 50 + (Slot(2, 1, 10),):
        for block in (said, unsaid):
            block.set_slot(NVME, slot)
            node.replicator.emit(EVENT_MOVED, block)
    assert node.replicator.backlog == 3
    link.sent.clear()
    link.answer_all()
    node.replicator.flush()
    told = [(message.keys, bytes(message.kinds), message.tiers) for message in link.sent if message.keys]
    assert told == [([b"b", b"a"], bytes((EVENT_COMMIT, EVENT_MOVED)), b"\6\6")]
    assert said.event_seq == 3


@pytest.mark.promise("no-wait-for-peers")
def test_waiters_of_new_events_do_not_wait_for_the_inventory(node: Node) -> None:
    node.commit("a")
    node.wait_for("a")
    link = node.link_up()
    for name in "bc":
        node.commit(name)
        node.wait_for(name)
    node.replicator.when_published(3, lambda _error: node.heard.append("a to c"), oldest=1)
    link.answer(2)
    assert link.said()[2:] == [(PHASE_STREAM, "bc"), (PHASE_SYNC_END, "")]
    assert node.heard == []
    link.answer()
    assert node.heard == ["b", "c"]
    assert (node.replicator.is_published(3, 2), node.replicator.is_published(2, 1), node.replicator.backlog) == (True, False, 3)
    link.answer()
    assert node.heard == ["b", "c", "a", "a to c"]
    assert node.replicator.backlog == 0


def test_awaited_blocks_are_committed_first_on_the_next_link(node: Node) -> None:
    """Regression: a put during a failover waited until ten million blocks were compared with the next owner."""
    known, waited_for, gone = (node.commit(name) for name in "abc")
    told: list[tuple[str, KVStoreError | None]] = []
    for name, of in (("put", [waited_for, gone]), ("put of what is gone", [gone])):
        seqs = [block.event_seq for block in of]
        node.replicator.when_published(max(seqs), lambda error, name=name: told.append((name, error)), oldest=min(seqs), blocks=of)  # type: ignore[misc]
    node.gone("c")
    link = node.link_up()
    assert known.event_seq < waited_for.event_seq
    link.answer()
    assert link.said() == [(PHASE_SYNC_BEGIN, ""), (PHASE_STREAM, "b"), (PHASE_SYNC, "ab")]
    link.answer()
    assert told == [("put", None)]
    link.answer_all()
    assert told == [("put", None), ("put of what is gone", None)]


def test_waiters_are_notified_in_order_when_events_are_durable(node: Node) -> None:
    link = node.synced_link()
    node.commit("a")
    node.replicator.flush()
    node.commit("b")
    node.replicator.flush()
    node.wait_for("b")
    node.wait_for("a", seq=1)
    assert node.replicator.backlog == 2
    link.answer()
    assert node.heard == ["a"]
    link.answer()
    assert node.heard == ["a", "b"]
    node.wait_for("at once", seq=2)
    assert node.heard[-1] == "at once"


def test_an_early_answer_makes_no_event_durable(node: Node) -> None:
    link = node.synced_link()
    node.commit("a")
    node.replicator.flush()
    node.commit("b")
    node.replicator.flush()
    node.wait_for("both")
    link.answers.pop(1)(None)
    assert node.heard == []
    assert node.replicator.backlog == 2
    link.answer()
    assert node.heard == ["both"]


def test_events_without_a_link_are_covered_by_the_inventory(node: Node) -> None:
    node.commit("a")
    node.wait_for("a")
    node.replicator.flush()
    assert node.heard == []
    link = node.link_up()
    link.answer_all()
    assert link.said() == [(PHASE_SYNC_BEGIN, ""), (PHASE_SYNC, "a"), (PHASE_SYNC_END, "")]
    assert node.heard == ["a"]


def test_answers_of_a_lost_link_are_ignored(node: Node) -> None:
    old = node.synced_link()
    node.commit("a")
    node.replicator.flush()
    node.wait_for("a")
    node.replicator.link_down()
    assert not node.replicator.is_synced
    old.answer_all()
    assert node.heard == []
    new = node.link_up()
    new.answer_all()
    assert node.heard == ["a"]
    assert node.synced == 2


def test_a_late_error_of_a_lost_link_does_not_end_the_new_one(node: Node) -> None:
    old = node.synced_link()
    node.commit("a")
    node.replicator.flush()
    [late] = old.answers
    new = node.link_up()
    late(Unavailable("the connection broke"))
    assert node.refusals == []
    new.answer_all()
    assert node.replicator.is_synced


def test_moves_before_the_inventory_is_durable_are_commits(node: Node) -> None:
    block = node.commit("a")
    link = node.link_up()
    block.set_slot(NVME, Slot(2, 1, 10))
    node.replicator.emit(EVENT_MOVED, block)
    link.answer_all()
    node.replicator.emit(EVENT_MOVED, block)
    node.replicator.flush()
    sent = [(message.phase, bytes(message.kinds), message.tiers) for message in link.sent if message.keys]
    assert sent == [
        (PHASE_SYNC, bytes([EVENT_COMMIT]), b"\2"),
        (PHASE_STREAM, bytes([EVENT_COMMIT]), b"\6"),
        (PHASE_STREAM, bytes([EVENT_MOVED]), b"\6"),
    ]


@pytest.mark.promise("no-wait-for-peers")
@pytest.mark.parametrize("seed", range(30))
def test_a_model_master_converges_despite_broken_links(seed: int) -> None:
    choice = random.Random(seed)
    node = Node(batch_events=choice.randint(1, 4), max_in_flight=choice.randint(1, 3))
    link = node.link_up()
    known: dict[str, int] = {}
    named: set[str] = set()
    durable_names: set[str] = set()
    in_sync = False

    def believe(message: Publish) -> None:
        nonlocal in_sync
        if message.phase == PHASE_SYNC_BEGIN:
            in_sync = True
            named.clear()
        for key, kind, mask in zip(message.keys, message.kinds, message.tiers, strict=True):
            name = key.decode()
            if kind == EVENT_REMOVED:
                known.pop(name, None)
            else:
                known[name] = mask
                named.add(name)
        if message.phase == PHASE_SYNC_END:
            in_sync = False
            for name in known.keys() - named:
                del known[name]

    def take(count: int) -> None:
        for _ in range(min(count, len(link.answers))):
            believe(link.sent.pop(0))
            link.answers.pop(0)(None)

    for step in range(200):
        match choice.choice(("commit", "commit", "gone", "flush", "take", "take", "break")):
            case "commit":
                name = f"{step}"
                node.commit(name)
                node.wait_for(name)
            case "gone" if node.blocks:
                node.gone(choice.choice(list(node.blocks)))
            case "flush":
                node.replicator.flush()
            case "take":
                take(choice.randint(1, 3))
            case "break" if choice.random() < 0.2:
                node.replicator.link_down()
                link = node.link_up()
        durable_names = set(node.heard)
        assert not in_sync or not node.replicator.is_synced
        assert all(name in known for name in durable_names if name in node.blocks)
    for _ in range(200):
        node.replicator.flush()
        take(9)
    assert known.keys() == node.blocks.keys()
    assert node.replicator.backlog == 0
    assert len(node.heard) == len(set(node.heard))
    assert set(node.heard) >= set(node.blocks)


# --- traces ---
class TracedLink(Link):
    """Records the traces of each message."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[bytes] = []

    def send(self, message: Publish, answered: Answer) -> None:
        super().send(message, answered)
        call = CALL.get()
        self.calls.append(call.frame if call is not None else b"")


def announced(*span_ids: int) -> bytes:
    return b"".join(SampledCall(TraceParent(7, span_id)).frame for span_id in span_ids)


def test_a_message_carries_the_traces_of_its_waiters() -> None:
    node, spans, link = Node(batch_events=2, max_in_flight=9), Spans(), TracedLink()
    replicator = node.replicator
    replicator.link_up(link.send, 1, lambda: None)
    link.answer_all()
    link.calls.clear()
    waits = [Part(spans, "", place=TraceParent(7, number)) for number in range(1, 5)]
    for name, span in zip("abc", waits, strict=False):
        block = made("red", name.encode(), 1, 1, "ns", dram=Slot(0, 0, 1))
        replicator.emit(EVENT_COMMIT, block)
        replicator.when_published(replicator._seq, lambda _error: None, span)
    replicator.when_published(replicator._seq, lambda _error: None)
    replicator.flush()
    assert link.calls == [announced(1, 2), announced(3)]
    replicator.when_published(replicator._seq, lambda _error: None, waits[3])
    replicator.emit(EVENT_REMOVED, made("red", b"a", 1, 1, "ns"))
    replicator.flush()
    assert link.calls[2:] == [b""], "what the last one waits for had been said before"
    link.answer_all()
    heard = list[object]()
    replicator.when_published(replicator._seq, heard.append, waits[0])
    assert heard == [None], "nothing is left to wait for"


class Compared:
    """A node of so many blocks with a new link, whose master compares on the test's command."""

    def __init__(self, count: int, known_blocks: int) -> None:
        self.node = Node()
        self.turns: list[Callable[[], None]] = []
        self.node.replicator = EventReplicator(
            self.node.parts, batch_events=100, max_in_flight=2, soon=self.turns.append, compare_from_blocks=FROM
        )
        self.node.replicator.on_refused = self.node.refusals.append
        for at in range(count):
            self.node.commit(f"<{at}>").generation = at + 1
        self.link = Link()
        self.digests: list[Digests] = []
        self.answers: list[Callable[[Flags | KVStoreError], None]] = []
        self.node.replicator.link_up(self.link.send, 1, self.node._on_synced, compare=self.compare, known_blocks=known_blocks)

    def compare(self, message: Digests, answered: Callable[[Flags | KVStoreError], None]) -> None:
        self.digests.append(message)
        self.answers.append(answered)

    def run(self) -> None:
        while self.turns:
            self.turns.pop(0)()


def test_incremental_resync_sends_only_differences() -> None:
    found = Compared(80, FROM)
    assert found.link.said() == [(PHASE_SYNC_BEGIN, "")]
    found.run()
    found.link.answer_all()
    assert found.link.said() == []
    found.answers[0](Flags(b"\1\1\0"))
    assert found.link.said() == [(PHASE_SYNC, "".join(f"<{at}>" for at in range(64, 80))), (PHASE_SYNC_END, "")]
    found.link.answer_all()
    assert found.node.synced == 1


@pytest.mark.promise("no-wait-for-peers")
def test_events_do_not_wait_for_the_comparison() -> None:
    found = Compared(80, FROM)
    found.link.answer_all()
    found.link.said()
    found.node.gone("<0>")
    found.node.commit("new")
    found.node.wait_for("new")
    assert not found.node.replicator.has_sent_all
    found.node.replicator.flush()
    assert found.link.said() == [(PHASE_STREAM, "<0>new")]
    assert found.node.replicator.has_sent_all
    found.link.answer_all()
    assert found.node.heard == ["new"]
    found.run()
    found.answers[0](Flags(b"\1\0\1"))
    assert found.link.said() == [(PHASE_SYNC, "".join(f"<{at}>" for at in range(33, 65))), (PHASE_SYNC_END, "")]


def test_a_comparison_ends_with_its_link() -> None:
    broken, refused = Compared(80, 80), Compared(80, 80)
    broken.node.replicator.link_down()
    broken.run()
    assert not broken.digests
    refused.run()
    refused.answers[0](InvalidArgument("no"))
    assert [type(error) for error in refused.node.refusals] == [InvalidArgument]
    assert not refused.node.replicator.has_sent_all


def test_a_failed_comparison_sends_the_full_inventory() -> None:
    found = Compared(80, FROM)
    with patch.object(InventoryComparison, "_order_all", side_effect=MemoryError):
        found.run()
    found.link.answer_all()
    assert found.link.said() == [
        (PHASE_SYNC_BEGIN, ""),
        (PHASE_SYNC, "".join(f"<{at}>" for at in range(80))),
        (PHASE_SYNC_END, ""),
    ]
    assert found.node.synced == 1


def test_an_unreadable_inventory_reconnects(node: Node) -> None:
    """Ending the inventory would drop the blocks that were not reached."""
    read = node.parts

    def parts() -> Iterator[list[Block]]:
        yield from read()
        raise MemoryError

    node.replicator._parts = parts
    for name in "abcd":
        node.commit(name)
    link = node.link_up()
    link.answer_all()
    assert link.said() == [(PHASE_SYNC_BEGIN, ""), (PHASE_SYNC, "abc")]
    assert [type(error) for error in node.refusals] == [KVStoreError]
    node.replicator._parts = read
    node.synced_link()
    assert node.replicator.is_synced


@pytest.mark.parametrize("is_commit_in_flight", [False, True])
def test_events_lost_to_memory_errors_are_resynced(is_commit_in_flight: bool) -> None:
    """Otherwise they would never be sent, and later events never be durable."""
    node = Node(max_in_flight=1)
    node.commit("a")
    link = node.synced_link()
    if is_commit_in_flight:
        node.commit("b")
        node.replicator.flush_now()  # the window is full
    node.gone("a")
    node.commit("c")
    node.wait_for("c")
    with patch("kvstore.store.replication.event_replicator._message", side_effect=MemoryError):
        if is_commit_in_flight:
            node.replicator.send_evictions(blocks("a"))
        else:
            node.replicator.flush()
    assert [type(error) for error in node.refusals] == [KVStoreError]
    link.answer_all()
    assert node.heard == []
    new = node.link_up()
    new.answer_all()
    assert [keys for _phase, keys in new.said()] == ["", "bc" if is_commit_in_flight else "c", ""]
    assert node.heard == ["c"]


class Told:
    """Publishers of `COUNT` partitions, and what each one's master hears."""

    def __init__(self, count: int = COUNT, *, moved_before: Sequence[Block] = ()) -> None:
        """Some moved before anything was known of partitions."""
        self.partition_map = PartitionMap()
        self.held: list[Block] = list(moved_before)
        self.replicators = EventReplicators(
            lambda: self.held, self.partition_map, lambda parts: EventReplicator(parts, batch_events=100, max_in_flight=100)
        )
        for block in moved_before:
            self.replicators.emit(EVENT_MOVED, block)
        self.partition_map.set_count(count)
        self.replicators.add_partitions()
        self.heard: list[list[bytes]] = [[] for _ in range(count)]
        self.unanswered: list[list[Answered]] = [[] for _ in range(count)]

    def link_up(self) -> None:
        for partition in range(self.partition_map.count):
            self.replicators[partition].link_up(self._send(partition), 1, lambda: None)

    def _send(self, partition: int) -> Callable[[Publish, Answered], None]:
        def send(message: Publish, answered: Answered) -> None:
            self.heard[partition] += message.keys
            self.unanswered[partition].append(answered)

        return send

    def answer(self, partition: int) -> None:
        answers, self.unanswered[partition] = self.unanswered[partition], []
        for answered in answers:
            answered(None)

    def keys(self, partition: int) -> list[bytes]:
        return [block.key for block in BLOCKS if self.partition_map.of(block.key) == partition]


def test_each_master_gets_its_own_partitions_events() -> None:
    told = Told()
    told.held = BLOCKS[:10]
    told.link_up()
    for block in BLOCKS[10:]:
        told.replicators.emit(EVENT_COMMIT, block)
    assert told.replicators.backlog == 10
    told.replicators.flush()
    for partition in range(COUNT):
        told.answer(partition)
        assert told.heard[partition] == told.keys(partition)
    assert told.replicators.backlog == 0
    assert told.replicators.is_synced


def test_moves_before_partitioning_are_sent_with_the_next_move() -> None:
    told = Told(moved_before=[made("red", b"recovered-%d" % number, 1, 1) for number in range(20)])
    told.link_up()
    for partition in range(COUNT):
        told.answer(partition)
        told.heard[partition].clear()
    for block in told.held:
        told.replicators.emit(EVENT_MOVED, block)
    told.replicators.flush_now()
    assert sorted(key for heard in told.heard for key in heard) == sorted(block.key for block in told.held)


def test_a_waiter_of_several_partitions_waits_for_all() -> None:
    told, results = Told(), list[KVStoreError | None]()
    told.link_up()
    for block in BLOCKS:
        told.replicators.emit(EVENT_COMMIT, block)
    told.replicators.when_published(BLOCKS, results.append)
    told.replicators.flush_now()
    for partition in range(COUNT):
        assert results == []
        told.answer(partition)
    assert results == [None]
    told.replicators.when_published(BLOCKS, results.append)
    told.replicators.when_published([], results.append)
    assert results == [None] * 3


def test_a_waiter_skips_blocks_that_are_durable() -> None:
    told, results = Told(1), list[KVStoreError | None]()
    old, new = BLOCKS[:2]
    told.link_up()
    told.replicators.emit(EVENT_COMMIT, old)
    told.replicators.flush()
    told.answer(0)
    told.replicators.emit(EVENT_COMMIT, BLOCKS[2])
    told.replicators[0].link_down()
    told.replicators[0]._max_in_flight = 2
    told.held = [old, BLOCKS[2]]
    told.link_up()
    told.replicators.emit(EVENT_COMMIT, new)
    told.replicators.when_published([old, new], results.append)
    told.replicators.when_published([BLOCKS[2], new], results.append)
    for awaited in ([], [], [None], [None, None]):  # the beginning, what was there, what is new, the end
        told.unanswered[0].pop(0)(None)
        assert results == awaited
