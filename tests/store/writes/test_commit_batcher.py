"""Tests of commit_batcher.py over real sockets: a put with ack="node" is answered before the commit, whose reply is
then applied."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvstore.protocol.catalog_messages import EVENT_REMOVED, CommitBlocks
from kvstore.protocol.errors import CatalogUnavailable, DeadlineExceeded, KVStoreError
from kvstore.protocol.master_messages import ReserveReply
from kvstore.protocol.message import BUSY, GRANTED, PRESENT
from kvstore.protocol.node_messages import ACK_NODE, ALREADY_STORED, RETRY_LATER, STORED, Put, WaitCommitted
from kvstore.protocol.session_messages import Flags
from kvstore.store.writes import commit_batcher as commit_batcher
from tests.store.integrity import check
from tests.store.served import TIMEOUT_S, Client, Served, digest, in_background, served, until

KIB = 1024
Answer = Callable[[ReserveReply | KVStoreError], None]


class Master:
    """The node's master, as far as these claims go: it keeps what it is asked until the test decides."""

    def __init__(self, node: Served) -> None:
        self.node = node
        self.asked: list[tuple[CommitBlocks, Answer]] = []
        self.link_up(7)

    def link_up(self, epoch: int) -> None:
        self.node.call(lambda: self.node.commit_batcher.link_up(lambda claim, answer: self.asked.append((claim, answer)), epoch))

    def claims(self, *keys: str) -> None:
        """Come back when these have been claimed and not decided about, in this order."""
        until(self.node, lambda: [key.decode() for claim, _ in self.asked for key in claim.keys] == list(keys))

    def decide(self, *decisions: tuple[int, int] | KVStoreError) -> CommitBlocks:
        """Answer the oldest claim, with a status and a generation a key."""
        until(self.node, lambda: bool(self.asked))
        claim, answer = self.asked.pop(0)
        if isinstance(decisions[0], KVStoreError):
            reply: ReserveReply | KVStoreError = decisions[0]
        else:
            pairs: list[Any] = list(decisions)
            reply = ReserveReply(bytes(status for status, _ in pairs), [5] * len(pairs), [generation for _, generation in pairs])
        self.node.call(lambda: answer(reply))
        self.node.call(lambda: check(self.node.store.table))
        return claim


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path, nvme_bytes=1 << 20) as node:
        yield node


@pytest.fixture
def master(node: Served) -> Master:
    return Master(node)


def put(client: Client, values: Mapping[str, bytes], *, generation: int = 0) -> list[int]:
    keys = [name.encode() for name in values]
    sizes, sums = [len(value) for value in values.values()], [digest(value) for value in values.values()]
    message = Put("ns", keys, sizes, [generation] * len(keys), sums, [b""] * len(keys), ACK_NODE)
    return list(client.ask(message, Flags, payload=list(values.values())).flags)


def generation_of(node: Served, name: str) -> int | None:
    block = node.call(lambda: node.store.table.find("red", name.encode()))
    return None if block is None else block.generation


def evict(node: Served, key: bytes) -> None:
    def drop() -> None:
        block = node.store.table.find("red", key)
        assert block is not None
        node.store.table.copies.drop(block)

    node.call(drop)


def heard(node: Served) -> list[tuple[int, bytes, int]]:
    """All later events of the table."""
    events: list[tuple[int, bytes, int]] = []
    node.store.emit = lambda kind, block: events.append((kind, block.key, block.generation))
    return events


@pytest.mark.promise("put-ack-node")
def test_an_uncommitted_put_is_readable_then_gets_its_generation(node: Served, master: Master, client: Client) -> None:
    events = heard(node)
    assert put(client, {"a": b"aaa", "b": b"b"}) == [STORED, STORED]
    assert client.read("a", "b")[1] == [b"aaa", b"b"]
    assert client.read("a", generations=[42])[1] == [None], "it has none yet"
    claim = master.decide((GRANTED, 42), (GRANTED, 43))
    assert (claim.epoch, claim.tenant, claim.namespace, claim.keys, claim.acknowledged) == (7, "red", "ns", [b"a", b"b"], 1)
    assert (list(claim.sizes), list(claim.checksums), claim.parents) == ([3, 1], [digest(b"aaa"), digest(b"b")], [b"", b""])
    assert client.read("a", "b", generations=[42, 43])[1] == [b"aaa", b"b"]
    assert (events, node.call(lambda: len(node.store.table.uncommitted))) == ([], 0), "the master knows from the claim"


