"""A transport of one's own: connections between processes of one host over Unix stream sockets."""

import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from kvstore.protocol.errors import Closed, ProtocolError, Unreachable
from kvstore.transfer.agent import Rail
from kvstore.transfer.connection import Connection, Listener
from kvstore.transfer.deadline import Deadline

MAGIC, SEND, RECEIVE = b"unix example ", socket.SO_SNDTIMEO, socket.SO_RCVTIMEO


class UnixSocket(Connection, Listener):
    """Either kind of socket. A lock for each direction lets `close` wait until the threads that it has woken are out of it."""

    transport, is_open, name = "unix-example", True, b""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.turns = sock, {SEND: threading.Lock(), RECEIVE: threading.Lock()}

    @classmethod
    def listen(cls, rail: Rail) -> Listener:
        listener = cls(socket.socket(socket.AF_UNIX))
        listener.sock.bind("")  # a free name of the kernel's choice, in no folder
        listener.sock.listen()
        listener.name = bytes(listener.sock.getsockname())
        return listener

    @classmethod
    def connect(cls, metadata: bytes, rail: Rail, deadline: Deadline) -> Connection:
        if not metadata.startswith(MAGIC):
            raise ProtocolError("these bytes do not say how a Unix listener is reached")
        connection = cls(socket.socket(socket.AF_UNIX))
        connection.move(SEND, lambda name: connection.sock.connect(bytes(name)) or len(name), [metadata[len(MAGIC) :]], deadline)
        return connection

    def metadata(self) -> bytes:
        return MAGIC + self.name

    def accept(self, timeout_s: float) -> Connection | None:
        try:
            return type(self)(self.call(RECEIVE, timeout_s, self.sock.accept)[0])
        except BlockingIOError:
            return None
        except OSError:
            raise Closed("the listener is closed") from None
