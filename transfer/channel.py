"""A client's blocking connection to one daemon: one request in flight, deadlines on every step, values read where they belong.

A Channel is used by one thread at a time; `pool.py` shares them out. Whatever breaks a channel closes it: after an error other than
the peer's own typed answer its stream may be anywhere.
"""

import os
import socket
import time
from array import array
from collections.abc import Sequence
from typing import Final, TypeVar

from kvstore.protocol.errors import DeadlineExceeded, KVStoreError, ProtocolError, Unavailable, from_code
from kvstore.protocol.frames import HEADER_BYTES, MAX_DEADLINE_MS, Header, pack_header, unpack_header
from kvstore.protocol.messages import Failure, Hello, Message, SlabFds, Welcome
from kvstore.transfer.address import Address, connect

M = TypeVar("M", bound=Message)

BUFFER_BYTES: Final = 64 << 10
"""Most answers, small values included, come with one recv."""
MAX_FDS: Final = 64
MAX_VECTORS: Final = 512


class Deadline:
    """A point in monotonic time that a whole operation shares, however many requests it takes."""

    __slots__ = ("at_ns", "timeout_s")

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.at_ns = time.monotonic_ns() + int(timeout_s * 1e9)

    def left_s(self) -> float:
        """Seconds left; raises DeadlineExceeded when there are none."""
        left_ns = self.at_ns - time.monotonic_ns()
        if left_ns <= 0:
            raise self.exceeded()
        return left_ns / 1e9

    def exceeded(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"no answer within the deadline of {self.timeout_s:g} s")


