"""The asyncio twin of channel.py: one request in flight, deadlines on every step, values read where they belong.

Every step first tries the socket and only waits for the event loop when the kernel has nothing: an answer that is already there
costs no turn of the loop. A cancelled step closes the channel, as every other break does.
"""

import asyncio
import os
import socket
from array import array
from collections.abc import Sequence
from typing import TypeVar

from kvstore.protocol.errors import DeadlineExceeded, KVStoreError, ProtocolError, Unavailable, from_code
from kvstore.protocol.frames import HEADER_BYTES, MAX_DEADLINE_MS, Header, pack_header, unpack_header
from kvstore.protocol.messages import Failure, Hello, Message, SlabFds, Welcome
from kvstore.transfer.address import Address
from kvstore.transfer.channel import BUFFER_BYTES, MAX_FDS, MAX_VECTORS
from kvstore.transfer.deadline import Deadline

M = TypeVar("M", bound=Message)


class AsyncChannel:
    """See the module. Owns its socket; `welcome` says who answered. One task at a time."""

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
    async def open(cls, address: Address, hello: Hello, deadline: Deadline) -> "AsyncChannel":
        """Connect and introduce. Raises Unavailable, DeadlineExceeded, or the peer's refusal (Unauthorized, ProtocolError)."""
        try:
            sock = await _connect(address, deadline.left_s())
        except DeadlineExceeded:
            raise
        except TimeoutError:
            raise deadline.exceeded() from None
        except OSError as error:
            raise Unavailable(f"cannot connect to {address}: {error.strerror or error}") from None
        channel = cls(address, sock)
        try:
            channel.welcome = await channel.call(hello, Welcome, deadline)
        except BaseException:
            channel.close()
            raise
        return channel

    async def call(self, message: Message, answer: type[M], deadline: Deadline, payload: Sequence[memoryview | bytes] = ()) -> M:
        """Ask and return the answer. If it has a payload, read it with `read_into` before the next call.

        Raises the peer's typed error (the channel stays usable), Unavailable, DeadlineExceeded or ProtocolError (it is closed).
        """
        try:
            await self._send(message, deadline, payload)
            header, body = await self._read_frame(deadline)
        except BaseException as error:
            raise self._broken(error) from None
        return self._parse(header, body, answer)

    async def call_for_fds(self, message: Message, deadline: Deadline) -> tuple[SlabFds, list[int]]:
        """Ask for slabs and return the answer with its descriptors, which are the caller's to close."""
        fds = array("i")
        try:
            try:
                await self._send(message, deadline)
                await self._receive_fds(fds, deadline)
                header, body = await self._read_frame(deadline)
            except BaseException as error:
                raise self._broken(error) from None
            slabs = self._parse(header, body, SlabFds)
            if len(fds) != sum(map(bool, slabs.sizes)):
                self.close()
                raise ProtocolError(f"{self.address} sent {len(fds)} descriptors for slabs of {list(slabs.sizes)} bytes")
            return slabs, list(fds)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    async def post(self, message: Message) -> None:
        """Send a message that has no answer. A broken connection is found by the next call."""
        body = message.pack()
        try:
            await self._send_all([memoryview(pack_header(message.TYPE, 0, len(body)) + body)], Deadline(1.0))
        except OSError:
            self.close()
        except BaseException:
            self.close()
            raise

    async def read_into(self, destinations: Sequence[memoryview], deadline: Deadline) -> None:
        """Read the answer's payload, or its next part, into writable byte views, in order."""
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
                try:
                    got = self._sock.recvmsg_into(pending[: -MAX_VECTORS - 1 : -1])[0]
                except BlockingIOError:
                    await self._ready(deadline)
                    continue
                if not got:
                    raise ConnectionResetError(0, "the peer closed the connection within a payload")
                self._payload_left -= got
                _advance(pending, got)
        except BaseException as error:
            raise self._broken(error) from None

    async def _send(self, message: Message, deadline: Deadline, payload: Sequence[memoryview | bytes] = ()) -> None:
        if self._payload_left:
            raise ProtocolError("the previous answer's payload was not read")
        self._request_id = self._request_id % 0xFFFFFFFF + 1
        body = message.pack()
        left_ms = min(int(deadline.left_s() * 1000) + 1, MAX_DEADLINE_MS)
        head = pack_header(message.TYPE, self._request_id, len(body), sum(map(len, payload)), left_ms)
        await self._send_all([memoryview(head + body), *(memoryview(part) for part in payload)], deadline)

    async def _send_all(self, buffers: list[memoryview], deadline: Deadline) -> None:
        buffers.reverse()
        while buffers:
            try:
                sent = self._sock.sendmsg(buffers[: -MAX_VECTORS - 1 : -1])
            except BlockingIOError:
                await self._ready(deadline, to_write=True)
                continue
            _advance(buffers, sent)

    async def _receive_fds(self, fds: "array[int]", deadline: Deadline) -> None:
        """The first bytes of an answer, with the descriptors that came along."""
        while True:
            try:
                data, ancillary, _, _ = self._sock.recvmsg(BUFFER_BYTES, socket.CMSG_LEN(MAX_FDS * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
                break
            except BlockingIOError:
                await self._ready(deadline)
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
        if not data:
            raise ConnectionResetError(0, "the peer closed the connection")
        self._buffer[: len(data)] = data
        self._start, self._end = 0, len(data)

    async def _read_frame(self, deadline: Deadline) -> tuple[Header, memoryview]:
        await self._need(HEADER_BYTES, deadline)
        header = unpack_header(self._buffer, self._start)
        self._start += HEADER_BYTES
        await self._need(header.body_bytes, deadline)
        body = self._buffer[self._start : self._start + header.body_bytes]
        self._start += header.body_bytes
        return header, body

    def _parse(self, header: Header, body: memoryview, answer: type[M]) -> M:
        is_failure = header.type == Failure.TYPE and header.request_id in (0, self._request_id) and not header.payload_bytes
        try:
            failure = Failure.unpack(body) if is_failure else None
        except ProtocolError:
            self.close()
            raise
        if failure is not None:
            if not header.request_id:
                self.close()  # the peer could not read us and hangs up
            raise from_code(failure.code, failure.text)
        try:
            if header.type != answer.TYPE or header.request_id != self._request_id:
                raise ProtocolError(f"{self.address} answered with a message of type {header.type} where {answer.__name__} belongs")
            reply = answer.unpack(body)
        except ProtocolError:
            self.close()
            raise
        self._payload_left = header.payload_bytes
        return reply

    async def _need(self, size: int, deadline: Deadline) -> None:
        """Have `size` contiguous unread bytes in the buffer."""
        if self._start == self._end:
            self._start = self._end = 0
        if self._start + size > len(self._buffer):
            rest = self._buffer[self._start : self._end]
            larger = memoryview(bytearray(max(size, BUFFER_BYTES)))
            larger[: len(rest)] = rest
            self._buffer, self._start, self._end = larger, 0, len(rest)
        while self._end - self._start < size:
            try:
                got = self._sock.recv_into(self._buffer[self._end :])
            except BlockingIOError:
                await self._ready(deadline)
                continue
            if not got:
                raise ConnectionResetError(0, "the peer closed the connection")
            self._end += got

    async def _ready(self, deadline: Deadline, *, to_write: bool = False) -> None:
        """Wait until the socket can be read (or written). Raises DeadlineExceeded."""
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

    def _broken(self, error: BaseException) -> BaseException:
        """Close, and say what the caller is told: its own cancellation and typed errors as they are."""
        self.close()
        if isinstance(error, OSError) and not isinstance(error, KVStoreError):
            return Unavailable(f"the connection to {self.address} broke: {error.strerror or error}")
        return error

    def close(self) -> None:
        """Hang up. A second close is a no-op."""
        self.is_open = False
        self._sock.close()


async def _connect(address: Address, timeout_s: float) -> socket.socket:
    """A connected non-blocking socket. Raises OSError (TimeoutError among them)."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout_s):
        if address.unix:
            return await _connect_one(loop, socket.AF_UNIX, address.unix)
        failure: OSError = ConnectionError(0, "the host has no address")
        for family, _, _, _, name in await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM):
            try:
                sock = await _connect_one(loop, family, name)
            except OSError as error:
                failure = error
            else:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return sock
        raise failure


async def _connect_one(loop: asyncio.AbstractEventLoop, family: int, name: object) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, name)  # type: ignore[arg-type]
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


def _advance(buffers: list[memoryview], size: int) -> None:
    """Drop the first `size` bytes of a reversed vector."""
    while buffers and size >= len(buffers[-1]):
        size -= len(buffers.pop())
    if size:
        buffers[-1] = buffers[-1][size:]
