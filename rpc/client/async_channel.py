"""asyncio counterpart of channel.py: one request in flight, a deadline on every step, values read into the caller's
buffers.

Every step tries the socket first and waits for the event loop only if the kernel has nothing. A cancelled step closes
the channel, as any other failure within a call.
"""

import asyncio
import os
import socket
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import TypeVar

from kvstore.protocol.errors import DeadlineExceeded
from kvstore.protocol.frames import FrameHeader
from kvstore.protocol.message import Message
from kvstore.protocol.node_messages import MapSlabsReply
from kvstore.protocol.session_messages import Hello, Welcome
from kvstore.rpc.address import Address, connect_error, invalid_host_name, share_s
from kvstore.rpc.client.blocking_socket import MAX_FDS
from kvstore.rpc.client.channel import POST_TIMEOUT_S
from kvstore.rpc.client.client_protocol import BaseChannel, is_closed_by_peer, one_way_frame, read_refusal, take_descriptors
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.frame_writer import MAX_VECTORS, advance
from kvstore.rpc.keepalive import PEER_TIMEOUT_S, enable_keepalive
from kvstore.security.tls.certificates import SERVERS, Certificates
from kvstore.security.tls.subjects import check_welcome
from kvstore.security.tls.tls_socket import WRITE, TlsSocket

M = TypeVar("M", bound=Message)


