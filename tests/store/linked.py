"""A master link under the control of a test, in a running loop."""

import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.catalog_messages import Heartbeat, HeartbeatResponse
from kvstore.protocol.errors import InvalidArgument, KVStoreError
from kvstore.protocol.frames import FrameHeader
from kvstore.rpc.address import parse_address
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.server.session import Session
from kvstore.store.config import NodeSettings
from kvstore.store.identity import NodeIdentity, new_instance
from kvstore.store.master_requests import request_master
from kvstore.store.master_session.master_link import HeartbeatReport, MasterLink
from kvstore.testing.transfer.awaited import eventually


class Deaf:
    """Takes no command."""

    def frame(self, session: Session, header: FrameHeader, body: memoryview) -> None:
        raise InvalidArgument("no commands")

    def payload(self, session: Session, header: FrameHeader, body: memoryview) -> list[memoryview] | None:
        raise InvalidArgument("no values")

    def closed(self, session: Session) -> None:
        return


Linked = queue.SimpleQueue[tuple[socket.socket, pb.RegisterReply]]


class Member:
    """A stub node: reports the test's data and records what masters send."""

    def __init__(self, node_id: Callable[[], int], on_refused: Callable[[str], None], answers: Sequence[KVStoreError | None]) -> None:
        self.reactor = Reactor()
        self.identity = NodeIdentity("n0", "1", "", "", "t:1", new_instance())
        self.linked = Linked()
        self.sessions: list[Session] = []
        self.refused = on_refused
        self._node_id = node_id
        self._answers = list(answers)

    def join_token(self) -> str:
        return ""

    def link_flows(self) -> list[pb.LinkFlow]:
        return [pb.LinkFlow(device="eth0", in_bytes=5)]

    def node_id(self, partition: int) -> int:
        return self._node_id()

    def report(self, hot_blocks: int, slow_version: int) -> HeartbeatReport:
        hot = [pb.HotBlocks(tenant="red", keys=[b"k"], reads_per_s=[hot_blocks])] if hot_blocks else []
        return HeartbeatReport([], {}, rates=[pb.PeerRate(node_id=7, bytes_per_s=5.0, basis_bytes=9, age_s=0.5)], hot=hot)

    def registered(self, partition: int, partitions: int, node_id: int) -> None:
        return

    def reuse(self, *, is_first: bool) -> pb.ReuseReport | None:
        return None

    def apply_reuse(self, told: pb.ReuseReport) -> None:
        return

    def apply_reply(self, told: pb.RegisterReply | pb.HeartbeatReply) -> None:
        return

    def begin(self, sock: socket.socket, registration: pb.RegisterReply, accepts_traces: bool) -> None:
        self.linked.put((sock.dup(), registration))
        self.sessions.append(Session(self.reactor, sock, Deaf()))

    def send_heartbeat(self, request: bytes, answered: Callable[[HeartbeatResponse | KVStoreError], None], deadline_s: float) -> None:
        if self._answers:
            if (answer := self._answers.pop(0)) is not None:
                answered(answer)
        else:
            request_master(self.sessions[-1], Heartbeat(request), HeartbeatResponse, answered, deadline_s=deadline_s)


@contextmanager
def a_link(
    *masters: str,
    needs_tickets: bool = False,
    timeout_s: float = 10.0,
    answers: Sequence[KVStoreError | None] = (),
    node_id: Callable[[], int] = lambda: 0,
    on_refused: Callable[[str], None] = lambda _why: None,
) -> Iterator[tuple[MasterLink, Linked]]:
    """A link that is not started yet, in a loop that runs, and the connections that it has made. `answers` are those to its first
    heartbeats, in place of the master's (None: it has none, ever); `node_id` is what partition 0 has given the node."""
    member = Member(node_id, on_refused, answers)
    settings = NodeSettings(
        control_timeout_s=timeout_s, owner_patience_s=0.05, reconnect_interval_s=0.01, reconnect_max_interval_s=0.1, refused_s=0.05
    )
    link = MasterLink(member, [parse_address(address) for address in masters], member, settings, needs_tickets=needs_tickets)
    serving = threading.Thread(target=member.reactor.run)
    serving.start()
    try:
        yield link, member.linked
    finally:
        member.reactor.stop()
        serving.join()
        link.stop()
        for session in member.sessions:
            session.close()
        member.reactor.close()


def until(condition: Callable[[], bool]) -> None:
    eventually(condition, "what the test waits for")
