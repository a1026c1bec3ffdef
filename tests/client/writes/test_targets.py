"""Puts without a reservation to nodes of other hosts (`ack="node"`), against a scripted cluster."""

import pytest

from kvstore.protocol.errors import Draining, Full, KVStoreError, QuotaExceeded, TierFailed
from kvstore.protocol.master_messages import CancelReservations, Reserve, ReserveReply
from kvstore.protocol.message import GRANTED
from kvstore.protocol.node_messages import ACK_NODE_NO_WAIT, Put
from kvstore.protocol.session_messages import Flags
from tests.client.oracle import Oracle, OracleNode
from tests.client.writes.puts import put


def uncommitted(oracle: Oracle, *keys: bytes, value: bytes = b"small") -> list[bool]:
    return put(oracle, keys, [value] * len(keys), acks_at_node=True)


@pytest.fixture
def targeted(remote: OracleNode) -> Oracle:
    """Node 2, of another host, is the target of small values."""
    oracle = Oracle(remote)
    uncommitted(oracle, b"first")
    oracle.log.clear()
    return oracle


def test_puts_after_the_first_reserve_nothing(targeted: Oracle, remote: OracleNode) -> None:
    assert uncommitted(targeted, b"a") == [True]
    assert uncommitted(targeted, b"b", b"c") == [True, True]
    assert [type(message).__name__ for message in targeted.log] == ["Put", "Put"]
    assert [(message.ack, set(message.generations)) for message in targeted.sent(Put)] == [(ACK_NODE_NO_WAIT, {0})] * 2
    assert remote.blocks.keys() == {b"first", b"a", b"b", b"c"}
    assert len(targeted.resources.uncommitted_puts) == 1


@pytest.mark.promise("put-ack-node")
@pytest.mark.parametrize(
    "refusal", [Draining("it ends"), Full("no room"), QuotaExceeded("no more"), TierFailed("no memory"), Flags(b"\2")], ids=repr
)
def test_what_the_target_refuses_is_reserved_at_once(targeted: Oracle, refusal: KVStoreError | Flags) -> None:
    targeted.script[Put].append(refusal)
    assert uncommitted(targeted, b"a") == [True]
    assert uncommitted(targeted, b"b") == [True]
    assert [type(message).__name__ for message in targeted.log] == ["Put", "Reserve", "Put", "Put"]
    assert targeted.slept_s == 0.0


def test_of_a_batch_what_is_refused_is_reserved(targeted: Oracle) -> None:
    targeted.script[Put].append(Flags(b"\1\2\0"))
    assert uncommitted(targeted, b"a", b"b", b"c") == [True, True, False]
    assert [message.keys for message in targeted.sent(Reserve)] == [[b"b"]]
    assert targeted.sent(CancelReservations) == []


def test_parts_before_a_refusal_are_stored_once(remote: OracleNode) -> None:
    oracle = Oracle(remote, frame_bytes=10)
    uncommitted(oracle, b"first")
    oracle.log.clear()
    oracle.script[Put].append(lambda channel, message: Flags(b"\1\1"))
    oracle.script[Put].append(Draining("it ends"))
    assert uncommitted(oracle, b"a", b"b", b"c", b"d") == [True] * 4
    assert [message.keys for message in oracle.sent(Put)] == [[b"a", b"b"], [b"c", b"d"], [b"c", b"d"]]
    assert [message.keys for message in oracle.sent(Reserve)] == [[b"c", b"d"]]


def test_a_target_that_is_gone_is_avoided(targeted: Oracle, remote: OracleNode) -> None:
    other = OracleNode(3, local=False, port=3)
    targeted.nodes[3] = other
    targeted.unreachable.add(remote.tcp)
    assert uncommitted(targeted, b"a") == [True]
    assert b"a" in other.blocks
    other.close()


def test_a_target_that_is_gone_counts_as_no_lost_reservation(targeted: Oracle, remote: OracleNode) -> None:
    """Two nodes may die before the master knows: of those that it named one may, as without a target."""
    third, fourth = OracleNode(3, local=False, port=3), OracleNode(4, local=False, port=4)
    targeted.nodes |= {3: third, 4: fourth}
    targeted.unreachable |= {remote.tcp, third.tcp}
    targeted.script[Reserve].append(ReserveReply(bytes([GRANTED]), [3], [98]))
    targeted.script[Reserve].append(ReserveReply(bytes([GRANTED]), [4], [99]))
    assert uncommitted(targeted, b"a") == [True]
    assert [message.avoid for message in targeted.sent(Reserve)] == [2, 3]
    assert b"a" in fourth.blocks
    third.close()
    fourth.close()