@pytest.mark.promise("put-commit-bounded")
def test_puts_during_commits_in_flight_share_a_message(node: Served, master: Master, client: Client) -> None:
    for number in range(commit_batcher.MAX_IN_FLIGHT):
        put(client, {f"first-{number}": b"x"})
    until(node, lambda: len(master.asked) == commit_batcher.MAX_IN_FLIGHT)
    for number in range(20):
        put(client, {f"later-{number}": b"x"})
    assert len(master.asked) == commit_batcher.MAX_IN_FLIGHT
    master.decide((GRANTED, 1000))
    until(node, lambda: len(master.asked) == commit_batcher.MAX_IN_FLIGHT)
    assert master.asked[-1][0].keys == [b"later-%d" % number for number in range(20)]


@pytest.mark.promise("put-commit-bounded")
def test_puts_within_the_interval_share_a_commit_request(tmp_path: Path) -> None:
    with served(tmp_path, claim_interval_s=3600) as node:
        master, client = Master(node), node.connect()
        for names, generations in (("abc", (1, 2, 3)), ("d", (4,))):
            for name in names:
                put(client, {name: b"x"})
            assert not node.call(lambda: list(master.asked))
            node.call(node.commit_batcher._become_due)
            master.claims(*names)
            master.decide(*((GRANTED, generation) for generation in generations))
        client.close()


@pytest.mark.promise("put-commit-bounded")
def test_a_single_block_waits_half_the_interval(tmp_path: Path) -> None:
    with served(tmp_path, claim_interval_s=3600) as node:
        master, client = Master(node), node.connect()
        put(client, {"a": b"x"})
        node.call(lambda: None)  # the round is over in which it came
        node.call(node.commit_batcher._become_half_due)
        master.claims("a")
        master.decide((GRANTED, 1))
        for name in "bc":
            put(client, {name: b"x"})
            node.call(lambda: None)
        node.call(node.commit_batcher._become_half_due)
        node.call(lambda: None)
        assert not node.call(lambda: list(master.asked)), "more has come meanwhile, and more may"
        node.call(node.commit_batcher._become_due)
        master.claims("b", "c")
        client.close()


@pytest.mark.promise("put-commit-bounded")
def test_commit_waiters_do_not_wait_for_the_interval(tmp_path: Path) -> None:
    with served(tmp_path, claim_interval_s=3600) as node:
        master, client = Master(node), node.connect()
        put(client, {"a": b"x"})
        assert not node.call(lambda: list(master.asked))
        thread, results = in_background(lambda: client.ask(WaitCommitted(), Flags))
        master.claims("a")
        assert results == []
        master.decide((GRANTED, 1))
        thread.join(TIMEOUT_S)
        assert len(results) == 1
        put(client, {"b": b"x"})
        assert not node.call(lambda: list(master.asked))
        master.link_up(8)
        master.claims("b")
        client.close()


@pytest.mark.promise("put-conflicts")
def test_equal_bytes_become_a_replica_and_others_are_dropped(node: Served, master: Master, client: Client) -> None:
    events = heard(node)
    put(client, {"same": b"1", "other": b"2"})
    master.decide((PRESENT, 42), (PRESENT, 0))
    assert (generation_of(node, "same"), generation_of(node, "other")) == (42, None)
    assert events == [], "the master knows of the replica, and never heard of the other one"
    assert node.call(lambda: node.store.dram.used_bytes) == 1


def test_a_busy_key_is_committed_again(node: Served, master: Master, client: Client) -> None:
    put(client, {"a": b"1", "b": b"2"})
    master.decide((BUSY, 0), (GRANTED, 42))
    assert generation_of(node, "a") == 0
    for _ in range(3):
        assert master.decide((BUSY, 0)).keys == [b"a"]
    master.decide((GRANTED, 43))
    assert generation_of(node, "a") == 43


