"""Blocking connection of a client to one daemon: one request in flight, a deadline on every step, zero-copy reads of
values.

A Channel is used by one thread at a time; `connection_pool.py` leases them. After any error but a typed one of the
peer, the position in the stream is unknown; so the channel closes.
"""

import os
import socket
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from kvstore.protocol.errors import DeadlineExceeded, KVStoreError, ProtocolError, Unavailable
from kvstore.protocol.message import Message, Packable
from kvstore.protocol.node_messages import MapSlabsReply
from kvstore.protocol.session_messages import Flags, Hello, Welcome
from kvstore.rpc.address import Address, connect_to
from kvstore.rpc.busy_poll import BusyPoll
from kvstore.rpc.client.blocking_socket import BlockingSocket
from kvstore.rpc.client.client_protocol import BaseChannel, is_closed_by_peer, one_way_frame, read_refusal
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.frame_writer import MAX_VECTORS, advance
from kvstore.rpc.keepalive import PEER_TIMEOUT_S, enable_keepalive

if TYPE_CHECKING:
    from kvstore.security.tls.certificates import Certificates
    from kvstore.security.tls.subjects import CertifiedPeer
    from kvstore.security.tls.tls_socket import TlsSocket

M = TypeVar("M", bound=Message)

POST_TIMEOUT_S: Final = 1.0
"""Longest wait of a one-way message."""
_PEEK: Final = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
"""Computed once: joining two enum flags takes as long as the system call."""


