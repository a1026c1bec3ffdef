"""Small daemon on real sockets for tests of channels and pools: it answers in its own thread, as configured."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.frames import FrameHeader
from kvstore.protocol.master_messages import Nodes
from kvstore.protocol.message import Message
from kvstore.protocol.messages import MESSAGES
from kvstore.protocol.node_messages import MapSlabs, MapSlabsReply, Put, ReleaseLeases
from kvstore.protocol.session_messages import Count, Hello, Ok, Welcome
from kvstore.rpc.address import Address, parse_address
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.server.server import ConnectionLimits, Server
from kvstore.rpc.server.session import Session

Answer = Callable[[Session, FrameHeader, Message], None]


class Daemon:
    """Welcomes everyone but `refused`; answers Put with the payload's size, Slabs with descriptors, Nodes as `on_nodes`
    says.
    """

    def __init__(self) -> None:
        self.reactor = Reactor()
        self.server = Server(self.reactor, self, ConnectionLimits(1000))
        self.on_nodes: Answer = lambda session, header, message: session.reply(header.request_id, Ok())
        self.refusal: KVStoreError | None = None
        self.hellos: list[Hello] = []
        self.released: list[int] = []
        self.heard = threading.Event()
        self.received = bytearray()
        self.closed_count = 0
        self.was_closed = threading.Semaphore(0)

    def frame(self, session: Session, header: FrameHeader, body: memoryview) -> None:
        message = MESSAGES[header.type].unpack(body)
        match message:
            case Hello():
                self.hellos.append(message)
                if self.refusal is not None:
                    raise self.refusal
                session.reply(header.request_id, Welcome(2, "daemon", 1, 42))
            case Nodes():
                self.on_nodes(session, header, message)
            case Put():
                session.reply(header.request_id, Count(len(self.received)))
            case ReleaseLeases():
                self.released += message.leases
                self.heard.set()
            case MapSlabs():
                fds = [os.memfd_create("slab") for slab in message.slabs if slab]

                def close_fds() -> None:
                    for fd in fds:
                        os.close(fd)

                sizes = [4096 * bool(slab) for slab in message.slabs]
                session.reply(header.request_id, MapSlabsReply(sizes), fds=fds, on_sent=close_fds)

    def payload(self, session: Session, header: FrameHeader, body: memoryview) -> list[memoryview]:
        self.received = bytearray(header.payload_bytes)
        return [memoryview(self.received)]

    def closed(self, session: Session) -> None:
        self.closed_count += 1
        self.was_closed.release()


@contextlib.contextmanager
def running(folder: Path) -> Iterator[tuple[Daemon, Address, Address]]:
    """(daemon, its TCP address, its Unix address), stopped at the end."""
    daemon = Daemon()
    tcp = parse_address(daemon.server.listen_tcp("127.0.0.1", 0))
    unix = Address(unix=daemon.server.listen_unix(folder / "daemon.sock"))
    thread = threading.Thread(target=daemon.reactor.run)
    thread.start()
    try:
        yield daemon, tcp, unix
    finally:
        daemon.reactor.stop()
        thread.join()
        daemon.server.close()
        daemon.reactor.close()
