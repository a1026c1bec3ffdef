"""A client's blocking connection to one daemon: one request in flight, deadlines on every step, values read where they belong.

A Channel is used by one thread at a time; `pool.py` shares them out. Whatever breaks a channel closes it: after an error other than
the peer's own typed answer its stream may be anywhere.

Deadlines are the kernel's (SO_RCVTIMEO, SO_SNDTIMEO), set only when they change noticeably: `settimeout` costs an ioctl a step and a
poll before every recv, 4 us a request of 20.
"""

import os
import socket
import struct
from array import array
from collections.abc import Sequence
from typing import Final, TypeVar

from kvstore.protocol.errors import KVStoreError, ProtocolError, Unavailable, from_code
from kvstore.protocol.frames import HEADER_BYTES, MAX_DEADLINE_MS, Header, pack_header, unpack_header
from kvstore.protocol.messages import Failure, Hello, Message, SlabFds, Welcome
from kvstore.transfer.address import Address, connect
from kvstore.transfer.deadline import Deadline

M = TypeVar("M", bound=Message)
V = TypeVar("V", memoryview, memoryview | bytes)

BUFFER_BYTES: Final = 64 << 10
"""Most answers, small values included, come with one recv."""
MAX_FDS: Final = 64
MAX_VECTORS: Final = 512
POST_TIMEOUT_S: Final = 1.0
"""A message without an answer is not worth a longer wait."""
_TIMEVAL: Final = struct.Struct("@ll")