@pytest.mark.promise("put-commit-bounded")
@pytest.mark.parametrize("failure", [CatalogUnavailable("etcd is away"), None])
def test_a_failed_commit_is_retried(node: Served, master: Master, client: Client, failure: KVStoreError | None) -> None:
    put(client, {"a": b"1"})
    master.decide(failure) if failure else master.decide((GRANTED, 42), (GRANTED, 43))
    assert client.read("a")[1] == [b"1"]
    assert master.decide((GRANTED, 44)).keys == [b"a"]
    assert generation_of(node, "a") == 44


def test_a_block_evicted_before_its_grant_is_retracted(node: Served, master: Master, client: Client) -> None:
    put(client, {"a": b"1", "b": b"2", "c": b"3"})
    master.claims("a", "b", "c")
    events = heard(node)
    for name in (b"a", b"b", b"c"):
        evict(node, name)
    assert events == [], "the master has not heard of them"
    master.decide((GRANTED, 42), (PRESENT, 0), (BUSY, 0))
    assert events == [(EVENT_REMOVED, b"a", 42)]
    assert node.call(lambda: len(node.store.table.uncommitted)) == 0


def test_a_rewritten_key_commits_after_the_former_is_retracted(node: Served, master: Master, client: Client) -> None:
    """In the other order the directory would lose the block that the node has."""
    put(client, {"a": b"1"})
    master.claims("a")
    evict(node, b"a")
    assert put(client, {"a": b"1"}) == [STORED]
    node.settled()
    assert len(master.asked) == 1, "one claim a key"
    node.acknowledges = False
    master.decide((GRANTED, 42))
    until(node, lambda: bool(node.unanswered))
    assert master.decide((GRANTED, 43)).keys == [b"a"], "behind the event that the other one is gone"
    assert generation_of(node, "a") == 43


@pytest.mark.promise("put-commit-bounded")
def test_a_new_link_commits_all_uncommitted_blocks(node: Served, master: Master, client: Client) -> None:
    put(client, {"a": b"1"})
    master.claims("a")
    [(_claim, answer)] = master.asked
    node.call(node.commit_batcher.link_down)
    put(client, {"b": b"2"})
    node.call(lambda: answer(CatalogUnavailable("the connection broke")))
    master.asked.clear()
    master.link_up(8)
    claims = [master.decide((GRANTED, 42)) if len(master.asked) > 1 else master.decide((GRANTED, 42), (GRANTED, 43))]
    assert (claims[0].epoch, sorted(claims[0].keys)) == (8, [b"a", b"b"])
    assert generation_of(node, "a") != 0


def test_a_commit_request_follows_earlier_events(node: Served, master: Master, client: Client) -> None:
    """Otherwise the directory would record the node as a holder and then drop the record."""
    node.acknowledges = False
    writers = [node.connect() for _ in range(6)]  # more than the publisher has in flight
    threads = []
    for number, writer in enumerate(writers, start=1):
        threads.append(in_background(partial(writer.put, {f"reserved {number}": b"x"}, generation=number))[0])
        until(node, lambda: node.replicator._seq == len(threads))
    put(client, {"a": b"1"})
    node.settled()
    assert master.asked == []
    node.acknowledges = True
    until(node, lambda: not node.unanswered or bool(node.unanswered.pop(0)(None)))
    master.claims("a")
    for thread, writer in zip(threads, writers, strict=True):
        thread.join(TIMEOUT_S)
        writer.close()


@pytest.mark.promise("put-flush")
def test_wait_committed_waits_for_all_present_blocks(node: Served, master: Master, client: Client) -> None:
    assert client.ask(WaitCommitted(), Flags).flags == b"", "there was nothing"
    put(client, {"a": b"1", "b": b"2"})
    other = node.connect()
    _thread, results = in_background(lambda: other.ask(WaitCommitted(), Flags))
    until(node, lambda: len(node.commit_waits) == 1)
    put(client, {"c": b"3"})
    master.decide((GRANTED, 42), (BUSY, 0))
    master.decide((GRANTED, 43))
    node.settled()
    assert results == []
    assert master.decide((PRESENT, 0)).keys == [b"b"]
    until(node, lambda: len(node.commit_waits) == 0)
    assert client.ask(WaitCommitted(), Flags).flags == b""
    other.close()