class Channel(BaseChannel):
    """Connection of a blocking client to one daemon. Owns its socket. For one thread at a time."""

    def __init__(self, address: Address, sock: socket.socket, busy_poll: BusyPoll | None = None) -> None:
        """`busy_poll`: polling for a response before a sleep; None or 0 us: none."""
        super().__init__(address)
        self._socket = BlockingSocket(sock, busy_poll, self._protocol.peer_closed)
        self.context: Any = None
        """The user's state of this connection."""

    @classmethod
    def open(
        cls,
        address: Address,
        hello: Hello,
        deadline: Deadline,
        *,
        peer_timeout_s: float = PEER_TIMEOUT_S,
        busy_poll: BusyPoll | None = None,
        tls: "Certificates | None" = None,
    ) -> "Channel":
        """Connect and send Hello. Keepalive detects a vanished host of the peer within `peer_timeout_s`.

        `tls`: certificates for TCP; the peer's must be a master's or node's and have the address. Raises Unavailable,
        DeadlineExceeded, Untrusted, or the peer's error (Unauthorized, ProtocolError).
        """
        sock = connect_to(address, tls, deadline)
        enable_keepalive(sock, peer_timeout_s, limit_unacknowledged=False)
        channel = cls(address, sock, busy_poll)
        try:
            sent = hello if not address.partition else replace(hello, partition=address.partition)
            channel.welcome = channel.call(sent, Welcome, deadline)
            if channel.certified is not None:
                from kvstore.security.tls.subjects import check_welcome

                check_welcome(channel.certified, channel.welcome)
        except BaseException:
            channel.close()
            raise
        return channel

    def call(self, message: Packable, answer: type[M], deadline: Deadline, payload: Sequence[memoryview | bytes] = ()) -> M:
        """Send a request and return the response. If it has a payload, call `read_into` before the next call.

        Raises the peer's typed error (the channel stays usable), Unavailable, DeadlineExceeded or ProtocolError (it is
        closed, unless the deadline had passed before anything was sent).
        """
        self._send(message, deadline, payload)
        return self._receive(answer, deadline)

    def call_for_flag(self, kind: int, body: bytes, value: bytes | memoryview, deadline: Deadline) -> int | None:
        """`call` with a packed body of message type `kind` and one value, returning the one flag of the response; a
        third of the steps.

        None: the response has another number of flags. Raises as `call`.
        """
        protocol, reader = self._protocol, self._reader
        try:
            head = protocol.packed_request(kind, body, len(value), deadline)
        except ProtocolError as error:
            raise self._broken(error) from None
        self._is_midway = True
        try:
            self._socket.send_two(head, value, deadline)
            if not reader.unread_bytes:
                buffer = reader.recv_buffer()
                got = self._socket.receive_soon(buffer, deadline)
                flag = protocol.flag(buffer, got)
                if flag is not None:
                    self._is_midway = False
                    return flag
                reader.received(got)
        except (KVStoreError, OSError) as error:
            raise self._broken(error) from None
        flags = self._receive(Flags, deadline).flags
        return flags[0] if len(flags) == 1 else None

    def call_for_fds(self, message: Message, deadline: Deadline) -> tuple[MapSlabsReply, list[int]]:
        """Request slabs; return the response and its descriptors, which the caller must close."""
        self._send(message, deadline)
        fds = array("i")
        try:
            slabs = self._receive(MapSlabsReply, deadline, fds)
            if wrong := self._protocol.wrong_descriptors(slabs, len(fds)):
                raise self._broken(wrong)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return slabs, list(fds)

    def post(self, message: Message) -> None:
        """Send a one-way message. The next call reports a broken connection."""
        self._is_midway = True
        try:
            self._socket.send(one_way_frame(message), Deadline(POST_TIMEOUT_S))
        except OSError as error:
            if isinstance(broken := self._broken(error), OSError) and not isinstance(broken, KVStoreError):
                raise
        self._is_midway = False

    def read_into(self, destinations: Sequence[memoryview], deadline: Deadline) -> None:
        """Read the response's payload, or its next part, into writable byte views, in order.

        Raises Unavailable, DeadlineExceeded or ProtocolError; the channel is then closed.
        """
        protocol = self._protocol
        try:
            pending = protocol.destinations(destinations)
            protocol.payload_left -= self._reader.move_into(pending)
            while pending:
                got = self._socket.receive(list(islice(pending, MAX_VECTORS)), deadline)
                protocol.payload_left -= got
                advance(pending, got)
        except (KVStoreError, OSError) as error:
            raise self._broken(error) from None

    @property
    def certified(self) -> "CertifiedPeer | None":
        """Identity of the peer's certificate; None without TLS."""
        tls = _tls_of(self._socket.sock)
        return tls.certified if tls is not None else None

    # --- a request and its response in steps, for callers that poll several channels ---

    def fileno(self) -> int:
        """Return the descriptor to poll. Readable: call `take_answer` or `take_values`; or the connection ended."""
        return self._socket.sock.fileno()

    def ask(self, message: Message, deadline: Deadline, payload: Sequence[memoryview | bytes] = ()) -> None:
        """Send a request; `await_answer` or `take_answer` must follow. Raises as `call`."""
        self._send(message, deadline, payload)

    def await_answer(self, answer: type[M], until: Deadline) -> M | None:
        """Return the response to `ask`; None if it is incomplete at `until`; call again to go on. Raises as `call`."""
        reader = self._reader
        try:
            while (frame := reader.next_frame()) is None:
                reader.received(self._socket.receive_soon(reader.recv_buffer(), until))
        except DeadlineExceeded:
            return None
        except (KVStoreError, OSError) as error:
            raise self._broken(error) from None
        return self._answered(frame, answer)

    def take_answer(self, answer: type[M]) -> M | None:
        """Return the response to `ask` without waiting; None if it is incomplete. Raises as `call`."""
        reader = self._reader
        try:
            frame = reader.next_frame()
            if frame is None and (got := self._socket.take((reader.recv_buffer(),))):
                reader.received(got)
                frame = reader.next_frame()
        except (KVStoreError, OSError) as error:
            raise self._broken(error) from None
        return None if frame is None else self._answered(frame, answer)

    def values_into(self, destinations: Sequence[memoryview]) -> deque[memoryview]:
        """Return the views for `take_values` to fill, in order. Raises ProtocolError; the channel is then closed."""
        try:
            return self._protocol.destinations(destinations)
        except ProtocolError as error:
            raise self._broken(error) from None

    def take_values(self, pending: deque[memoryview]) -> bool:
        """Read without waiting into the front of `pending`, which loses filled views. True: the payload is complete.

        Call once before polling: values may have arrived with the response. Raises as `read_into`.
        """
        protocol = self._protocol
        try:
            protocol.payload_left -= self._reader.move_into(pending)
            got = self._socket.take(list(islice(pending, MAX_VECTORS))) if pending else 0
        except (KVStoreError, OSError) as error:
            raise self._broken(error) from None
        protocol.payload_left -= got
        advance(pending, got)
        if pending and (tls := _tls_of(self._socket.sock)) is not None and tls.pending():  # decrypted bytes, invisible to poll
            return self.take_values(pending)
        return not pending

    # --- one request and its response ---

    def _send(self, message: Packable, deadline: Deadline, payload: Sequence[memoryview | bytes] = ()) -> None:
        try:
            request = self._protocol.request(message, deadline, payload)
        except ProtocolError as error:
            raise self._broken(error) from None
        self._is_midway = True
        try:
            self._socket.send(request, deadline)
        except OSError as error:
            raise self._broken(read_refusal(self._socket.sock, self._reader) or error) from None

    def _receive(self, answer: type[M], deadline: Deadline, fds: "array[int] | None" = None) -> M:
        """Return the response; descriptors sent with it are appended to `fds`."""
        reader, sock = self._reader, self._socket
        try:
            while (frame := reader.next_frame()) is None:
                buffer = reader.recv_buffer()
                reader.received(sock.receive_soon(buffer, deadline) if fds is None else sock.receive_fds(buffer, fds, deadline))
        except (KVStoreError, OSError) as error:
            raise self._broken(error) from None
        return self._answered(frame, answer)

    # --- the connection ---

    def is_closed_by_peer(self) -> bool:
        """Return True if the kernel knows that the connection ended. Reads nothing, so a call may be in progress."""
        return not self.is_open or is_closed_by_peer(self._socket.sock)

    def is_quiet(self) -> bool:
        """Return True if, between calls, the peer has neither closed the connection nor sent anything unrequested."""
        if self._reader.unread_bytes:
            return False
        try:
            self._socket.sock.recv(1, _PEEK)
        except BlockingIOError:
            return self.is_open
        except OSError:
            pass
        return False

    def detach(self) -> socket.socket:
        """Transfer ownership of the socket to the caller, between calls; this closes the channel.

        Raises Unavailable if the peer has sent more than its response, which the new owner would miss.
        """
        if self._reader.unread_bytes:
            self.close()
            raise Unavailable(f"{self.address} sent bytes without a request")
        self.is_open = False
        sock = self._socket.sock
        if _tls_of(sock) is not None:  # the object itself, which has state beside its descriptor
            self._socket.sock = socket.socket()
            self._socket.sock.close()
            return sock
        return socket.socket(fileno=sock.detach())

    def close(self) -> None:
        """Close the connection. A second close is a no-op."""
        self.is_open = False
        self._socket.sock.close()


def _tls_of(sock: socket.socket) -> "TlsSocket | None":
    """Return the socket if it is a TlsSocket. Duck-typed, to save the 10 ms of importing `ssl` without TLS."""
    return cast("TlsSocket", sock) if hasattr(sock, "certified") else None
