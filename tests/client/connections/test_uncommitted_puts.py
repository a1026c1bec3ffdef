"""Promises of uncommitted_puts.py, in a scripted cluster: puts that the node alone answers, and what waits for the cluster to know them."""

from typing import Any

import pytest

from kvstore.client.connections.routes import KnownNode
from kvstore.client.connections.uncommitted_puts import COOLDOWN_NS
from kvstore.client.core.buffers import as_sources
from kvstore.client.metadata_requests import MetadataOperations
from kvstore.client.reads.batch_read import BatchGet
from kvstore.client.reads.mapped_values import CopyOut
from kvstore.client.reads.sinks import FreshBytes
from kvstore.client.writes.batch_put import BatchPut
from kvstore.protocol.errors import DeadlineExceeded, Unavailable
from kvstore.protocol.master_messages import Lookup, Nodes, Pin, Remove, Reserve
from kvstore.protocol.node_messages import ACK_NODE, ALREADY_STORED, CommitPuts, OpenSlots, Put, ReadBlocks, WaitCommitted
from kvstore.protocol.session_messages import Flags
from tests.client.oracle import Oracle, OracleNode

SMALL, LARGE = b"1", b"x" * 100_000


def put(oracle: Oracle, key: bytes, value: bytes = SMALL, *, acks_at_node: bool = True) -> bool:
    writing = BatchPut(
        oracle.resources, [key], as_sources([value]), namespace="", parents=None, acks_at_node=acks_at_node, deadline=oracle.deadline()
    )
    stored: list[bool] = oracle.run(writing.run())
    assert oracle.all_given_back()
    return stored[0]


def flush(oracle: Oracle) -> None:
    try:
        oracle.run(oracle.resources.uncommitted_puts.flush(oracle.deadline()))
    finally:
        assert oracle.all_given_back()


def get(oracle: Oracle, *keys: bytes) -> Any:
    copy_out = CopyOut(oracle.resources, lambda: 0)
    return oracle.run(BatchGet(oracle.resources, list(keys), FreshBytes(len(keys)), copy_out, oracle.deadline(), lambda: 0).run())


def known(oracle: Oracle) -> KnownNode:
    node = oracle.resources.daemons.nodes.get(1)
    assert node is not None
    return node


def restart(oracle: Oracle, node: OracleNode) -> None:
    """Restart the node at its address, closing its connections."""
    node.epoch += 1
    for idle in oracle.idle.values():
        idle.clear()


@pytest.mark.promise("put-ack-node")
def test_local_puts_are_unreserved_and_readable(oracle: Oracle) -> None:
    assert put(oracle, b"a")
    assert put(oracle, b"b", LARGE)
    assert oracle.sent(Reserve) == []
    assert [message.ack for message in oracle.sent(Put)] == [ACK_NODE]
    assert [list(message.generations) for message in (*oracle.sent(Put), *oracle.sent(OpenSlots))] == [[0], [0]]
    assert len(oracle.sent(CommitPuts)) == 1
    assert get(oracle, b"a", b"b") == [SMALL, LARGE]
    assert [list(message.generations) for message in oracle.sent(ReadBlocks)] == [[0, 0]]
    assert oracle.sent(Lookup) == []


def test_flush_asks_the_nodes_that_took_puts_once(oracle: Oracle) -> None:
    flush(oracle)
    assert oracle.sent(WaitCommitted) == []
    put(oracle, b"a")
    put(oracle, b"b", LARGE)
    flush(oracle)
    flush(oracle)
    assert len(oracle.sent(WaitCommitted)) == 1
    assert len(oracle.resources.uncommitted_puts) == 0


@pytest.mark.parametrize(("value", "message"), [(SMALL, Put), (LARGE, CommitPuts)])
def test_a_put_that_a_flush_passes_is_flushed_by_the_next(oracle: Oracle, value: bytes, message: type) -> None:
    """The node answers the flush of another thread before it has the block."""

    def passed(channel: Any, sent: Any) -> Any:
        oracle.run(oracle.resources.uncommitted_puts.flush(oracle.deadline()))
        return Flags(b"\1")

    oracle.script[message].append(passed)
    put(oracle, b"a", value)
    assert len(oracle.resources.uncommitted_puts) == 1
    flush(oracle)
    assert len(oracle.resources.uncommitted_puts) == 0