class Channel:
    """See the module. Owns its socket; `welcome` says who answered."""

    def __init__(self, address: Address, sock: socket.socket) -> None:
        self.address = address
        self._sock = sock
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._end = 0
        self._request_id = 0
        self._payload_left = 0
        self.is_open = True
        self.welcome: Welcome

    @classmethod
    def open(cls, address: Address, hello: Hello, deadline: Deadline) -> "Channel":
        """Connect and introduce. Raises Unavailable, DeadlineExceeded, or the peer's refusal (Unauthorized, ProtocolError)."""
        try:
            sock = connect(address, timeout_s=deadline.left_s())
        except TimeoutError:
            raise deadline.exceeded() from None
        except OSError as error:
            raise Unavailable(f"cannot connect to {address}: {error.strerror or error}") from None
        channel = cls(address, sock)
        try:
            channel.welcome = channel.call(hello, Welcome, deadline)
        except BaseException:
            channel.close()
            raise
        return channel

    def call(self, message: Message, answer: type[M], deadline: Deadline, payload: Sequence[memoryview | bytes] = ()) -> M:
        """Ask and return the answer. If it has a payload, read it with `read_into` before the next call.

        Raises the peer's typed error (the channel stays usable), Unavailable, DeadlineExceeded or ProtocolError (it is closed).
        """
        self._send(message, deadline, payload)
        return self._receive(answer, deadline)

    def call_for_fds(self, message: Message, deadline: Deadline) -> tuple[SlabFds, list[int]]:
        """Ask for slabs and return the answer with its descriptors, which are the caller's to close."""
        self._send(message, deadline)
        fds = array("i")
        try:
            self._sock.settimeout(deadline.left_s())
            data, ancillary, _, _ = self._sock.recvmsg(BUFFER_BYTES, socket.CMSG_LEN(MAX_FDS * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
            for level, kind, content in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
            if not data:
                raise Unavailable(f"{self.address} closed the connection")
            self._buffer[: len(data)] = data
            self._start, self._end = 0, len(data)
            return self._receive(SlabFds, deadline), list(fds)
        except (OSError, KVStoreError) as error:
            for fd in fds:
                os.close(fd)
            if isinstance(error, KVStoreError):
                raise
            raise self._broken(error, deadline) from None

    def post(self, message: Message) -> None:
        """Send a message that has no answer. A broken connection is found by the next call."""
        body = message.pack()
        try:
            self._sock.settimeout(1.0)
            self._sock.sendall(pack_header(message.TYPE, 0, len(body)) + body)
        except OSError:
            self.close()

    def read_into(self, destinations: Sequence[memoryview], deadline: Deadline) -> None:
        """Read the answer's payload, or its next part, into writable byte views, in order."""
        if sum(map(len, destinations)) > self._payload_left:
            self.close()
            raise ProtocolError(f"{self.address} sent {self._payload_left} bytes of values where more belong")
        pending = [view for view in destinations if len(view)]
        pending.reverse()
        while pending and self._start < self._end:
            view = pending.pop()
            size = min(len(view), self._end - self._start)
            view[:size] = self._buffer[self._start : self._start + size]
            self._start += size
            self._payload_left -= size
            if size < len(view):
                pending.append(view[size:])
        try:
            while pending:
                self._sock.settimeout(deadline.left_s())
                vectors = pending[: -MAX_VECTORS - 1 : -1]
                got = self._sock.recv_into(vectors[0]) if len(vectors) == 1 else self._sock.recvmsg_into(vectors)[0]
                if not got:
                    raise ConnectionResetError(0, "the peer closed the connection within a payload")
                self._payload_left -= got
                while pending and got >= len(pending[-1]):
                    got -= len(pending.pop())
                if got:
                    pending[-1] = pending[-1][got:]
        except OSError as error:
            raise self._broken(error, deadline) from None

    def _send(self, message: Message, deadline: Deadline, payload: Sequence[memoryview | bytes] = ()) -> None:
        if self._payload_left:
            self.close()
            raise ProtocolError("the previous answer's payload was not read")
        self._request_id = self._request_id % 0xFFFFFFFF + 1
        body = message.pack()
        left_s = deadline.left_s()
        head = pack_header(
            message.TYPE, self._request_id, len(body), sum(map(len, payload)), min(int(left_s * 1000) + 1, MAX_DEADLINE_MS)
        )
        try:
            self._sock.settimeout(left_s)
            if payload:
                _send_all(self._sock, [memoryview(head + body), *map(memoryview, payload)])
            else:
                self._sock.sendall(head + body)
        except OSError as error:
            raise self._broken(error, deadline) from None

    def _receive(self, answer: type[M], deadline: Deadline) -> M:
        try:
            header, body = self._read_frame(deadline)
        except OSError as error:
            raise self._broken(error, deadline) from None
        except ProtocolError:
            self.close()
            raise
        if header.type == Failure.TYPE:
            failure = Failure.unpack(body)
            if not header.request_id:
                self.close()  # the peer could not read us and hangs up
            raise from_code(failure.code, failure.text)
        if header.type != answer.TYPE or header.request_id != self._request_id:
            self.close()
            raise ProtocolError(f"{self.address} answered with a message of type {header.type} where {answer.__name__} belongs")
        try:
            reply = answer.unpack(body)
        except ProtocolError:
            self.close()
            raise
        self._payload_left = header.payload_bytes
        return reply

    def _read_frame(self, deadline: Deadline) -> tuple[Header, memoryview]:
        self._need(HEADER_BYTES, deadline)
        header = unpack_header(self._buffer, self._start)
        self._start += HEADER_BYTES
        self._need(header.body_bytes, deadline)
        body = self._buffer[self._start : self._start + header.body_bytes]
        self._start += header.body_bytes
        return header, body

    def _need(self, size: int, deadline: Deadline) -> None:
        """Have `size` contiguous unread bytes in the buffer."""
        if self._start == self._end:
            self._start = self._end = 0
        if self._start + size > len(self._buffer):
            rest = self._buffer[self._start : self._end]
            larger = memoryview(bytearray(max(size, BUFFER_BYTES)))
            larger[: len(rest)] = rest
            self._buffer, self._start, self._end = larger, 0, len(rest)
        while self._end - self._start < size:
            self._sock.settimeout(deadline.left_s())
            got = self._sock.recv_into(self._buffer[self._end :])
            if not got:
                raise ConnectionResetError(0, "the peer closed the connection")
            self._end += got

    def _broken(self, error: OSError, deadline: Deadline) -> KVStoreError:
        self.close()
        if isinstance(error, TimeoutError):
            return error if isinstance(error, KVStoreError) else deadline.exceeded()
        return Unavailable(f"the connection to {self.address} broke: {error.strerror or error}")

    def close(self) -> None:
        """Hang up. A second close is a no-op."""
        self.is_open = False
        self._sock.close()


def _send_all(sock: socket.socket, buffers: list[memoryview]) -> None:
    buffers.reverse()
    while buffers:
        sent = sock.sendmsg(buffers[: -MAX_VECTORS - 1 : -1])
        while buffers and sent >= len(buffers[-1]):
            sent -= len(buffers.pop())
        if sent:
            buffers[-1] = buffers[-1][sent:]
