"""Routes to masters and nodes of a scripted cluster."""

import time
from typing import Any

import pytest

from kvstore.client.config import ClientSettings
from kvstore.client.connections.cluster_connections import ClusterConnections
from kvstore.client.connections.resources import ClientResources
from kvstore.client.core.effects import Operation, SleepEffect
from kvstore.protocol.errors import ProtocolError, StaleEpoch, Unavailable, Unreachable, Untrusted
from kvstore.protocol.master_messages import Exists, Nodes, NodeTable, Remove, Reserve, ReserveReply
from kvstore.protocol.message import Message
from kvstore.protocol.session_messages import Flags
from kvstore.rpc.address import Address
from kvstore.transfer.config import TransferSettings
from tests.client.oracle import Oracle, OracleChannel, OracleNode, is_here


def ask(oracle: Oracle) -> None:
    oracle.run(oracle.resources.daemons.call_master(Exists([b"k"]), Flags, oracle.deadline()))


def knowing(oracle: Oracle, masters: str, **settings: Any) -> ClusterConnections:
    oracle.resources = ClientResources(ClientSettings(master=masters, **settings), TransferSettings(), is_here=is_here, spread=0)
    return oracle.resources.daemons


def taken(oracle: Oracle) -> list[str]:
    """The masters connected to, in order."""
    return [str(connection.channel.address) for connection in oracle.loans]


def no_nodes(channel: OracleChannel, message: Message) -> Message:
    raise Unavailable("no node is registered")


def test_master_failure_switches_to_the_next(oracle: Oracle) -> None:
    knowing(oracle, "a:1, b:1,c:1")
    oracle.unreachable |= {"a:1", "b:1"}
    for _ in range(2):
        ask(oracle)
    assert set(taken(oracle)) == {"c:1"}
    oracle.unreachable = {"c:1"}
    ask(oracle)
    assert taken(oracle)[-1] == "a:1"
    assert oracle.slept_s == 0.0


def test_single_master_down_fails_at_once(oracle: Oracle) -> None:
    knowing(oracle, "a:1")
    oracle.unreachable.add("a:1")
    with pytest.raises(Unavailable, match=r"^no master can be reached: cannot connect to a:1$"):
        ask(oracle)
    assert oracle.slept_s == 0.0


