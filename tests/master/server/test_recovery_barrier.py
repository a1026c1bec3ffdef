"""Tests of recovery_barrier.py: an owner that has just been made answers for blocks whose nodes have yet to register once they have."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.catalog_messages import PHASE_SYNC_BEGIN, Heartbeat, HeartbeatResponse
from kvstore.protocol.errors import Unavailable
from kvstore.protocol.frames import FrameHeader
from kvstore.protocol.master_messages import (
    Exists,
    Locations,
    Lookup,
    MatchPrefix,
    Nodes,
    NodeTable,
    Pin,
    PinFor,
    Remove,
    Replicate,
    Reserve,
    ReserveReply,
)
from kvstore.protocol.message import BUSY, GRANTED, PRESENT, REPLICAS_NO_BLOCK, Message
from kvstore.protocol.session_messages import Count, Failure, Flags, Ok
from kvstore.rpc.client.channel import Channel
from kvstore.security.actor import THIS_MASTER
from kvstore.testing.transfer.awaited import eventually
from tests.master.blocks import TENANT, Event, publish
from tests.master.running import TIMEOUT_S, NodeSide, Places, ask, master_in_thread
from tests.rpc.wires import frame, read_frame

FOR_EVER = {"takeover_wait_s": 60.0}


@pytest.fixture
def catalog(tmp_path: Path) -> dict[str, Any]:
    """Settings of a master whose catalog names a node with the blocks a and b, and a node `two` with c."""
    settings = {"catalog": f"lmdb:{tmp_path / 'catalog'}", "node_ttl_s": 60.0}
    with master_in_thread(tmp_path, **settings) as places:
        for name, keys in (("one", b"ab"), ("two", b"c")):
            node = NodeSide(places, name)
            node.sync(*(Event(bytes((key,))) for key in keys))
            node.close()
    return settings


@pytest.fixture
def places(tmp_path: Path, catalog: dict[str, Any]) -> Iterator[Places]:
    """The next owner, which would wait for ever."""
    with master_in_thread(tmp_path, **catalog, **FOR_EVER) as found:
        yield found


class Asking(threading.Thread):
    """A question to a master, asked in a thread of its own."""

    def __init__(self, places: Places, message: Message, answer: type[Any]) -> None:
        super().__init__()
        self._channel: Channel = places.client()
        self._question = message, answer
        self.answer: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.answer = ask(self._channel, *self._question)
        except Unavailable as error:
            self.answer = error
        finally:
            self._channel.close()

    def result(self) -> Any:
        self.join(TIMEOUT_S)
        assert not self.is_alive()
        return self.answer


def come(places: Places, name: str = "one") -> NodeSide:
    """A node that has registered and begins its inventory. The answer to that may come behind commands: `command` passes it by."""
    node = NodeSide(places, name)
    message = publish(node.registration.registration_epoch, (), PHASE_SYNC_BEGIN)
    node.sock.sendall(frame(message, 1))
    return node


def command(node: NodeSide) -> FrameHeader:
    """Commands that the master sends to the node."""
    header, _body = node.read()
    return header if header.type != Ok.TYPE else node.read()[0]


def await_waiting(places: Places, count: int) -> None:
    """Until so many questions wait."""
    master = places.master
    assert master is not None

    def waiting() -> int:
        return master.reactor.call(lambda: len(master.partitions[0].role_manager.leader()._recovery_barrier._waiting), deadline_s=TIMEOUT_S)

    eventually(lambda: waiting() == count, f"{count} questions that wait")


def test_lookup_waits_for_awaited_holders(places: Places) -> None:
    asked = [
        Asking(places, Exists([b"none", b"a"]), Flags),
        Asking(places, MatchPrefix([b"a", b"b", b"none"]), Count),
        Asking(places, Lookup([b"b"]), Locations),
    ]
    of_both = [Asking(places, Exists([b"a", b"c"]), Flags), Asking(places, Nodes(), NodeTable)]
    await_waiting(places, 5)
    one = come(places)
    assert [request.result() for request in asked[:2]] == [Flags(b"\0\1"), Count(2)]
    assert list(asked[2].result().nodes) == [one.registration.node_id]
    await_waiting(places, 2)
    two = come(places, "two")
    assert of_both[0].result() == Flags(b"\1\1")
    assert sorted(of_both[1].result().names) == ["one", "two"]
    for node in (one, two):
        node.close()


@pytest.mark.promise("failover")
def test_put_waits_for_existing_blocks_only(places: Places) -> None:
    """PRESENT is the response once the node's inventory has confirmed the block; until then the writer retries."""
    of_both = Asking(places, Reserve([b"a", b"new"], [1, 1]), ReserveReply)
    await_waiting(places, 1)
    client = places.client()
    two = come(places, "two")
    assert ask(client, Reserve([b"newer"], [1]), ReserveReply).statuses == bytes([GRANTED])
    one = NodeSide(places)
    one.publish(phase=PHASE_SYNC_BEGIN)
    assert of_both.result().statuses == bytes([BUSY, GRANTED])
    one.sync(Event(b"a"))
    assert ask(client, Reserve([b"a", b"b"], [1, 1]), ReserveReply).statuses == bytes([PRESENT, GRANTED])
    client.close()
    for node in (one, two):
        node.close()


