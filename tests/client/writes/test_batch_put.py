"""Writes against a scripted cluster."""

import pytest

from kvstore.client.core.buffers import as_sources
from kvstore.client.writes.batch_put import BatchPut
from kvstore.protocol.errors import DeadlineExceeded, Denied, Draining, Full, Unavailable
from kvstore.protocol.master_messages import CancelReservations, Nodes, Reserve, ReserveReply
from kvstore.protocol.message import BUSY, GRANTED, PRESENT, Message
from kvstore.protocol.node_messages import CommitPuts, OpenSlots, OpenSlotsReply, Put
from kvstore.protocol.session_messages import Flags
from tests.client.oracle import BIG, MASTER, Oracle, OracleChannel, OracleNode, Pair
from tests.client.writes.puts import put


def opened(*statuses: int, slab: int = 1) -> OpenSlotsReply:
    count = len(statuses)
    return OpenSlotsReply(
        bytes(statuses), [1000 + i for i in range(count)], [slab] * count, [500_000 + 100_000 * i for i in range(count)], [b""] * count, []
    )


def test_local_put_is_inline_or_by_slot(node: OracleNode) -> None:
    oracle = Oracle(node)
    assert put(oracle, [b"a", b"b"], [b"small", BIG]) == [True, True]
    assert [type(message).__name__ for message in oracle.log] == ["Nodes", "Put", "Reserve", "OpenSlots", "MapSlabs", "CommitPuts"]
    assert {key: value for key, (value, _) in node.blocks.items()} == {b"a": b"small", b"b": BIG}
    assert oracle.sent(Reserve)[0].local_node == 1
    stats = oracle.resources.counters.snapshot()
    assert (stats.puts, stats.bytes_out, stats.requests) == (2, 100_005, 1)


def test_values_for_a_node_elsewhere_go_along_with_one_message(remote: OracleNode) -> None:
    oracle = Oracle(remote)
    assert put(oracle, [b"a", b"b"], [b"small", BIG]) == [True, True]
    assert len(oracle.sent(Put)) == 1
    assert oracle.sent(Reserve)[0].local_node == 0


def test_slabs_named_ahead_are_mapped_in_the_background(node: OracleNode) -> None:
    node.ahead = [2, 9]
    oracle = Oracle(node)
    put(oracle, [b"a"], [BIG])
    in_use = len(oracle.resources.mapping.slabs)
    put(oracle, [b"b"], [BIG])  # what is already on its way is not asked for again
    [map_ahead] = oracle.aside
    oracle.run(map_ahead)
    assert len(oracle.resources.mapping.slabs) == 2 * in_use, "slab 2; the node does not have slab 9"


@pytest.mark.promise("put-conflicts")
def test_a_block_that_is_there_is_not_written(remote: OracleNode) -> None:
    oracle = Oracle(remote)
    oracle.store(b"a", b"old", 2)
    assert put(oracle, [b"a"], [b"new"]) == [False]
    assert oracle.sent(Put) == []
    assert oracle.resources.counters.snapshot().already_present == 1


def test_busy_key_is_retried_with_growing_pauses(remote: OracleNode) -> None:
    oracle = Oracle(remote)
    busy = ReserveReply(bytes([BUSY]), [0], [0])
    oracle.script[Reserve].extend([busy] * 8)
    assert put(oracle, [b"a"], [b"v"]) == [True]
    assert oracle.slept_s == pytest.approx(0.001 + 0.002 + 0.004 + 0.008 + 0.016 + 0.032 + 0.05 + 0.05)


def test_a_key_that_stays_busy_ends_with_the_deadline(remote: OracleNode) -> None:
    oracle = Oracle(remote)
    oracle.reserved.add(b"a")
    with pytest.raises(DeadlineExceeded):
        put(oracle, [b"a"], [b"v"], deadline_s=0.02)


def test_present_block_cancels_its_reservation(node: OracleNode) -> None:
    oracle = Oracle(node)
    oracle.script[OpenSlots].append(opened(PRESENT))
    assert put(oracle, [b"a"], [BIG]) == [False]
    assert [message.keys for message in oracle.sent(CancelReservations)] == [[b"a"]]
    assert oracle.sent(CommitPuts) == []


def test_a_put_the_node_forgot_is_written_again(node: OracleNode) -> None:
    oracle = Oracle(node)
    oracle.script[CommitPuts].append(Flags(b"\2"))
    assert put(oracle, [b"a"], [BIG]) == [True]
    assert len(oracle.sent(CommitPuts)) == 2


def test_failed_commit_closes_the_channel(node: OracleNode) -> None:
    oracle = Oracle(node)
    oracle.script[CommitPuts].append(DeadlineExceeded("late"))
    with pytest.raises(DeadlineExceeded):
        put(oracle, [b"a"], [BIG])
    shared = [connection.channel for connection in oracle.loans if connection.channel.address.unix]
    assert [channel.is_open for channel in shared] == [False]