def test_flush_uses_the_ticket_of_a_new_master(oracle: Oracle) -> None:
    nodes = oracle.resources.daemons.nodes
    oracle.ticket = oracle.issued = b"first"
    put(oracle, b"a")
    oracle.ticket = oracle.issued = b"second"
    for idle in oracle.idle.values():
        idle.clear()
    nodes.note_master_epoch(1 << 60)
    oracle.run(oracle.resources.daemons.refresh_nodes(oracle.deadline()))
    flush(oracle)
    assert len(oracle.resources.uncommitted_puts) == 0


def test_put_during_a_flush_is_flushed_by_the_next(oracle: Oracle, node: OracleNode) -> None:
    put(oracle, b"a")
    oracle.resources.uncommitted_puts.begin(known(oracle))

    def meanwhile(channel: Any, sent: Any) -> Any:
        oracle.resources.uncommitted_puts.answered(known(oracle), node.epoch)
        return oracle.answer(channel, sent)

    oracle.script[WaitCommitted].append(meanwhile)
    flush(oracle)
    assert len(oracle.resources.uncommitted_puts) == 1
    flush(oracle)
    assert len(oracle.resources.uncommitted_puts) == 0


def test_a_node_that_is_gone_is_told_of_once(oracle: Oracle, node: OracleNode) -> None:
    put(oracle, b"a")
    oracle.script[WaitCommitted].append(Unavailable("the connection broke"))
    oracle.unreachable |= {node.unix, f"unix:{node.unix}", node.tcp}
    restart(oracle, node)
    oracle.nodes.clear()
    with pytest.raises(Unavailable, match="uncommitted blocks are lost, because these nodes died or restarted: n1"):
        flush(oracle)
    flush(oracle)


def test_lost_node_is_reported_by_all_running_flushes(oracle: Oracle, node: OracleNode) -> None:
    put(oracle, b"a")

    def meanwhile(channel: Any, message: Any) -> Any:
        oracle.unreachable |= {node.unix, f"unix:{node.unix}", node.tcp}
        restart(oracle, node)
        oracle.nodes.clear()
        with pytest.raises(Unavailable, match=r"uncommitted blocks are lost.*: n1"):
            oracle.run(oracle.resources.uncommitted_puts.flush(oracle.deadline()))
        raise Unavailable("the connection broke")

    oracle.script[WaitCommitted].append(meanwhile)
    with pytest.raises(Unavailable, match=r"uncommitted blocks are lost.*: n1"):
        flush(oracle)
    flush(oracle)


def cut_off(oracle: Oracle, node: OracleNode) -> None:
    """It lives, as the master says, and cannot be reached."""
    oracle.idle.clear()
    there = {str(channel.address) for channel in (connection.channel for connection in oracle.loans)} | {node.tcp}
    oracle.unreachable |= there - {"master:1"}


@pytest.mark.promise("put-flush")
def test_a_node_that_cannot_be_reached_and_lives_is_asked_again(oracle: Oracle, node: OracleNode) -> None:
    put(oracle, b"a")
    cut_off(oracle, node)
    with pytest.raises(Unavailable, match="cannot connect"):
        flush(oracle)
    assert len(oracle.resources.uncommitted_puts) == 1
    oracle.unreachable.clear()
    flush(oracle)
    assert len(oracle.resources.uncommitted_puts) == 0


@pytest.mark.promise("put-ack-node")
@pytest.mark.parametrize("put_after", [False, True])
def test_restarted_node_has_lost_its_uncommitted_puts(oracle: Oracle, node: OracleNode, put_after: bool) -> None:
    put(oracle, b"a")
    restart(oracle, node)
    if put_after:
        put(oracle, b"b")
    with pytest.raises(Unavailable, match=r"uncommitted blocks are lost.*: n1"):
        flush(oracle)
    flush(oracle)
    assert len(oracle.resources.uncommitted_puts) == 0


@pytest.mark.promise("put-flush")
def test_removes_and_pins_wait_for_the_puts_before_them(oracle: Oracle) -> None:
    questions = MetadataOperations(oracle.resources)
    put(oracle, b"a")
    assert oracle.run(questions.pin([b"a"], oracle.deadline(), pinned=True)) == [True]
    put(oracle, b"b")
    assert oracle.run(questions.remove([b"b"], oracle.deadline(), force=False)) == 1
    assert oracle.run(questions.remove([b"a"], oracle.deadline(), force=False)) == 1
    kinds = [type(message) for message in oracle.log if isinstance(message, (Put, WaitCommitted, Pin, Remove))]
    assert kinds == [Put, WaitCommitted, Pin, Put, WaitCommitted, Remove, Remove]