@pytest.mark.promise("failover")
@pytest.mark.parametrize(
    "sent", [Pin([b"a", b"none"]), Pin([b"a", b"none"], pinned=0), PinFor([b"a", b"none"], 60_000), Remove([b"a", b"none"])], ids=repr
)
def test_block_action_waits_for_its_node(places: Places, sent: Message) -> None:
    """Otherwise the block would be reported as absent, and not pinned."""
    asked = Asking(places, sent, Flags)
    await_waiting(places, 1)
    node = come(places)
    if sent != Pin([b"a", b"none"], pinned=0):  # the node gets a command
        header = command(node)
        node.answer(header, Flags(b"\1"))
    assert asked.result() == Flags(b"\1\0")
    node.close()


@pytest.mark.parametrize("action", ["pin_all", "remove_all"])
def test_namespace_action_waits_for_all_nodes(places: Places, action: str) -> None:
    assert places.master is not None
    reactor, leader = places.master.reactor, places.master.partitions[0].role_manager.leader()
    given = {"pinned": True} if action == "pin_all" else {}
    done = reactor.call(lambda: getattr(leader, action)(TENANT, "ns", THIS_MASTER, **given), deadline_s=TIMEOUT_S)
    nodes = []
    for name, count in (("one", 2), ("two", 1)):
        assert not done.done()
        node = come(places, name)
        nodes.append((node, count))
    for node, count in nodes:
        header = command(node)
        node.answer(header, Flags(b"\1" * count))
    assert done.result(TIMEOUT_S) == 3
    for node, _count in nodes:
        node.close()


@pytest.mark.parametrize(
    "sent", [Pin([b"a", b"none"]), PinFor([b"a", b"none"], 60_000), Remove([b"a", b"none"]), Replicate([b"a", b"none"], 1)], ids=repr
)
def test_block_action_waits_for_the_nodes_connection(places: Places, sent: Message) -> None:
    """Registered nodes count as holders, so that what only reads is answered."""
    assert places.master is not None
    reactor, leader = places.master.reactor, places.master.partitions[0].role_manager.leader()
    with places.stub() as stub:
        stub.Register(pb.RegisterRequest(name="one", instance=1), timeout=TIMEOUT_S)
    client = places.client()
    assert ask(client, Exists([b"a"]), Flags) == Flags(b"\1")
    asked = Asking(places, sent, Flags)
    await_waiting(places, 1)
    reactor.call(lambda: leader._recovery_barrier.run_due(reactor.now_ns()), deadline_s=TIMEOUT_S)
    assert asked.answer is None
    node = come(places)
    if not isinstance(sent, Replicate):
        header = command(node)
        node.answer(header, Flags(b"\1"))
        assert asked.result() == Flags(b"\1\0")
    else:
        there, absent = asked.result().flags
        assert (there == REPLICAS_NO_BLOCK, absent == REPLICAS_NO_BLOCK) == (False, True)
    client.close()
    node.close()