DRAINING = Draining("this node is to be stopped")


def test_put_avoids_a_draining_node_until_granted_again(nodes: Pair) -> None:
    oracle = Oracle(*nodes)
    oracle.script[Put].append(DRAINING)
    assert put(oracle, [b"a"], [b"v"]) == [True]
    assert [message.avoid for message in oracle.sent(Reserve)] == [1]
    assert b"a" in nodes[1].blocks
    oracle.script[Reserve].append(ReserveReply(bytes([GRANTED]), [2], [50]))
    assert put(oracle, [b"b"], [b"v"]) == [True]
    assert (len(oracle.sent(Reserve)), oracle.sent(Reserve)[-1].local_node) == (2, 1), "it is not asked, but the master is told of it"
    assert put(oracle, [b"c"], [b"v"]) == [True]
    assert b"c" in nodes[0].blocks, "granted there: it takes blocks again"
    assert put(oracle, [b"d"], [b"v"]) == [True]
    assert len(oracle.sent(Reserve)) == 3, "and is asked first from then on"


def test_put_waits_if_every_node_drains(remote: OracleNode) -> None:
    oracle = Oracle(remote)
    oracle.script[Reserve].extend(ReserveReply(bytes([GRANTED]), [2], [50 + i]) for i in range(1000))
    oracle.script[Put].extend([DRAINING] * 1000)
    with pytest.raises(DeadlineExceeded):
        put(oracle, [b"a"], [b"v"], deadline_s=0.05)
    assert oracle.slept_s > 0
    assert len(oracle.sent(CancelReservations)) == len(oracle.sent(Put)), "no reservation is left behind"


def test_a_node_that_has_moved_is_found_at_its_new_place(remote: OracleNode) -> None:
    oracle = Oracle(remote)
    put(oracle, [b"a"], [b"v"])
    oracle.unreachable.add("node2:1")
    remote.port = 2
    assert put(oracle, [b"b"], [b"v"]) == [True]
    assert [message.avoid for message in oracle.sent(Reserve)] == [0, 0, 0]


def test_unreachable_node_is_named_if_no_other_takes_the_put(remote: OracleNode) -> None:
    oracle = Oracle(remote)
    put(oracle, [b"a"], [b"v"])
    oracle.unreachable.add(remote.tcp)

    def no_nodes(channel: OracleChannel, message: Message) -> Message:
        raise Unavailable("no node is registered")

    oracle.script[Reserve] += [ReserveReply(bytes([GRANTED]), [2], [50]), no_nodes]
    with pytest.raises(Unavailable, match=r"^node 'n2': cannot connect to node2:1; of the other nodes: no node is registered$"):
        put(oracle, [b"b"], [b"v"])


def test_a_refused_put_is_told_that_it_may_not_put(remote: OracleNode) -> None:
    oracle = Oracle(remote)
    oracle.script[Nodes].append(Denied("an operator may not look nodes up"))
    oracle.script[Reserve].append(Denied("an operator may not put blocks"))
    with pytest.raises(Denied, match="may not put blocks"):
        put(oracle, [b"a"], [b"v"])


def test_a_failed_cancel_does_not_hide_the_error(node: OracleNode) -> None:
    oracle = Oracle(node)

    def full_and_master_gone(channel: OracleChannel, message: Message) -> Message:
        oracle.unreachable.add(MASTER)
        raise Full("no room")

    oracle.script[OpenSlots].append(full_and_master_gone)
    with pytest.raises(Full):
        put(oracle, [b"a"], [BIG])


def test_an_interrupt_closes_the_channel_and_is_passed_on(node: OracleNode) -> None:
    oracle = Oracle(node)
    oracle.script[CommitPuts].append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        put(oracle, [b"a"], [BIG])
    assert not oracle.loans[-1].channel.is_open


def test_batches_larger_than_a_frame_are_cut(remote: OracleNode) -> None:
    oracle = Oracle(remote, frame_bytes=250_000)
    assert put(oracle, [b"%d" % i for i in range(5)], [BIG] * 5) == [True] * 5
    assert [len(message.keys) for message in oracle.sent(Put)] == [2, 2, 1]


def test_a_stored_block_is_read_without_asking_the_master(remote: OracleNode) -> None:
    oracle = Oracle(remote)
    put(oracle, [b"a"], [b"v"])
    [hint] = oracle.resources.hints.find([b"a"])
    assert hint is not None
    assert (hint.node_id, hint.size_bytes) == (2, 1)


def test_parents_go_along_and_none_is_empty(remote: OracleNode) -> None:
    oracle = Oracle(remote)
    sources = as_sources([b"1", b"2"])
    parents = [None, b"a"]
    writing = BatchPut(
        oracle.resources, [b"a", b"b"], sources, namespace="ns", parents=parents, acks_at_node=False, deadline=oracle.deadline()
    )
    oracle.run(writing.run())
    [message] = oracle.sent(Put)
    assert (message.namespace, message.parents) == ("ns", [b"", b"a"])
