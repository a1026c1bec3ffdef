"""Promises of agent_hub.py, over agents of one process."""

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from kvstore.protocol.errors import Closed
from kvstore.transfer.agent import Rail
from kvstore.transfer.agent_hub import AgentHub, FollowUp, RingMemory, SharedHub
from kvstore.transfer.agent_messages import Kind, pack_plain, pack_position, unpack_position
from kvstore.transfer.conformance_waiting import PATIENCE_S, QUIET_S, SOON_S, eventually, in_background, is_quiet, within
from kvstore.transfer.deadline import Deadline
from tests.transfer.local_agent import LocalAgent


def local(name: str) -> LocalAgent:
    return LocalAgent(name, Rail())


@dataclass
class Mailbox:
    """A receiver that keeps what it gets."""

    found: list[bytes] = field(default_factory=list)
    followed: list[str] = field(default_factory=list)

    def receive(self, message: bytes) -> FollowUp | None:
        self.found.append(message)
        return lambda: self.followed.append(threading.current_thread().name)


@pytest.fixture
def sender() -> Iterator[LocalAgent]:
    agent = local("sender")
    yield agent
    agent.close()


@pytest.fixture
def hub() -> Iterator[AgentHub]:
    hub = AgentHub(local("hub"))
    yield hub
    hub.close()


def send(sender: LocalAgent, message: bytes) -> None:
    sender.notify("hub", message, Deadline(PATIENCE_S))


def test_messages_come_to_their_recipients_in_order(hub: AgentHub, sender: LocalAgent) -> None:
    boxes = [Mailbox(), Mailbox()]
    numbers = [hub.attach(box.receive) for box in boxes]
    for position in range(20):
        send(sender, pack_position(Kind.DATA, numbers[position % 2], position))
    assert hub.wait(lambda: sum(len(box.found) for box in boxes) == 20, PATIENCE_S)
    assert [[unpack_position(message) for message in box.found] for box in boxes] == [list(range(0, 20, 2)), list(range(1, 20, 2))]


def test_what_a_receiver_returns_is_called_without_the_lock(hub: AgentHub, sender: LocalAgent) -> None:
    box = Mailbox()
    send(sender, pack_plain(Kind.BYE, hub.attach(box.receive)))
    assert hub.wait(lambda: bool(box.followed), PATIENCE_S)


def test_messages_for_nobody_are_dropped(hub: AgentHub, sender: LocalAgent) -> None:
    box, gone = Mailbox(), Mailbox()
    number = hub.attach(gone.receive)
    hub.detach(number)
    for message in (b"", b"\0", pack_plain(Kind.BYE, number), pack_plain(Kind.BYE, 12345), pack_plain(Kind.BYE, hub.attach(box.receive))):
        send(sender, message)
    assert hub.wait(lambda: bool(box.found), PATIENCE_S)
    assert not gone.found


def test_messages_come_though_nobody_waits(hub: AgentHub, sender: LocalAgent) -> None:
    box = Mailbox()
    send(sender, pack_plain(Kind.BYE, hub.attach(box.receive)))
    eventually(lambda: bool(box.followed), "the message")
    assert box.followed == ["hub-hub"]


def test_many_wait_and_each_gets_its_own(hub: AgentHub, sender: LocalAgent) -> None:
    boxes = [Mailbox() for _ in range(8)]
    numbers = [hub.attach(box.receive) for box in boxes]
    waiting = [in_background(lambda box=box: hub.wait(lambda: bool(box.found), PATIENCE_S)) for box in boxes]  # type: ignore[misc]
    assert all(map(is_quiet, waiting))
    for number, waiter in zip(numbers, waiting, strict=True):
        send(sender, pack_plain(Kind.BYE, number))
        assert waiter.result(PATIENCE_S)


def test_waiting_ends_when_the_time_is_over(hub: AgentHub) -> None:
    """For who looks, and for who lets another look."""
    ended = threading.Event()
    leader = in_background(lambda: hub.wait(ended.is_set, PATIENCE_S))
    assert is_quiet(leader)
    with within(QUIET_S):
        assert not hub.wait(lambda: False, QUIET_S)
    ended.set()
    assert leader.result(PATIENCE_S)
    with within(QUIET_S):
        assert not hub.wait(lambda: False, QUIET_S)


def test_what_is_so_needs_no_waiting(hub: AgentHub) -> None:
    assert hub.wait(lambda: True, 0.0)


def test_closing_ends_all_waiting(hub: AgentHub) -> None:
    waiting = [in_background(lambda: hub.wait(lambda: False, PATIENCE_S)) for _ in range(3)]
    assert all(map(is_quiet, waiting))
    hub.close()
    hub.close()
    for waiter in waiting:
        with pytest.raises(Closed):
            waiter.result(SOON_S)
    with pytest.raises(Closed):
        hub.wait(lambda: False, PATIENCE_S)


def test_a_follow_up_may_close_the_hub(sender: LocalAgent) -> None:
    """Also in the hub's own thread, which cannot wait for itself."""
    hub, closed = AgentHub(local("hub")), threading.Event()

    def close() -> None:
        hub.close()
        closed.set()

    send(sender, pack_plain(Kind.BYE, hub.attach(lambda message: close)))
    assert closed.wait(PATIENCE_S)


def test_telling_a_peer_says_whether_it_is_there(hub: AgentHub, sender: LocalAgent) -> None:
    assert hub.tell("sender", b"hello")
    assert sender.notifications() == [("hub", b"hello")]
    sender.close()
    assert not hub.tell("sender", b"hello")


def test_an_idle_hub_takes_next_to_no_processor_time(hub: AgentHub) -> None:
    began_s = time.process_time()
    hub.wait(lambda: False, 0.5)
    assert time.process_time() - began_s < 0.25


class Guest:
    """A connection, to its hub."""

    def __init__(self) -> None:
        self.freed = 0

    def free(self) -> None:
        self.freed += 1


def test_connections_of_one_key_share_an_agent_until_the_last_has_gone() -> None:
    first = SharedHub.of_outgoing("key", local)
    assert SharedHub.of_outgoing("key", local) is first
    other = SharedHub.of_outgoing("other", local)
    assert other.hub.agent.name != first.hub.agent.name
    other.release()
    first.release()
    assert first.hub.agent.name in LocalAgent.agents
    first.release()
    assert first.hub.agent.name not in LocalAgent.agents
    again = SharedHub.of_outgoing("key", local)
    assert again is not first
    again.release()


def test_the_last_one_frees_what_no_peer_has_let_go() -> None:
    shared, free, kept = SharedHub(local), Guest(), Guest()
    for guest in (free, kept):
        shared.enter(guest)
    shared.forget(free)
    for _ in range(2):
        shared.release()
    assert kept.freed == 0
    with within(1.0):
        shared.release()
    assert (free.freed, kept.freed) == (0, 1)
    with pytest.raises(Closed):
        shared.enter(Guest())


def test_the_memory_of_a_ring_can_be_shared_and_is_given_back() -> None:
    ring = RingMemory(8192)
    assert os.fstat(ring.region.fd).st_size == ring.region.size_bytes == 8192
    ring.region.memory[:3] = b"abc"
    assert os.pread(ring.region.fd, 3, 0) == b"abc"
    ring.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(ring.region.fd)