def test_namespace_action_waits_for_the_nodes_connection(places: Places) -> None:
    assert places.master is not None
    reactor, leader = places.master.reactor, places.master.partitions[0].role_manager.leader()
    done = reactor.call(lambda: leader.pin_all(TENANT, "ns", THIS_MASTER, pinned=True), deadline_s=TIMEOUT_S)
    two = come(places, "two")
    with places.stub() as stub:
        registration = stub.Register(pb.RegisterRequest(name="one", instance=1), timeout=TIMEOUT_S)
    reactor.call(lambda: leader._recovery_barrier.run_due(reactor.now_ns()), deadline_s=TIMEOUT_S)
    assert leader._recovery_barrier.awaited == {registration.node_id}
    assert not done.done()
    one = come(places)
    for node, count in ((one, 2), (two, 1)):
        header = command(node)
        node.answer(header, Flags(b"\1" * count))
        node.close()
    assert done.result(TIMEOUT_S) == 3


def test_an_owner_that_ends_does_nothing_more_to_a_namespace(places: Places) -> None:
    assert places.master is not None
    reactor, leader = places.master.reactor, places.master.partitions[0].role_manager.leader()
    done = reactor.call(lambda: leader.pin_all(TENANT, "ns", THIS_MASTER, pinned=True), deadline_s=TIMEOUT_S)
    reactor.call(lambda: leader.end(Unavailable("another master owns it")), deadline_s=TIMEOUT_S)
    with pytest.raises(Unavailable):
        done.result(TIMEOUT_S)
    assert leader._recovery_barrier._actions == []


def test_command_is_not_sent_with_the_welcome(places: Places) -> None:
    """The Welcome's reader passes the socket on, and cannot handle further messages yet."""
    asked = Asking(places, Remove([b"a"]), Flags)
    await_waiting(places, 1)
    node = NodeSide(places)
    heartbeat = pb.HeartbeatRequest(node_id=node.registration.node_id, registration_epoch=node.registration.registration_epoch)
    header, _body = node.ask(Heartbeat(heartbeat.SerializeToString()))
    assert header.type == HeartbeatResponse.TYPE, "that is the next word after the Welcome"
    node.sock.sendall(frame(publish(node.registration.registration_epoch, (), PHASE_SYNC_BEGIN), 1))
    node.answer(command(node), Flags(b"\1"))
    assert asked.result() == Flags(b"\1")
    node.close()


