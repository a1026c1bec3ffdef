"""A transport of one's own: connections between processes of one host over Unix stream sockets."""

import select
import socket
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvstore.protocol.errors import Closed, ProtocolError, Unreachable
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.agent import Rail
from kvstore.transfer.streams.connection import Connection, Listener

MAGIC = b"unix example "


class UnixSocket(Connection, Listener):
    """Either kind: one that listens, or one end of a connection."""

    transport, is_open = "unix-example", True

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.receiver = sock, sock.dup()  # each direction has its own timeout
        for each in (self.sock, self.receiver):
            weakref.finalize(self, each.close)  # not in `close`: a thread may be inside, and the descriptor soon another file's

    @classmethod
    def listen(cls, rail: Rail) -> Listener:
        listener = cls(socket.socket(socket.AF_UNIX))
        listener.sock.bind("")  # a free name of the kernel's choice, in no folder; it begins with a zero byte
        listener.sock.listen()
        return listener

    @classmethod
    def connect(cls, metadata: bytes, rail: Rail, deadline: Deadline) -> Connection:
        if not metadata.startswith(MAGIC + b"\0"):
            raise ProtocolError("these bytes do not say how a Unix listener is reached")
        own = cls(socket.socket(socket.AF_UNIX))
        own.move(own.sock, lambda name: 0 if own.sock.connect_ex(bytes(name)) else len(name), [metadata[len(MAGIC) :]], deadline)
        return own

    def metadata(self) -> bytes:
        return MAGIC + bytes(self.sock.getsockname())

    def accept(self, timeout_s: float) -> Connection | None:
        poller = select.poll()
        poller.register(self.sock, select.POLLIN)
        is_awake = poller.poll(timeout_s * 1000)
        if not self.is_open:
            raise Closed("the listener is closed")
        return UnixSocket(self.sock.accept()[0]) if is_awake else None

    def send(self, parts: Sequence[memoryview | bytes], deadline: Deadline) -> None:
        self.move(self.sock, self.sock.send, parts, deadline)

    def recv_into(self, parts: Sequence[memoryview], deadline: Deadline) -> None:
        self.move(self.receiver, self.receiver.recv_into, parts, deadline)

    def move(self, sock: socket.socket, step: Callable[[memoryview], int], parts: Sequence[memoryview | bytes], deadline: Deadline) -> None:
        try:
            for part in [memoryview(part) for part in parts]:
                while len(part):
                    sock.settimeout(min(deadline.left_s(), self.stall_timeout_s))
                    if not (count := step(part)):
                        raise ConnectionResetError("the peer closed the connection")
                    part = part[count:]
        except BaseException as error:  # whatever it was, the place in the stream is lost
            if not self.is_open:
                raise Closed("the connection is closed") from None
            self.close()
            deadline.left_s()  # raises DeadlineExceeded if that was the reason
            raise Unreachable(f"the peer is gone or has stalled: {error}") if isinstance(error, OSError) else error from None

    def close(self) -> None:
        self.is_open = False
        with suppress(OSError):  # it was never connected, or the peer has closed it
            self.sock.shutdown(socket.SHUT_RDWR)
