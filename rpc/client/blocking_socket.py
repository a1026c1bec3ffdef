"""Blocking socket with a deadline on every step, for channel.py.

Deadlines are the kernel's (SO_RCVTIMEO, SO_SNDTIMEO), set only if they change noticeably: `settimeout` costs an ioctl a
step and a poll before every recv, 4 us of a request's 20.
"""

import socket
import struct
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

from kvstore.rpc.busy_poll import BusyPoll
from kvstore.rpc.client.client_protocol import take_descriptors
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.frame_writer import MAX_VECTORS, advance
from kvstore.rpc.gil_contention import HELD_WAIT_MS, LATE_NS, receive_held, send_held, sleeps

MAX_FDS: Final = 64
_TIMEVAL: Final = struct.Struct("@ll")
_AT_ONCE: Final = int(socket.MSG_DONTWAIT)
"""An int: enum flags cost a lookup a call."""


class BlockingSocket:
    """Sends and receives bytes with deadlines, polls, and keeps the GIL under contention. For one thread at a time.

    The caller owns the socket.
    """

    __slots__ = ("_armed_s", "_busy_poll", "_keeps_gil", "_peer_closed", "sock")

    def __init__(self, sock: socket.socket, busy_poll: BusyPoll | None, peer_closed: Callable[[], OSError]) -> None:
        """`busy_poll`: polling before a sleep; None or 0 us: none.

        `peer_closed` makes the error for the end of the stream.
        """
        sock.setblocking(True)
        self.sock = sock
        self._busy_poll = busy_poll if busy_poll is not None and busy_poll.max_ns else None
        self._keeps_gil = type(sock) is socket.socket
        """True if system calls may replace the socket's methods; False with TLS."""
        self._peer_closed = peer_closed
        self._armed_s = 0.0

    def _arm(self, deadline: Deadline) -> None:
        """Set the kernel's timeout so that the next step ends near the deadline, at most 1/16 late; an early end is
        retried.
        """
        left_s = deadline.left_s()
        if 0.0 < self._armed_s <= left_s * 1.0625 + 0.001:
            return
        seconds, rest = divmod(left_s, 1.0)
        timeout = _TIMEVAL.pack(int(seconds), max(int(rest * 1e6), 1000))  # 0 means no timeout
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        self._armed_s = left_s

    def send(self, pending: deque[memoryview], deadline: Deadline) -> None:
        """Send all of `pending`, which is empty afterwards. Raises OSError, DeadlineExceeded."""
        while pending:
            self._arm(deadline)
            try:
                sent = self.sock.send(pending[0]) if len(pending) == 1 else self.sock.sendmsg(list(islice(pending, MAX_VECTORS)))
            except BlockingIOError:
                self._armed_s = 0.0
            else:
                advance(pending, sent)

    def send_two(self, head: bytes, value: bytes | memoryview, deadline: Deadline) -> None:
        """As `send`, for two buffers that the kernel usually takes whole."""
        try:
            if self._keeps_gil and (busy := self._busy_poll) is not None and busy.gil.is_on:
                sent = send_held(self.sock.fileno(), b"".join((head, value)))
            else:
                sent = self.sock.sendmsg((head, value), (), _AT_ONCE)
        except BlockingIOError:
            sent = 0
        if sent < len(head) + len(value):
            pending = deque((memoryview(head), memoryview(value)))
            advance(pending, sent)
            self.send(pending, deadline)

    def receive_soon(self, buffer: memoryview, deadline: Deadline) -> int:
        """Receive at least one byte of a response into `buffer`, polling first. Raises as `receive`."""
        busy = self._busy_poll
        if busy is None:
            return self.receive((buffer,), deadline)
        if self._keeps_gil and busy.gil.holds():
            if got := receive_held(self.sock.fileno(), buffer, HELD_WAIT_MS):
                return got
            busy.gil.missed()
            return self.receive((buffer,), deadline)
        clock_ns, receive = time.monotonic_ns, self.sock.recv_into
        began_ns = clock_ns()
        if busy.is_on:
            end_ns = began_ns + busy.max_ns
            while clock_ns() < end_ns:
                try:
                    got = receive(buffer, 0, _AT_ONCE)
                except BlockingIOError:
                    continue
                if not got:
                    raise self._peer_closed()
                busy.found()
                return got
            busy.missed()
        slept = sleeps() if busy.gil.is_suspected else 0
        busy.gil.waiting.add(id(self))
        try:
            got = self.receive((buffer,), deadline)
        finally:
            busy.gil.waiting.discard(id(self))
        waited_ns = clock_ns() - began_ns
        busy.slept(waited_ns)
        if waited_ns >= LATE_NS:
            busy.gil.waited(slept)
        return got

    def receive(self, views: Sequence[memoryview], deadline: Deadline) -> int:
        """Receive at least one byte into `views`. Raises OSError, DeadlineExceeded."""
        while True:
            self._arm(deadline)
            try:
                got = self.sock.recv_into(views[0]) if len(views) == 1 else self.sock.recvmsg_into(views)[0]
            except BlockingIOError:
                self._armed_s = 0.0
                continue
            if not got:
                raise self._peer_closed()
            return got

    def receive_fds(self, buffer: memoryview, fds: "array[int]", deadline: Deadline) -> int:
        """Receive at least one byte into `buffer`; descriptors are appended to `fds`. Raises as `receive`."""
        space = socket.CMSG_LEN(MAX_FDS * fds.itemsize)
        while True:
            self._arm(deadline)
            try:
                got, ancillary, _, _ = self.sock.recvmsg_into([buffer], space, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                self._armed_s = 0.0
                continue
            take_descriptors(ancillary, fds)
            if not got:
                raise self._peer_closed()
            return got

    def take(self, views: Sequence[memoryview]) -> int:
        """Receive into `views` without waiting. Return how many bytes, 0 if none arrived. Raises OSError."""
        try:
            got = self.sock.recvmsg_into(views, 0, socket.MSG_DONTWAIT)[0]
        except BlockingIOError:
            return 0
        if not got:
            raise self._peer_closed()
        return got
