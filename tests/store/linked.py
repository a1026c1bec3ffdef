"""A link to masters that a test has in its hands, in a loop that runs."""

import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.catalog_messages import Heard, Heartbeat
from kvstore.protocol.errors import InvalidArgument, KVStoreError
from kvstore.protocol.frames import Header
from kvstore.rpc.address import parse_address
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.session import Session
from kvstore.store.identity import Identity, new_instance
from kvstore.store.link import MasterLink
from kvstore.store.asking import ask
from kvstore.store.uses import Uses
from kvstore.transfer.testing.waiting import eventually


class Deaf:
    """Takes no command."""

    def frame(self, session: Session, header: Header, body: memoryview) -> None:
        raise InvalidArgument("no commands")

    def payload(self, session: Session, header: Header, body: memoryview) -> list[memoryview] | None:
        raise InvalidArgument("no values")

    def closed(self, session: Session) -> None:
        return


Linked = queue.SimpleQueue[tuple[socket.socket, pb.RegisterReply]]


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
    reactor, linked, sessions = Reactor(), Linked(), list[Session]()
    given = list(answers)

    def on_link(sock: socket.socket, reply: pb.RegisterReply, _takes_traces: bool) -> None:
        linked.put((sock.dup(), reply))
        sessions.append(Session(reactor, sock, Deaf()))

    def over_link(said: bytes, answered: Callable[[Heard | KVStoreError], None], deadline_s: float) -> None:
        if given:
            if (answer := given.pop(0)) is not None:
                answered(answer)
        else:
            ask(sessions[-1], Heartbeat(said), Heard, answered, deadline_s=deadline_s)

    link = MasterLink(
        reactor,
        [parse_address(address) for address in masters],
        Identity("n0", "1", "", "", "t:1", new_instance()),
        tier_status=lambda: ([], {}),
        rates=lambda: [pb.PeerRate(node_id=7, bytes_per_s=5.0, basis_bytes=9, age_s=0.5)],
        hot=lambda most: [pb.HotBlocks(tenant="red", keys=[b"k"], reads_per_s=[most])] if most else [],
        links=lambda: [pb.LinkFlow(device="eth0", in_bytes=5)],
        uses=lambda _slow_version: Uses([], []),
        on_told=lambda _reply: None,
        on_registered=lambda _count, _node_id: None,
        on_link=on_link,
        on_refused=on_refused,
        refused_s=0.05,
        over_link=over_link,
        join_token=lambda: "",
        needs_tickets=needs_tickets,
        timeout_s=timeout_s,
        patience_s=0.05,
        peer_timeout_s=30.0,
        pause_s=0.01,
        max_pause_s=0.1,
        node_id=node_id,
    )
    serving = threading.Thread(target=reactor.run)
    serving.start()
    try:
        yield link, linked
    finally:
        reactor.stop()
        serving.join()
        link.stop()
        for session in sessions:
            session.close()
        reactor.close()


def until(condition: Callable[[], bool]) -> None:
    eventually(condition, "what the test waits for")