def test_wait_committed_ends_at_its_deadline(node: Served, master: Master, client: Client) -> None:
    put(client, {"a": b"1"})
    thread, results = in_background(lambda: client.ask(WaitCommitted(), Flags))
    until(node, lambda: len(node.commit_waits) == 1)
    node.call(lambda: node.commit_waits.expire(now_ns=1 << 62))
    thread.join(TIMEOUT_S)
    assert isinstance(results[0], DeadlineExceeded)
    assert client.read("a")[1] == [b"1"]


@pytest.mark.promise("put-ack-cluster")
def test_a_cluster_put_of_an_uncommitted_key_asks_again(node: Served, master: Master, client: Client) -> None:
    put(client, {"a": b"1"})
    assert put(client, {"a": b"1"}) == [ALREADY_STORED]
    assert client.put({"a": b"1"}, generation=9) == [RETRY_LATER], "already there is said once all can read it"
    assert client.put({"a": b"1"}, generation=0) == [RETRY_LATER]
    master.decide((GRANTED, 42))
    assert client.put({"a": b"1"}, generation=9) == [ALREADY_STORED]


@pytest.mark.promise("put-commit-bounded")
def test_uncommitted_blocks_are_demoted_after_their_commit(tmp_path: Path) -> None:
    """NVMe blocks survive a restart, and must have a generation."""
    with served(tmp_path, dram_bytes=4 * KIB, nvme_bytes=1 << 20) as node:
        master, client = Master(node), node.connect()
        for name in "abcd":
            put(client, {name: name.encode() * KIB})
        other = node.connect()
        thread, results = in_background(lambda: other.put({"e": b"e" * KIB}, generation=9))
        until(node, lambda: len(node.waiting) == 1)
        node.settled()
        assert node.call(node.store.names) == "abcd", "none is lost for it"
        generation = 40
        while master.asked:
            claim = master.asked[0][0]
            master.decide(*[(GRANTED, generation := generation + 1) for _ in claim.keys])
        thread.join(10.0)
        assert results == [[STORED]]
        assert client.read(*"abcde")[1] == [name.encode() * KIB for name in "abcde"]
        for one in (client, other):
            one.close()


def test_each_partition_commits_over_its_own_link(node: Served, client: Client) -> None:
    asked: dict[int, list[tuple[CommitBlocks, Answer]]] = {0: [], 1: []}

    def ask(partition: int, claim: CommitBlocks, answer: Answer) -> None:
        asked[partition].append((claim, answer))

    def link_up() -> None:
        node.partition_map.set_count(2)
        node.replicators.add_partitions()
        node.store.table.uncommitted.regroup()
        for partition in asked:
            node.replicators[partition].link_up(node._publish, 1, lambda: None)
            node.commit_batcher.link_up(partial(ask, partition), 7 + partition, partition)

    names = [f"key-{number}" for number in range(12)]
    assert put(client, {name: name.encode() for name in names}) == [STORED] * 12
    node.call(link_up)
    until(node, lambda: all(asked.values()))
    for partition, [(claim, _answer)] in asked.items():
        assert claim.epoch == 7 + partition
        assert claim.keys == [name.encode() for name in names if node.partition_map.of(name.encode()) == partition]
    node.call(lambda: node.commit_batcher.link_down(1))
    [(claim, answer)] = asked[0]
    node.call(partial(answer, ReserveReply(bytes([GRANTED]) * len(claim.keys), [5] * len(claim.keys), [9] * len(claim.keys))))
    left = {block.key for block in node.call(lambda: list(node.store.table.uncommitted.blocks()))}
    assert left == set(asked[1][0][0].keys)
    node.call(lambda: check(node.store.table))