def test_failed_request_does_not_affect_others(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with an unexpected error; the registering node is not affected."""
    assert places.master is not None
    directory = places.master.partitions[0].role_manager.leader().directory
    monkeypatch.setattr(directory.queries, "match_prefix", lambda tenant, keys: 1 // 0)
    sock = places.client().detach()
    sock.settimeout(TIMEOUT_S)
    sock.sendall(frame(MatchPrefix([b"a"]), 1))
    await_waiting(places, 1)
    asked = Asking(places, Exists([b"a"]), Flags)
    await_waiting(places, 2)
    nodes = [NodeSide(places, name) for name in ("two", "one")]
    for node in nodes:
        node.publish(phase=PHASE_SYNC_BEGIN)
    answer = read_frame(sock)[1]
    assert isinstance(answer, Failure)
    assert "ZeroDivisionError" in answer.text
    assert asked.result() == Flags(b"\1")
    for node in nodes:
        node.close()
    sock.close()


def test_a_put_that_has_waited_in_vain_is_told_what_is_wrong(tmp_path: Path, catalog: dict[str, Any]) -> None:
    with master_in_thread(tmp_path, **catalog, takeover_wait_s=0.3) as places:
        assert isinstance(Asking(places, Reserve([b"a"], [1]), ReserveReply).result(), Unavailable), (
            "no node has come to which it could be written"
        )


def test_nobody_waits_for_what_no_node_has_or_one_that_has_come(places: Places) -> None:
    node, client = come(places), places.client()
    assert ask(client, Exists([b"none", b"a"]), Flags) == Flags(b"\0\1")
    node.close()
    eventually(lambda: ask(client, Exists([b"a"]), Flags) == Flags(b"\0"), "a node that has come and is gone again is not waited for")
    client.close()


@pytest.mark.promise("failover")
def test_blocks_of_a_late_node_are_misses(tmp_path: Path, catalog: dict[str, Any]) -> None:
    with master_in_thread(tmp_path, **catalog, takeover_wait_s=0.3) as places:
        client = places.client()
        assert ask(client, Exists([b"a"]), Flags) == Flags(b"\0")
        assert ask(client, Nodes(), NodeTable).names == []
        client.close()


@pytest.mark.promise("failover")
def test_status_calls_no_awaited_node_dead(tmp_path: Path, catalog: dict[str, Any]) -> None:
    """An operator looks after each failover, and is advised to forget dead nodes."""

    def states(places: Places) -> dict[str, str]:
        with places.stub() as stub:
            return {node.name: node.state for node in stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S).nodes}

    with master_in_thread(tmp_path, **catalog, **FOR_EVER) as places:
        assert states(places) == {"one": "syncing", "two": "syncing"}
        come(places).close()
        eventually(lambda: states(places) == {"one": "dead", "two": "syncing"}, "it has come and gone")
    with master_in_thread(tmp_path, **catalog, takeover_wait_s=0.0) as places:
        assert states(places) == {"one": "dead", "two": "dead"}


def test_more_than_so_many_keys_do_not_wait(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.master.server.recovery_barrier.MAX_WAITING_KEYS", 3)
    waiting = Asking(places, Exists([b"a", b"b"]), Flags)
    await_waiting(places, 1)
    client = places.client()
    assert ask(client, Exists([b"b", b"a"]), Flags) == Flags(b"\0\0")
    client.close()
    node = come(places)
    assert waiting.result() == Flags(b"\1\1")
    node.close()


def test_who_has_hung_up_is_not_answered(places: Places) -> None:
    sock = places.client().detach()
    sock.sendall(frame(Exists([b"a"]), 1))
    await_waiting(places, 1)
    sock.close()
    node = come(places)
    await_waiting(places, 0)
    node.close()


def test_an_owner_that_ends_hangs_up_on_who_waits(tmp_path: Path, catalog: dict[str, Any]) -> None:
    with master_in_thread(tmp_path, **catalog, **FOR_EVER) as places:
        asked = Asking(places, Exists([b"a"]), Flags)
        await_waiting(places, 1)
    assert isinstance(asked.result(), Unavailable)


def test_ended_owner_closes_waiting_sessions_until_deadline(places: Places) -> None:
    master, client = places.master, places.client()
    assert master is not None
    recovery_barrier = master.partitions[0].role_manager.leader()._recovery_barrier

    def send(until_ns: int) -> None:
        recovery_barrier._until_ns = until_ns

    master.reactor.call(lambda: recovery_barrier.end("another owns it"), deadline_s=TIMEOUT_S)
    assert ask(client, Exists([b"none"]), Flags) == Flags(b"\0")
    with pytest.raises(Unavailable):
        ask(client, Exists([b"a"]), Flags)
    client.close()
    master.reactor.call(lambda: send(0), deadline_s=TIMEOUT_S)
    client = places.client()
    assert ask(client, Exists([b"a"]), Flags) == Flags(b"\0")
    client.close()