def test_remove_fails_if_a_live_node_is_unreachable(oracle: Oracle, node: OracleNode) -> None:
    put(oracle, b"a")
    cut_off(oracle, node)
    with pytest.raises(Unavailable, match="cannot connect"):
        oracle.run(MetadataOperations(oracle.resources).remove([b"a"], oracle.deadline(), force=False))
    assert oracle.sent(Remove) == []
    assert oracle.run(MetadataOperations(oracle.resources).exists([b"a"], oracle.deadline())) == [True], (
        "a question has an answer all the same"
    )
    oracle.unreachable.clear()
    assert oracle.run(MetadataOperations(oracle.resources).remove([b"a"], oracle.deadline(), force=False)) == 1


def test_remove_ignores_a_lost_node_and_flush_reports_it(oracle: Oracle, node: OracleNode) -> None:
    put(oracle, b"a")
    restart(oracle, node)
    assert oracle.run(MetadataOperations(oracle.resources).remove([b"a"], oracle.deadline(), force=False)) == 1
    with pytest.raises(Unavailable, match="n1"):
        flush(oracle)


class Hanging:
    """A node that took a put and was given up, of which a removal has heard that."""

    def __init__(self, oracle: Oracle, node: OracleNode) -> None:
        self.oracle, self.node = oracle, node
        put(oracle, b"a")
        self.nodes = dict(oracle.nodes)
        cut_off(oracle, node)
        oracle.nodes.clear()
        assert self.remove() == 1

    def comes_back(self) -> None:
        self.oracle.unreachable.clear()
        self.oracle.nodes.update(self.nodes)

    def remove(self) -> int:
        removed: int = self.oracle.run(MetadataOperations(self.oracle.resources).remove([b"a"], self.oracle.deadline(), force=False))
        return removed

    def has_told_loss(self) -> bool:
        try:
            flush(self.oracle)
        except Unavailable as error:
            return "uncommitted blocks are lost" in str(error)
        return False


@pytest.mark.promise("put-flush")
def test_remove_covers_puts_of_a_rediscovered_node(oracle: Oracle, node: OracleNode) -> None:
    hanging = Hanging(oracle, node)
    assert hanging.has_told_loss()
    hanging.comes_back()
    hanging.remove()
    kinds = [type(message) for message in oracle.log if isinstance(message, (Put, WaitCommitted, Nodes, Remove))]
    assert kinds[-3:] == [Nodes, WaitCommitted, Remove]
    hanging.remove()
    assert type(oracle.log[-2]) is Remove, "nothing is there any more that nobody knows"
    assert not hanging.has_told_loss()


@pytest.mark.parametrize("ask", ["exists", "match_prefix", "locate"])
def test_lookups_wait_briefly_for_uncommitted_puts(oracle: Oracle, ask: str) -> None:
    question = getattr(MetadataOperations(oracle.resources), ask)
    put(oracle, b"a")
    oracle.script[WaitCommitted].append(DeadlineExceeded("not yet"))
    for _ in range(2):
        assert oracle.run(question([b"a"], oracle.deadline()))
    assert len(oracle.sent(WaitCommitted)) == 1, "a master that decides nothing is not waited for by each"
    uncommitted = oracle.resources.uncommitted_puts
    uncommitted._clock_ns = lambda: uncommitted._cooldown_until_ns + COOLDOWN_NS
    assert oracle.run(question([b"a"], oracle.deadline()))
    assert len(oracle.sent(WaitCommitted)) == 2


def test_get_without_hint_waits_for_the_commit(node: OracleNode) -> None:
    oracle = Oracle(node, max_hints=0)
    put(oracle, b"a")
    replicas, oracle.replicas = oracle.replicas, {}

    def decide(channel: Any, message: Any) -> Any:
        oracle.replicas = replicas
        return oracle.answer(channel, message)

    oracle.script[WaitCommitted].append(decide)
    assert get(oracle, b"a", b"nowhere") == [SMALL, None]
    assert [list(message.keys) for message in oracle.sent(Lookup)] == [[b"a", b"nowhere"], [b"a", b"nowhere"]]
    assert get(oracle, b"nowhere") == [None]
    assert len(oracle.sent(Lookup)) == 3, "nothing is undecided any more"


def test_what_a_node_had_already_may_be_undecided_too(oracle: Oracle) -> None:
    oracle.script[Put].append(lambda channel, message: Flags(bytes([ALREADY_STORED])))
    put(oracle, b"a")
    assert get(oracle, b"a") == [None]
    assert len(oracle.sent(WaitCommitted)) == 1
    assert get(oracle, b"a") == [None]
    assert len(oracle.sent(WaitCommitted)) == 1, "nothing is undecided any more"