def test_masters_down_are_retried_until_the_deadline(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    knowing(oracle, "a:1,b:1")
    oracle.unreachable |= {"a:1", "b:1"}
    monkeypatch.setattr(time, "monotonic_ns", lambda: int(oracle.slept_s * 1e9))
    with pytest.raises(Unavailable, match=r"^no master can be reached: cannot connect to a:1; cannot connect to b:1$"):
        ask(oracle)
    assert 4.0 < oracle.slept_s <= 5.0


def test_master_that_refuses_does_not_hide_the_others(oracle: Oracle) -> None:
    """A wrong port, an expired certificate or an old tokens file of the first master leaves the others."""
    knowing(oracle, "a:1,b:1")
    oracle.refusals["a:1"] = ProtocolError("not a kvstore frame")
    ask(oracle)
    assert set(taken(oracle)) == {"b:1"}
    knowing(oracle, "a:1,b:1")
    oracle.refusals["a:1"] = Untrusted("it has expired")
    oracle.unreachable.add("b:1")
    with pytest.raises(Untrusted, match=r"^a:1: it has expired$"):
        ask(oracle)


@pytest.mark.promise("failover")
def test_standby_master_leads_to_the_owner(oracle: Oracle) -> None:
    knowing(oracle, "a:1")
    oracle.owners["a:1"] = "b:1"
    for _ in range(2):
        ask(oracle)
    assert taken(oracle)[0] == "a:1"
    assert set(taken(oracle)[1:]) == {"b:1"}
    assert not oracle.loans[0].channel.is_open
    assert oracle.all_given_back()


@pytest.mark.promise("failover")
def test_masters_that_name_one_another_are_unavailable_and_named(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    knowing(oracle, "a:1")
    oracle.owners |= {"a:1": "b:1", "b:1": "a:1"}
    monkeypatch.setattr(time, "monotonic_ns", lambda: int(oracle.slept_s * 1e9))
    with pytest.raises(Unavailable, match=r"^no master can be reached: a:1 follows the owner b:1; b:1 follows the owner a:1$"):
        ask(oracle)
    assert not oracle.sent(Exists)


@pytest.mark.promise("failover")
def test_masters_are_retried_while_there_is_no_owner(oracle: Oracle) -> None:
    knowing(oracle, "a:1,b:1", owner_retry_s=0.25)
    oracle.unreachable |= {"a:1", "b:1"}
    search = iter(oracle.resources.daemons.call_master(Exists([b"k"]), Flags, oracle.deadline()))
    effect = next(search)
    while not isinstance(effect, SleepEffect):
        effect = search.throw(Unavailable("no master owns the catalog now"))
    assert effect.seconds == 0.25
    oracle.unreachable.clear()
    oracle.run(resumed(search))
    assert len(oracle.sent(Exists)) == 1


def resumed(operation: Operation[Any]) -> Operation[Any]:
    """The rest of an operation that was driven up to a Sleep."""
    try:
        effect = next(operation)
        while True:
            effect = operation.send((yield effect))
    except StopIteration as end:
        return end.value


def test_hanging_owner_is_awaited_until_a_failover(oracle: Oracle) -> None:
    knowing(oracle, "a:1,b:1,c:1", owner_patience_s=0.5)
    oracle.hanging.add("a:1")
    oracle.owners["b:1"] = "a:1"
    oracle.unreachable.add("c:1")
    asked = 0

    def elect(waited: int) -> None:
        nonlocal asked
        asked = waited
        if waited == 3:
            oracle.owners["b:1"] = "c:1"
            oracle.unreachable.clear()

    oracle.on_await = elect
    ask(oracle)
    assert asked == 3
    assert oracle.awaited == [0.5, 0.125, 0.125]
    assert taken(oracle) == ["a:1", *["b:1"] * 3, "c:1", "c:1"], "the owner is asked whether it is, and then the question"
    assert not oracle.loans[0].channel.is_open
    assert oracle.all_given_back()


@pytest.mark.promise("failover")
def test_an_owner_that_was_slow_is_heard(oracle: Oracle) -> None:
    knowing(oracle, "a:1,b:1")
    oracle.hanging.add("a:1")
    oracle.owners["b:1"] = "a:1"
    oracle.on_await = lambda waited: oracle.hanging.discard("a:1")
    ask(oracle)
    assert taken(oracle) == ["a:1", "b:1"]
    assert oracle.loans[0].channel.is_open


def test_idle_connection_is_no_evidence_of_ownership(oracle: Oracle) -> None:
    knowing(oracle, "a:1,b:1")
    oracle.unreachable.add("a:1")
    ask(oracle)
    used = oracle.loans[-1].channel
    oracle.unreachable = {"b:1"}
    oracle.idle[used.address].append(used)
    oracle.resources.daemons.masters.known.owner = Address("a", 1)
    oracle.hanging.add("a:1")
    oracle.on_await = lambda waited: oracle.hanging.discard("a:1")
    ask(oracle)
    assert not used.is_open
    assert taken(oracle)[-1] == "b:1", "asked anew, in vain"


def test_deposed_master_is_left(oracle: Oracle) -> None:
    knowing(oracle, "a:1,b:1")
    oracle.script[Remove].append(StaleEpoch("another master owns the catalog"))
    oracle.run(oracle.resources.daemons.call_master(Remove([b"k"], 0), Flags, oracle.deadline()))
    assert taken(oracle)[-1] == "b:1"
    knowing(oracle, "a:1")
    oracle.script[Remove].append(StaleEpoch("another master owns the catalog"))
    with pytest.raises(StaleEpoch):
        oracle.run(oracle.resources.daemons.call_master(Remove([b"k"], 0), Flags, oracle.deadline()))


@pytest.mark.promise("failover")
def test_reserve_is_retried_while_a_new_owner_has_no_nodes(oracle: Oracle) -> None:
    daemons = knowing(oracle, "a:1,b:1", owner_retry_s=0.25)
    oracle.owners["b:1"] = "a:1"
    daemons.nodes.note_master_epoch(6)
    daemons.nodes.replace(NodeTable([9], ["n9"], [""], [""], ["h:1"], [0], [b""]))
    oracle.script[Reserve] += [no_nodes] * 2
    reserve = Reserve([b"k"], [1], 0, 0)
    oracle.nodes[1] = OracleNode(1, local=False)
    oracle.run(daemons.call_master(reserve, ReserveReply, oracle.deadline()))
    assert oracle.slept_s == 0.25 + 0.5
    daemons.nodes.replace(oracle.run(daemons.call_master(Nodes(), NodeTable, oracle.deadline())))
    oracle.script[Reserve].append(no_nodes)
    with pytest.raises(Unavailable, match=r"^no node is registered$"):
        oracle.run(daemons.call_master(reserve, ReserveReply, oracle.deadline()))


def test_each_partition_finds_its_own_owner(oracle: Oracle) -> None:
    daemons = knowing(oracle, "a:1,b:1")
    oracle.partitions = 2
    assert oracle.run(daemons.partitions(oracle.deadline())) == 2
    oracle.unreachable.add("a:1")
    oracle.run(daemons.call_master(Exists([b"k"]), Flags, oracle.deadline(), partition=1))
    met = [(str(connection.channel.address), connection.channel.address.partition) for connection in oracle.loans]
    assert list(dict.fromkeys(met)) == [("a:1", 0), ("b:1", 1)]
    oracle.unreachable.clear()
    assert oracle.run(daemons.partitions(oracle.deadline())) == 2
    ask(oracle)
    assert str(oracle.loans[-1].channel.address) == "a:1", "the owner of partition 0 is who it was"


def test_reserve_is_retried_at_a_new_partition_owner(oracle: Oracle) -> None:
    daemons = knowing(oracle, "a:1,b:1", owner_retry_s=0.25)
    oracle.partitions = 2
    oracle.run(daemons.partitions(oracle.deadline()))
    oracle.nodes[1] = OracleNode(1, local=False)
    daemons.nodes.replace(oracle.run(daemons.call_master(Nodes(), NodeTable, oracle.deadline())))
    oracle.owners["b:1"] = "a:1"
    oracle.script[Reserve] += [no_nodes] * 2
    reserve = Reserve([b"k"], [1], 0, 0)
    oracle.run(daemons.call_master(reserve, ReserveReply, oracle.deadline(), partition=1))
    assert oracle.slept_s == 0.25 + 0.5
    oracle.script[Reserve].append(no_nodes)
    with pytest.raises(Unavailable, match=r"^no node is registered$"):
        oracle.run(daemons.call_master(reserve, ReserveReply, oracle.deadline(), partition=1))


@pytest.mark.promise("right-daemon")
def test_a_node_is_not_asked_at_an_address_where_another_answers(oracle: Oracle, node: OracleNode) -> None:
    oracle.store(b"a", b"value", 1)
    oracle.run(oracle.resources.daemons.refresh_nodes(oracle.deadline()))
    oracle.impostors[node.unix] = "next door"
    known = oracle.resources.daemons.nodes.get(1)
    assert known is not None
    for _ in range(2):  # it names its socket file itself, and gets one more chance there
        connection, _ = oracle.run(oracle.resources.daemons.begin(known.route, Exists([b"a"]), Flags, oracle.deadline()))
        assert [str(other.channel.address) for other in oracle.loans[-2:]] == [f"unix:{node.unix}", node.tcp]
        assert not oracle.loans[-2].channel.is_open
        assert connection.channel.is_open
    assert not known.route.is_local


@pytest.mark.promise("observable")
def test_node_without_unix_socket_is_diagnosed(oracle: Oracle, node: OracleNode, caplog: pytest.LogCaptureFixture) -> None:
    oracle.run(oracle.resources.daemons.refresh_nodes(oracle.deadline()))
    known = oracle.resources.daemons.nodes.get(1)
    assert known is not None
    oracle.unreachable |= {f"unix:{node.unix}", node.tcp}
    with pytest.raises(Unreachable):
        oracle.run(oracle.resources.daemons.begin(known.route, Exists([b"a"]), Flags, oracle.deadline()))
    assert oracle.resources.daemons.shm_diagnostics.reasons() == {}, "it does not answer at all"
    oracle.unreachable.remove(node.tcp)
    for _ in range(3):  # it names its socket file itself, and gets one more chance there
        oracle.run(oracle.resources.daemons.begin(known.route, Exists([b"a"]), Flags, oracle.deadline()))
    assert oracle.resources.daemons.shm_diagnostics.reasons() == {"n1": f"cannot connect to unix:{node.unix}"}
    assert len(caplog.records) == 1
    assert f"node 'n1' of this host is not reached through shared memory: cannot connect to unix:{node.unix}" in caplog.text


# --- tickets ---


@pytest.fixture
def guarded(oracle: Oracle, node: OracleNode) -> Oracle:
    """A cluster whose node takes a ticket, which the master gives out."""
    oracle.ticket = oracle.issued = b"first"
    oracle.ticket_ms = 10_000
    oracle.resources = ClientResources(
        ClientSettings(master="m:1", tenant="red", token="secret"), TransferSettings(), is_here=is_here, spread=0
    )
    oracle.run(oracle.resources.daemons.refresh_nodes(oracle.deadline()))
    oracle.hellos.clear()
    return oracle


def begin(oracle: Oracle) -> Any:
    daemons = oracle.resources.daemons
    known = daemons.nodes.get(1)
    assert known is not None
    return oracle.run(daemons.begin(known.route, Exists([b"a"]), Flags, oracle.deadline()))


def test_a_node_is_shown_its_ticket_and_never_the_token(guarded: Oracle) -> None:
    begin(guarded)
    [hello] = guarded.hellos
    assert hello is not None
    assert (hello.tenant, hello.token, hello.ticket) == ("red", "", b"first")
    assert hello.name.startswith("client-")


def test_tickets_are_renewed_at_half_their_life(oracle: Oracle, node: OracleNode) -> None:
    now_ns = 0
    daemons = oracle.resources.daemons
    daemons._clock_ns = lambda: now_ns
    oracle.issued, oracle.ticket_ms = b"first", 10_000
    oracle.run(daemons.refresh_nodes(oracle.deadline()))
    now_ns = 5_000_000_000 - 1
    begin(oracle)
    assert oracle.aside == []
    now_ns += 1
    for _ in range(2):
        begin(oracle)
    [renewal] = oracle.aside
    oracle.script[Nodes].append(Unavailable("no master now"))
    oracle.run(renewal)
    begin(oracle)
    assert len(oracle.aside) == 1, "it is tried again after a second"
    now_ns += 1_000_000_000
    begin(oracle)
    oracle.issued = b"second"
    oracle.run(oracle.aside[1])
    known = daemons.nodes.get(1)
    assert known is not None
    assert known.route.hello is not None
    assert known.route.hello.ticket == b"second"
    begin(oracle)
    assert len(oracle.aside) == 2