class Channel:
    """See the module. Owns its socket; `welcome` says who answered."""

    def __init__(self, address: Address, sock: socket.socket) -> None:
        sock.setblocking(True)
        self.address = address
        self._sock = sock
        self._armed_s = 0.0
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

        Raises the peer's typed error (the channel stays usable), Unavailable, DeadlineExceeded or ProtocolError (it is closed, unless
        the deadline had passed before anything was sent).
        """
        self._send(message, deadline, payload)
        return self._receive(answer, deadline)

    def call_for_fds(self, message: Message, deadline: Deadline) -> tuple[SlabFds, list[int]]:
        """Ask for slabs and return the answer with its descriptors, which are the caller's to close."""
        self._send(message, deadline)
        fds = array("i")
        try:
            try:
                self._receive_fds(fds, deadline)
            except OSError as error:
                raise self._broken(error, deadline) from None
            slabs = self._receive(SlabFds, deadline)
            if len(fds) != sum(map(bool, slabs.sizes)):
                self.close()
                raise ProtocolError(f"{self.address} sent {len(fds)} descriptors for slabs of {list(slabs.sizes)} bytes")
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return slabs, list(fds)

    def post(self, message: Message) -> None:
        """Send a message that has no answer. A broken connection is found by the next call."""
        body = message.pack()
        try:
            self._write([pack_header(message.TYPE, 0, len(body)) + body], Deadline(POST_TIMEOUT_S))
        except OSError:
            self.close()

    def read_into(self, destinations: Sequence[memoryview], deadline: Deadline) -> None:
        """Read the answer's payload, or its next part, into writable byte views, in order.

        Raises Unavailable, DeadlineExceeded or ProtocolError; the channel is closed then.
        """
        if sum(map(len, destinations)) > self._payload_left:
            self.close()
            raise ProtocolError(f"{self.address} sent {self._payload_left} bytes of values where more belong")
        pending = [view for view in destinations if len(view)]
        pending.reverse()
        while pending and self._start < self._end:
            size = min(len(pending[-1]), self._end - self._start)
            pending[-1][:size] = self._buffer[self._start : self._start + size]
            self._start += size
            self._payload_left -= size
            _advance(pending, size)
        try:
            while pending:
                got = self._receive_some(pending[: -MAX_VECTORS - 1 : -1], deadline)
                self._payload_left -= got
                _advance(pending, got)
        except OSError as error:
            raise self._broken(error, deadline) from None

    # --- one request and its answer ---

    def _send(self, message: Message, deadline: Deadline, payload: Sequence[memoryview | bytes] = ()) -> None:
        if self._payload_left:
            self.close()
            raise ProtocolError("the previous answer's payload was not read")
        self._request_id = self._request_id % 0xFFFFFFFF + 1
        body = message.pack()
        payload_bytes = sum(map(len, payload)) if payload else 0
        deadline_ms = min(int(deadline.left_s() * 1000) + 1, MAX_DEADLINE_MS)
        head = pack_header(message.TYPE, self._request_id, len(body), payload_bytes, deadline_ms) + body
        try:
            self._write([*(memoryview(part) for part in reversed(payload)), memoryview(head)] if payload else [head], deadline)
        except OSError as error:
            raise self._broken(error, deadline) from None

    def _receive(self, answer: type[M], deadline: Deadline) -> M:
        try:
            header, body = self._read_frame(deadline)
            reply = self._parse(header, body, answer)
        except OSError as error:
            raise self._broken(error, deadline) from None
        except ProtocolError:
            self.close()
            raise
        if isinstance(reply, KVStoreError):
            raise reply
        self._payload_left = header.payload_bytes
        return reply

    def _parse(self, header: Header, body: memoryview, answer: type[M]) -> M | KVStoreError:
        """The answer, or the typed error that the peer answered with. Raises ProtocolError for any other frame."""
        if header.type == answer.TYPE and header.request_id == self._request_id:
            return answer.unpack(body)
        if header.type != Failure.TYPE or header.request_id not in (0, self._request_id) or header.payload_bytes:
            raise ProtocolError(f"{self.address} answered with a message of type {header.type} where {answer.__name__} belongs")
        failure = Failure.unpack(body)
        if not header.request_id:
            self.close()  # the peer could not read us and hangs up
        return from_code(failure.code, failure.text)

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
        if self._start == self._end and size <= BUFFER_BYTES == len(self._buffer):
            self._start = self._end = 0  # the usual case: nothing to keep, and room enough
        while self._end - self._start < size:
            if self._end or size > BUFFER_BYTES:
                self._make_room(size)
            self._end += self._receive_some((self._buffer[self._end :] if self._end else self._buffer,), deadline)

    def _make_room(self, size: int) -> None:
        """Have room for more of `size` bytes at `_start`. It doubles as they arrive: what a peer only announces takes no memory."""
        have = self._end - self._start
        room = max(min(size, 2 * have), BUFFER_BYTES)
        if room > len(self._buffer) or (not have and len(self._buffer) > room):
            buffer = memoryview(bytearray(room))
        elif not have or self._start + min(size, room) > len(self._buffer):
            buffer = self._buffer
        else:
            return
        buffer[:have] = bytes(self._buffer[self._start : self._end])
        self._buffer, self._start, self._end = buffer, 0, have

    # --- the socket ---

    def _arm(self, deadline: Deadline) -> None:
        """Have the next step end near the deadline, at most a sixteenth late; one that ends too early is tried again."""
        left_s = deadline.left_s()
        if 0.0 < self._armed_s <= left_s * 1.0625 + 0.001:
            return
        seconds, rest = divmod(left_s, 1.0)
        timeout = _TIMEVAL.pack(int(seconds), max(int(rest * 1e6), 1000))  # zero would mean forever
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        self._armed_s = left_s

    def _receive_some(self, views: Sequence[memoryview], deadline: Deadline) -> int:
        """At least one byte into `views`. Raises OSError, DeadlineExceeded among them."""
        while True:
            self._arm(deadline)
            try:
                got = self._sock.recv_into(views[0]) if len(views) == 1 else self._sock.recvmsg_into(views)[0]
            except BlockingIOError:
                self._armed_s = 0.0
                continue
            if not got:
                raise ConnectionResetError(0, "the peer closed the connection")
            return got

    def _receive_fds(self, fds: "array[int]", deadline: Deadline) -> None:
        """The first bytes of an answer, and the descriptors that come with them, appended to `fds`. Raises OSError."""
        self._start = self._end = 0
        space = socket.CMSG_LEN(MAX_FDS * fds.itemsize)
        while not self._end:
            self._arm(deadline)
            try:
                self._end, ancillary, _, _ = self._sock.recvmsg_into([self._buffer], space, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                self._armed_s = 0.0
                continue
            for _, _, content in ancillary:  # of SCM_RIGHTS: the kernel gives no other kind unasked
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
            if not self._end:
                raise ConnectionResetError(0, "the peer closed the connection")

    def _write(self, pending: list[memoryview | bytes], deadline: Deadline) -> None:
        """Send buffers from the last to the first. Raises OSError, DeadlineExceeded among them."""
        while pending:
            self._arm(deadline)
            try:
                sent = self._sock.send(pending[0]) if len(pending) == 1 else self._sock.sendmsg(pending[: -MAX_VECTORS - 1 : -1])
            except BlockingIOError:
                self._armed_s = 0.0
            else:
                _advance(pending, sent)

    def _broken(self, error: OSError, deadline: Deadline) -> KVStoreError:
        self.close()
        if isinstance(error, TimeoutError):
            return error if isinstance(error, KVStoreError) else deadline.exceeded()
        return Unavailable(f"the connection to {self.address} broke: {error.strerror or error}")

    def detach(self) -> socket.socket:
        """Give the socket away, between calls; the channel is closed by it.

        Raises Unavailable if the peer has sent more than its answer, which the new owner would never see.
        """
        if self._start != self._end:
            self.close()
            raise Unavailable(f"{self.address} spoke before it was asked")
        self.is_open = False
        return socket.socket(fileno=self._sock.detach())

    def close(self) -> None:
        """Hang up. A second close is a no-op."""
        self.is_open = False
        self._sock.close()


def _advance(pending: list[V], size: int) -> None:
    """Drop the first `size` bytes of buffers that lie in reverse order, and empty ones behind them."""
    while pending and size >= len(pending[-1]):
        size -= len(pending.pop())
    if size:
        pending[-1] = pending[-1][size:]
