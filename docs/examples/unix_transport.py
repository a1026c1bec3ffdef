"""A transport of one's own: connections between processes of one host over Unix stream sockets.

Name it in the settings, transports = "docs.examples.unix_transport:UnixConnection,tcp", and test it as
tests/docs/test_unix_transport.py does.
"""

import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from kvstore.protocol.errors import Closed, ProtocolError, Unreachable
from kvstore.transfer.agent import Rail
from kvstore.transfer.connection import Connection, Listener
from kvstore.transfer.deadline import Deadline

MAGIC = b"unix example "


class UnixSocket:
    """What both kinds of socket need: a timeout for each direction, and a close that first wakes the threads inside."""

    is_open = True

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._turns = {socket.SO_SNDTIMEO: threading.Lock(), socket.SO_RCVTIMEO: threading.Lock()}

    def _call(self, option: int, timeout_s: float, act: Callable[..., Any], *arguments: Any) -> Any:
        with self._turns[option]:
            self._sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", *divmod(int(timeout_s * 1e6) + 1, 1_000_000)))
            return act(*arguments)

    def close(self) -> None:
        self.is_open = False
        with suppress(OSError):  # it may have been closed before
            self._sock.shutdown(socket.SHUT_RDWR)
        with self._turns[socket.SO_SNDTIMEO], self._turns[socket.SO_RCVTIMEO]:
            self._sock.close()


class UnixConnection(UnixSocket, Connection):
    transport = "unix-example"

    @classmethod
    def listen(cls, rail: Rail) -> "UnixListener":
        return UnixListener()

    @classmethod
    def connect(cls, metadata: bytes, rail: Rail, deadline: Deadline) -> "UnixConnection":
        if not metadata.startswith(MAGIC):
            raise ProtocolError("these bytes do not say how a Unix listener is reached")
        connection = cls(socket.socket(socket.AF_UNIX))
        with connection._errors(deadline):
            connection._call(socket.SO_SNDTIMEO, deadline.left_s(), connection._sock.connect, b"\0" + metadata.removeprefix(MAGIC))
        return connection

    def send(self, parts: Sequence[memoryview | bytes], deadline: Deadline) -> None:
        self._move(socket.SO_SNDTIMEO, self._sock.send, parts, deadline)

    def recv_into(self, parts: Sequence[memoryview], deadline: Deadline) -> None:
        self._move(socket.SO_RCVTIMEO, self._sock.recv_into, parts, deadline)

    def _move(self, option: int, step: Callable[[memoryview], int], parts: Sequence[memoryview | bytes], deadline: Deadline) -> None:
        with self._errors(deadline):
            for part in parts:
                rest = memoryview(part)
                while len(rest):
                    count = self._call(option, min(deadline.left_s(), self.stall_timeout_s), step, rest)
                    if not count:
                        raise ConnectionResetError("it hung up")
                    rest = rest[count:]

    @contextmanager
    def _errors(self, deadline: Deadline) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # whatever it was, the place in the stream is lost
            was_open = self.is_open
            self.close()
            if not was_open:
                raise Closed("the connection is closed") from None
            deadline.left_s()  # raises DeadlineExceeded if that was the reason
            raise Unreachable(f"the peer is gone or has stalled: {error}") if isinstance(error, OSError) else error from None


class UnixListener(UnixSocket, Listener):
    def __init__(self) -> None:
        super().__init__(socket.socket(socket.AF_UNIX))
        self._sock.bind("")  # a free name of the kernel's choice, in no folder
        self._sock.listen()
        self._metadata = MAGIC + bytes(self._sock.getsockname()[1:])

    def metadata(self) -> bytes:
        return self._metadata

    def accept(self, timeout_s: float) -> UnixConnection | None:
        try:
            return UnixConnection(self._call(socket.SO_RCVTIMEO, timeout_s, self._sock.accept)[0])
        except BlockingIOError:
            return None
        except OSError:
            raise Closed("the listener is closed") from None
