"""A client's blocking connection to one daemon: one request in flight, deadlines on every step, values read where they belong.

A Channel is used by one thread at a time; `connection_pool.py` shares them out. Whatever breaks a channel closes it: after an error
other than the peer's own typed answer its stream may be anywhere.
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
from kvstore.rpc.client.client_protocol import BaseChannel, has_hung_up, notice, refusal
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.frame_writer import MAX_VECTORS, advance
from kvstore.rpc.keepalive import PEER_TIMEOUT_S, notice_vanished_host

if TYPE_CHECKING:
    from kvstore.security.tls.certificates import Certificates
    from kvstore.security.tls.subjects import CertifiedPeer
    from kvstore.security.tls.tls_socket import TlsSocket

M = TypeVar("M", bound=Message)

POST_TIMEOUT_S: Final = 1.0
"""A message without an answer is not worth a longer wait."""
_LOOK: Final = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
"""Made once: to join two flags of an enum takes as long as to look."""


class Channel(BaseChannel):
    """See the module. Owns its socket; `welcome` says who answered."""

    def __init__(self, address: Address, sock: socket.socket, busy_poll: BusyPoll | None = None) -> None:
        """`busy_poll`: a call may look for its answer for a while before it sleeps; None or one of 0 us: it sleeps at once."""
        super().__init__(address)
        self._socket = BlockingSocket(sock, busy_poll, self._protocol.peer_closed)
        self.context: Any = None
        """What its user keeps for this connection, and loses with it."""

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
        """Connect and introduce; between calls, a peer whose host vanishes is noticed within `peer_timeout_s`. `tls`: over
        TCP with TLS, if it connects, to a master or node whose certificate names the address.

        Raises Unavailable, DeadlineExceeded, Untrusted, or the peer's refusal (Unauthorized, ProtocolError).
        """
        sock = connect_to(address, tls, deadline)
        notice_vanished_host(sock, peer_timeout_s, gives_up_unread=False)
        channel = cls(address, sock, busy_poll)
        try:
            said = hello if not address.partition else replace(hello, partition=address.partition)
            channel.welcome = channel.call(said, Welcome, deadline)
            if channel.certified is not None:
                from kvstore.security.tls.subjects import check_welcome

                check_welcome(channel.certified, channel.welcome)
        except BaseException:
            channel.close()
            raise
        return channel

    def call(self, message: Packable, answer: type[M], deadline: Deadline, payload: Sequence[memoryview | bytes] = ()) -> M:
        """Ask and return the answer. If it has a payload, read it with `read_into` before the next call.

        Raises the peer's typed error (the channel stays usable), Unavailable, DeadlineExceeded or ProtocolError (it is closed, unless
        the deadline had passed before anything was sent).
        """
        self._send(message, deadline, payload)
        return self._receive(answer, deadline)

    def call_for_flag(self, kind: int, body: bytes, value: bytes | memoryview, deadline: Deadline) -> int | None:
        """`call`, for the one flag of an answer Flags, with a message of that type, packed already, and one value: a third
        of the steps. None: the answer has another number of flags. Raises as `call`."""
        protocol, reader = self._protocol, self._reader
        try:
            head = protocol.packed_request(kind, body, len(value), deadline)
        except ProtocolError as error:
            raise self._broken(error) from None
        self._is_midway = True
        try:
            self._socket.send_two(head, value, deadline)
            if not reader.unread_bytes:
                room = reader.recv_buffer()
                got = self._socket.receive_soon(room, deadline)
                flag = protocol.flag(room, got)
                if flag is not None:
                    self._is_midway = False
                    return flag
                reader.received(got)
        except (KVStoreError, OSError) as error:
            raise self._broken(error) from None
        flags = self._receive(Flags, deadline).flags
        return flags[0] if len(flags) == 1 else None

    def call_for_fds(self, message: Message, deadline: Deadline) -> tuple[MapSlabsReply, list[int]]:
        """Ask for slabs and return the answer with its descriptors, which are the caller's to close."""
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
        """Send a message that has no answer. A broken connection is found by the next call."""
        self._is_midway = True
        try:
            self._socket.send(notice(message), Deadline(POST_TIMEOUT_S))
        except OSError as error:
            if isinstance(broken := self._broken(error), OSError) and not isinstance(broken, KVStoreError):
                raise
        self._is_midway = False

    def read_into(self, destinations: Sequence[memoryview], deadline: Deadline) -> None:
        """Read the answer's payload, or its next part, into writable byte views, in order.

        Raises Unavailable, DeadlineExceeded or ProtocolError; the channel is closed then.
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
        """Who is there, as its certificate says; None: over a Unix socket, or without TLS."""
        tls = _tls_of(self._socket.sock)
        return tls.certified if tls is not None else None

    # --- a request and its answer in steps, for who waits for several channels at once, or looks after something else meanwhile ---

    def fileno(self) -> int:
        """To be polled. Readable: there is something for `take_answer` or `take_values`, or the peer is gone."""
        return self._socket.sock.fileno()

    def ask(self, message: Message, deadline: Deadline, payload: Sequence[memoryview | bytes] = ()) -> None:
        """Send the request; `await_answer` or `take_answer` follows. Raises as `call`."""
        self._send(message, deadline, payload)

    def await_answer(self, answer: type[M], until: Deadline) -> M | None:
        """The answer to `ask`; None if not all of it has come by then, and it can be awaited further. Raises as `call`."""
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
        """What has come of the answer to `ask`; None if that is not all of it yet. Raises as `call`."""
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
        """What `take_values` fills, as `read_into` does. Raises ProtocolError; the channel is closed then."""
        try:
            return self._protocol.destinations(destinations)
        except ProtocolError as error:
            raise self._broken(error) from None

    def take_values(self, pending: deque[memoryview]) -> bool:
        """Read what has come into the front of `pending`, which loses it. True: that was all. Try once before polling: values may have come
        along with the answer. Raises as `read_into`."""
        protocol = self._protocol
        try:
            protocol.payload_left -= self._reader.move_into(pending)
            got = self._socket.take(list(islice(pending, MAX_VECTORS))) if pending else 0
        except (KVStoreError, OSError) as error:
            raise self._broken(error) from None
        protocol.payload_left -= got
        advance(pending, got)
        if pending and (tls := _tls_of(self._socket.sock)) is not None and tls.pending():  # a poll would not tell
            return self.take_values(pending)
        return not pending

    # --- one request and its answer ---

    def _send(self, message: Packable, deadline: Deadline, payload: Sequence[memoryview | bytes] = ()) -> None:
        try:
            request = self._protocol.request(message, deadline, payload)
        except ProtocolError as error:
            raise self._broken(error) from None
        self._is_midway = True
        try:
            self._socket.send(request, deadline)
        except OSError as error:
            raise self._broken(refusal(self._socket.sock, self._reader) or error) from None

    def _receive(self, answer: type[M], deadline: Deadline, fds: "array[int] | None" = None) -> M:
        """The answer; descriptors that come with it are appended to `fds`."""
        reader, sock = self._reader, self._socket
        try:
            while (frame := reader.next_frame()) is None:
                room = reader.recv_buffer()
                reader.received(sock.receive_soon(room, deadline) if fds is None else sock.receive_fds(room, fds, deadline))
        except (KVStoreError, OSError) as error:
            raise self._broken(error) from None
        return self._answered(frame, answer)

    # --- the connection ---

    def has_hung_up(self) -> bool:
        """Whether the connection is over, as far as the kernel knows. Reads nothing: it may be asked during a call."""
        return not self.is_open or has_hung_up(self._socket.sock)

    def is_quiet(self) -> bool:
        """Between calls: the peer has neither hung up nor said anything unasked, whether that has been read already or not."""
        if self._reader.unread_bytes:
            return False
        try:
            self._socket.sock.recv(1, _LOOK)
        except BlockingIOError:
            return self.is_open
        except OSError:
            pass
        return False

    def detach(self) -> socket.socket:
        """Give the socket away, between calls; the channel is closed by it.

        Raises Unavailable if the peer has sent more than its answer, which the new owner would never see.
        """
        if self._reader.unread_bytes:
            self.close()
            raise Unavailable(f"{self.address} spoke before it was asked")
        self.is_open = False
        sock = self._socket.sock
        if _tls_of(sock) is not None:  # goes as it is: it has state beside its descriptor
            self._socket.sock = socket.socket()
            self._socket.sock.close()
            return sock
        return socket.socket(fileno=sock.detach())

    def close(self) -> None:
        """Hang up. A second close is a no-op."""
        self.is_open = False
        self._socket.sock.close()


def _tls_of(sock: socket.socket) -> "TlsSocket | None":
    """The socket, where it speaks TLS. `ssl` is loaded by who made it so: for others its 10 ms of import are spared."""
    return cast("TlsSocket", sock) if hasattr(sock, "certified") else None
