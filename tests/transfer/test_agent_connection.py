"""Promises of agent_connection.py, over agents of one process; the suite of connections over them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore.protocol.errors import Closed, ConfigError, DeadlineExceeded, ProtocolError, Unreachable
from kvstore.transfer.agent import Rail
from kvstore.transfer.agent_connection import MAX_BACKLOG, AgentConnection, AgentListener
from kvstore.transfer.agent_hub import SharedHub
from kvstore.transfer.agent_messages import LISTENER, Kind, Offer, pack_offer, pack_plain, pack_position
from kvstore.transfer.conformance import ConnectionConformance
from kvstore.transfer.conformance_peer import pattern
from kvstore.transfer.conformance_waiting import PATIENCE_S, SHORT_S, SOON_S, eventually, in_background, is_quiet, within
from kvstore.transfer.deadline import Deadline
from kvstore.transfer.memory import RemoteRegion
from tests.transfer.local_agent import LocalAgent


class LocalConnection(AgentConnection):
    """Small, so that rings are full and wrapped often."""

    transport = "local"
    ring_bytes = 10_000
    chunk_bytes = 3_000

    @classmethod
    def make_agent(cls, name: str, rail: Rail) -> LocalAgent:
        return LocalAgent(name, rail)


class LargeConnection(LocalConnection):
    """Its peers may have rings of another size."""

    ring_bytes = 1 << 20
    chunk_bytes = 1 << 18


class TestOverLocalAgents(ConnectionConformance):
    connection_class = LocalConnection


@pytest.fixture
def listener() -> Iterator[AgentListener]:
    listener = LocalConnection.listen(Rail())
    yield listener
    listener.close()


Ends = tuple[AgentConnection, AgentConnection]


@pytest.fixture
def ends(listener: AgentListener) -> Iterator[Ends]:
    near = LocalConnection.connect(listener.metadata(), Rail(), Deadline(PATIENCE_S))
    far = listener.accept(PATIENCE_S)
    assert far is not None
    yield near, far
    near.close()
    far.close()


def agent_of(connection: AgentConnection) -> LocalAgent:
    agent = connection.agent
    assert isinstance(agent, LocalAgent)
    return agent


def receive(connection: AgentConnection, size_bytes: int) -> bytes:
    buffer = bytearray(size_bytes)
    connection.recv_into([memoryview(buffer)], Deadline(PATIENCE_S))
    return bytes(buffer)


def interrupted_once() -> Callable[..., None]:
    interruptions = iter([KeyboardInterrupt])

    def run(*_: Any) -> None:
        for interruption in interruptions:
            raise interruption

    return run


@pytest.mark.parametrize(("mine", "peers"), [(LargeConnection, LocalConnection), (LocalConnection, LargeConnection)])
def test_rings_of_two_sizes_fit(mine: type[AgentConnection], peers: type[AgentConnection]) -> None:
    listener = peers.listen(Rail())
    near = mine.connect(listener.metadata(), Rail(), Deadline(PATIENCE_S))
    far = listener.accept(PATIENCE_S)
    assert far is not None
    for sender, receiver in ((near, far), (far, near)):
        data = pattern(1, 3_000_017)
        sending = in_background(lambda sender=sender, data=data: sender.send([data], Deadline(PATIENCE_S)))  # type: ignore[misc]
        assert receive(receiver, len(data)) == data
        sending.result(PATIENCE_S)
    near.close()
    far.close()
    listener.close()


def test_a_subclass_is_asked_for_its_agent_alone() -> None:
    assert AgentConnection.__abstractmethods__ == {"make_agent"}


def test_a_peer_that_takes_no_bytes_is_given_up_before_the_deadline(ends: Ends) -> None:
    near, _ = ends
    near.stall_timeout_s = SHORT_S
    agent_of(near).is_stalled = True
    with within(SHORT_S), pytest.raises(Unreachable, match="took no byte"):
        near.send([b"x"], Deadline(PATIENCE_S))


def test_a_write_that_does_not_end_ends_with_the_connection(ends: Ends) -> None:
    near, _ = ends
    agent_of(near).is_stalled = True
    sending = in_background(lambda: near.send([b"x"], Deadline(PATIENCE_S)))
    assert is_quiet(sending)
    near.close()
    with pytest.raises(Closed):
        sending.result(SOON_S)


def test_a_peer_whose_agent_is_gone_is_unreachable(ends: Ends) -> None:
    near, far = ends
    agent_of(far).close()
    with pytest.raises(Unreachable):
        near.send([b"x"], Deadline(PATIENCE_S))
    assert not near.is_open
    with pytest.raises(Closed, match="has ended"):
        near.send([b"x"], Deadline(PATIENCE_S))


def test_a_call_that_is_interrupted_ends_the_connection(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = ends
    with monkeypatch.context() as patched:
        patched.setattr(LocalAgent, "run", interrupted_once())
        with pytest.raises(KeyboardInterrupt):
            near.send([b"x"], Deadline(PATIENCE_S))
    assert not near.is_open
    with pytest.raises(Unreachable):
        receive(far, 1)


def test_what_came_before_a_hang_up_is_received(ends: Ends) -> None:
    near, far = ends
    near.send([b"last words"], Deadline(PATIENCE_S))
    near.close()
    assert receive(far, 10) == b"last words"
    with pytest.raises(Unreachable, match="hung up"):
        receive(far, 1)


OUT_OF_TURN = {
    "data beyond the ring": lambda number: pack_position(Kind.DATA, number, 10_004),
    "data taken back": lambda number: pack_position(Kind.DATA, number, 2),
    "credit for what was not sent": lambda number: pack_position(Kind.CREDIT, number, 1),
    "a second welcome": lambda number: pack_offer(Kind.WELCOME, number, "local", Offer(1, RemoteRegion(1, 1, 1, {"local": b""}), b"")),
    "a position cut short": lambda number: pack_plain(Kind.DATA, number),
    "an unknown kind": lambda number: b"\x77" + pack_plain(Kind.BYE, number)[1:],
}


@pytest.mark.parametrize("what", OUT_OF_TURN)
def test_a_peer_that_breaks_the_protocol_is_told_apart(ends: Ends, what: str) -> None:
    near, far = ends
    near.send([b"abc"], Deadline(PATIENCE_S))
    assert receive(far, 3) == b"abc"
    agent_of(near).notify(agent_of(far).name, OUT_OF_TURN[what](far.number), Deadline(PATIENCE_S))
    with pytest.raises(ProtocolError):
        receive(far, 1)
    with pytest.raises(Unreachable):
        receive(near, 1)


def test_sending_to_a_peer_that_broke_the_protocol_fails(ends: Ends) -> None:
    near, far = ends
    agent_of(near).notify(agent_of(far).name, pack_position(Kind.CREDIT, far.number, 1 << 40), Deadline(PATIENCE_S))
    with within(SOON_S), pytest.raises(ProtocolError):
        while True:
            far.send([b""], Deadline(SOON_S))
            far.send([b"x"], Deadline(SOON_S))


def test_a_listener_that_is_closed_refuses_though_its_connections_stay(listener: AgentListener, ends: Ends) -> None:
    listener.close()
    with within(SOON_S), pytest.raises(Unreachable, match="closed or full"):
        LocalConnection.connect(listener.metadata(), Rail(), Deadline(PATIENCE_S))


def test_peers_that_wait_to_be_accepted_are_bounded(listener: AgentListener) -> None:
    waiting = [LocalConnection.connect(listener.metadata(), Rail(), Deadline(PATIENCE_S)) for _ in range(MAX_BACKLOG)]
    with pytest.raises(Unreachable, match="closed or full"):
        LocalConnection.connect(listener.metadata(), Rail(), Deadline(PATIENCE_S))
    listener.close()
    with pytest.raises(Unreachable):
        receive(waiting[0], 1)
    for connection in waiting:
        connection.close()


@pytest.mark.parametrize("message", [pack_plain(Kind.BYE, LISTENER), pack_plain(Kind.HELLO, LISTENER), b"\x77" + bytes(20)])
def test_garbage_does_not_disturb_a_listener(listener: AgentListener, message: bytes) -> None:
    stranger = LocalAgent("stranger", Rail())
    stranger.notify(listener.agent.name, message, Deadline(PATIENCE_S))
    near = LocalConnection.connect(listener.metadata(), Rail(), Deadline(PATIENCE_S))
    far = listener.accept(PATIENCE_S)
    assert far is not None
    near.close()
    far.close()
    stranger.close()


def test_a_welcome_that_comes_too_late_is_answered_with_a_farewell(listener: AgentListener, ends: Ends) -> None:
    """The peer may write into the ring until it has been told."""
    agent_of(ends[0]).is_deaf = True
    with pytest.raises(DeadlineExceeded):
        LocalConnection.connect(listener.metadata(), Rail(), Deadline(SHORT_S))
    far = listener.accept(PATIENCE_S)
    assert far is not None
    agent_of(ends[0]).is_deaf = False
    assert far.peer is not None
    welcome = pack_offer(Kind.WELCOME, far.peer.sender, "local", Offer(far.number, far.peer.ring, b""))
    agent_of(far).notify(agent_of(ends[0]).name, welcome, Deadline(PATIENCE_S))
    with pytest.raises(Unreachable, match="hung up"):
        receive(far, 1)
    far.close()


def test_memory_that_the_transport_cannot_reach_is_a_clear_error(listener: AgentListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalAgent, "refuses_export", True)
    with pytest.raises(ConfigError, match="cannot reach"):
        LocalConnection.connect(listener.metadata(), Rail(), Deadline(PATIENCE_S))


def test_a_peer_whose_ring_cannot_be_made_is_not_accepted(listener: AgentListener, ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(agent_of(ends[1]), "export", lambda region: None)
        with pytest.raises(Unreachable):
            LocalConnection.connect(listener.metadata(), Rail(), Deadline(PATIENCE_S))
    assert listener.accept(0.0) is None


def test_closing_the_last_connection_closes_its_agent(listener: AgentListener) -> None:
    near = LocalConnection.connect(listener.metadata(), Rail(), Deadline(PATIENCE_S))
    name = agent_of(near).name
    assert name in LocalAgent.agents
    near.close()
    eventually(lambda: name not in LocalAgent.agents, "the agent is closed")


def test_a_listener_that_closes_while_it_welcomes_hangs_up(listener: AgentListener, ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    accept = LocalConnection.accept

    def close_first(connection: LocalConnection, peer: Offer) -> None:
        listener.close()
        accept(connection, peer)

    monkeypatch.setattr(LocalConnection, "accept", close_first)
    near = LocalConnection.connect(listener.metadata(), Rail(), Deadline(PATIENCE_S))
    with within(SOON_S), pytest.raises(Unreachable, match="hung up"):
        receive(near, 1)


def test_a_peer_that_comes_as_the_last_one_leaves_is_not_welcomed(
    listener: AgentListener, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter = SharedHub.enter

    def leave(shared: SharedHub, guest: AgentConnection) -> None:
        if shared.hub.agent is listener.agent:
            raise Closed("injected")
        enter(shared, guest)

    monkeypatch.setattr(SharedHub, "enter", leave)
    with pytest.raises(DeadlineExceeded):
        LocalConnection.connect(listener.metadata(), Rail(), Deadline(SHORT_S))
    assert listener.accept(0.0) is None