class AsyncChannel(BaseChannel):
    """Connection of an asyncio client to one daemon. Owns its socket. For one task at a time."""

    def __init__(self, address: Address, sock: socket.socket) -> None:
        super().__init__(address)
        self._sock = sock

    @classmethod
    async def open(
        cls,
        address: Address,
        hello: Hello,
        deadline: Deadline,
        *,
        peer_timeout_s: float = PEER_TIMEOUT_S,
        tls: Certificates | None = None,
    ) -> "AsyncChannel":
        """Connect and send Hello, as `Channel.open`.

        Raises Unavailable, DeadlineExceeded, Untrusted, or the peer's error (Unauthorized, ProtocolError).
        """
        try:
            sock = await _connect(address, deadline.left_s())
            if tls is not None and tls.connects and not address.unix:
                sock = tls.begin_to(sock, address.host, SERVERS)
        except DeadlineExceeded:
            raise
        except TimeoutError:
            raise deadline.exceeded() from None
        except OSError as error:
            raise connect_error(address, error) from None
        enable_keepalive(sock, peer_timeout_s, limit_unacknowledged=False)
        channel = cls(address, sock)
        try:
            if isinstance(sock, TlsSocket):
                await channel._shake_hands(sock, deadline)
            sent = hello if not address.partition else replace(hello, partition=address.partition)
            channel.welcome = await channel.call(sent, Welcome, deadline)
            check_welcome(sock.certified if isinstance(sock, TlsSocket) else None, channel.welcome)
        except BaseException:
            channel.close()
            raise
        return channel

    async def call(self, message: Message, answer: type[M], deadline: Deadline, payload: Sequence[memoryview | bytes] = ()) -> M:
        """Send a request and return the response. If it has a payload, call `read_into` before the next call.

        Raises the peer's typed error (the channel stays usable), Unavailable, DeadlineExceeded or ProtocolError (it is
        closed).
        """
        await self._send(message, deadline, payload)
        return await self._receive(answer, deadline)

    async def call_for_fds(self, message: Message, deadline: Deadline) -> tuple[MapSlabsReply, list[int]]:
        """Request slabs; return the response and its descriptors, which the caller must close."""
        await self._send(message, deadline)
        fds = array("i")
        try:
            slabs = await self._receive(MapSlabsReply, deadline, fds)
            if wrong := self._protocol.wrong_descriptors(slabs, len(fds)):
                raise self._broken(wrong)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return slabs, list(fds)

    async def post(self, message: Message) -> None:
        """Send a one-way message. The next call reports a broken connection."""
        self._is_midway = True
        try:
            await self._write(one_way_frame(message), Deadline(POST_TIMEOUT_S))
        except OSError:
            self.close()
        except BaseException:
            self.close()
            raise
        self._is_midway = False

    async def read_into(self, destinations: Sequence[memoryview], deadline: Deadline) -> None:
        """Read the response's payload, or its next part, into writable byte views, in order.

        Raises Unavailable, DeadlineExceeded or ProtocolError; the channel is then closed, as after cancellation.
        """
        protocol = self._protocol
        try:
            pending = protocol.destinations(destinations)
            protocol.payload_left -= self._reader.move_into(pending)
            while pending:
                got = await self._receive_some(list(islice(pending, MAX_VECTORS)), deadline)
                protocol.payload_left -= got
                advance(pending, got)
        except BaseException as error:
            raise self._broken(error) from None

    async def ask(self, message: Message, deadline: Deadline) -> None:
        """Send a request; `await_answer` must follow. Raises as `call`."""
        await self._send(message, deadline)

    async def await_answer(self, answer: type[M], until: Deadline) -> M | None:
        """Return the response to `ask`; None if it is incomplete at `until`; call again to go on. Raises as `call`."""
        try:
            frame = await self._next_frame(until)
        except DeadlineExceeded:
            return None
        except BaseException as error:
            raise self._broken(error) from None
        return self._answered(frame, answer)

    # --- one request and its response ---

    async def _send(self, message: Message, deadline: Deadline, payload: Sequence[memoryview | bytes] = ()) -> None:
        try:
            request = self._protocol.request(message, deadline, payload)
            self._is_midway = True
            await self._write(request, deadline)
        except OSError as error:
            raise self._broken(read_refusal(self._sock, self._reader) or error) from None
        except BaseException as error:
            raise self._broken(error) from None

    async def _receive(self, answer: type[M], deadline: Deadline, fds: "array[int] | None" = None) -> M:
        """Return the response; descriptors sent with it are appended to `fds`."""
        try:
            frame = await self._next_frame(deadline, fds)
        except BaseException as error:
            raise self._broken(error) from None
        return self._answered(frame, answer)

    async def _next_frame(self, deadline: Deadline, fds: "array[int] | None" = None) -> tuple[FrameHeader, memoryview]:
        reader = self._reader
        while (frame := reader.next_frame()) is None:
            buffer = reader.recv_buffer()
            reader.received(await (self._receive_some((buffer,), deadline) if fds is None else self._receive_fds(buffer, fds, deadline)))
        return frame

    # --- the socket ---

    async def _shake_hands(self, sock: TlsSocket, deadline: Deadline) -> None:
        """Raises Untrusted, Unavailable, DeadlineExceeded."""
        try:
            while not sock.has_shaken_hands():
                await self._ready(deadline, to_write=sock.reads_on == WRITE)
        except BaseException as error:
            raise self._broken(error) from None

    async def _receive_some(self, views: Sequence[memoryview], deadline: Deadline) -> int:
        """Receive at least one byte into `views`. Raises OSError, DeadlineExceeded."""
        while True:
            try:
                got = self._sock.recv_into(views[0]) if len(views) == 1 else self._sock.recvmsg_into(views)[0]
            except BlockingIOError:
                await self._ready(deadline)
                continue
            if not got:
                raise self._protocol.peer_closed()
            return got

    async def _receive_fds(self, buffer: memoryview, fds: "array[int]", deadline: Deadline) -> int:
        """Receive at least one byte into `buffer`; descriptors are appended to `fds`. Raises as _receive_some."""
        space = socket.CMSG_LEN(MAX_FDS * fds.itemsize)
        while True:
            try:
                got, ancillary, _, _ = self._sock.recvmsg_into([buffer], space, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                await self._ready(deadline)
                continue
            take_descriptors(ancillary, fds)
            if not got:
                raise self._protocol.peer_closed()
            return got

    async def _write(self, pending: deque[memoryview], deadline: Deadline) -> None:
        """Send all of `pending`, which is empty afterwards. Raises OSError, DeadlineExceeded."""
        while pending:
            try:
                sent = self._sock.sendmsg(list(islice(pending, MAX_VECTORS)))
            except BlockingIOError:
                await self._ready(deadline, to_write=True)
            else:
                advance(pending, sent)

    async def _ready(self, deadline: Deadline, *, to_write: bool = False) -> None:
        """Wait until the socket is readable (or writable). Raises DeadlineExceeded."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        fd = self._sock.fileno()
        add, remove = (loop.add_writer, loop.remove_writer) if to_write else (loop.add_reader, loop.remove_reader)
        timer = loop.call_later(deadline.left_s(), _expire, ready, deadline)
        add(fd, _set, ready)
        try:
            await ready
        finally:
            remove(fd)
            timer.cancel()

    def is_closed_by_peer(self) -> bool:
        """Return True if the kernel knows that the connection ended. Reads nothing, so a call may be in progress."""
        return not self.is_open or is_closed_by_peer(self._sock)

    def close(self) -> None:
        """Close the connection. A second close is a no-op."""
        self.is_open = False
        self._sock.close()


async def _connect(address: Address, timeout_s: float) -> socket.socket:
    """Return a connected non-blocking socket. Raises OSError, TimeoutError."""
    if address.unix:
        return await _connect_one(socket.AF_UNIX, address.unix, timeout_s)
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise invalid_host_name(error) from None
    for number, (family, _, _, _, name) in enumerate(found):
        try:
            sock = await _connect_one(family, name, share_s(end_s - loop.time(), len(found) - number))
        except OSError:
            if number == len(found) - 1:
                raise
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
    raise ConnectionError(0, "the host has no address")


async def _connect_one(family: int, name: object, timeout_s: float) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        async with asyncio.timeout(timeout_s):
            await asyncio.get_running_loop().sock_connect(sock, name)  # type: ignore[arg-type]
    except BaseException:
        sock.close()
        raise
    return sock


def _set(ready: "asyncio.Future[None]") -> None:
    if not ready.done():
        ready.set_result(None)


def _expire(ready: "asyncio.Future[None]", deadline: Deadline) -> None:
    if not ready.done():
        ready.set_exception(deadline.exceeded())
