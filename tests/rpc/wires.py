"""Helpers of the tests of sessions, servers and channels: raw frames on plain sockets, and a handler that records its calls."""

import itertools
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.frames import HEADER_BYTES, FrameHeader, pack_header, unpack_header
from kvstore.protocol.message import Message
from kvstore.protocol.messages import MESSAGES
from kvstore.protocol.session_messages import Welcome
from kvstore.rpc.address import Address
from kvstore.rpc.busy_poll import BusyPoll
from kvstore.rpc.client.pool_state import C, ChannelPermit, PoolState, Waiter
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.server.session import Session


class Clock:
    """A clock that only the test advances."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


class Looks(BusyPoll):
    """One that may look at every wait, and notes what comes of each."""

    __slots__ = ("told",)

    def __init__(self, max_us: int, *, is_on: bool = False) -> None:
        super().__init__(max_us, processors=2)
        self.is_on = is_on
        self.told: list[str] = []

    def found(self) -> None:
        self.told.append("found")

    def missed(self) -> None:
        self.told.append("missed")

    def slept(self, waited_ns: int) -> None:
        self.told.append("slept")


class Item:
    """Fake channel with the attributes that the bookkeeping of a pool reads."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.is_open = self.is_settled = True
        self.welcome = Welcome(1, "x")

    def close(self) -> None:
        self.is_open = False


def frame(message: Message, request_id: int = 1, payload: bytes = b"") -> bytes:
    body = message.pack()
    return pack_header(message.TYPE, request_id, len(body), len(payload)) + body + payload


def read_exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise EOFError(f"closed after {len(data)} of {size} bytes")
        data += part
    return bytes(data)


def read_frame(sock: socket.socket) -> tuple[FrameHeader, Message, bytes]:
    header = unpack_header(read_exactly(sock, HEADER_BYTES))
    body = read_exactly(sock, header.body_bytes)
    return header, MESSAGES[header.type].unpack(body), read_exactly(sock, header.payload_bytes)


def pump(reactor: Reactor, until: Callable[[], bool]) -> None:
    """Run the reactor until the condition holds; it must within 20,000 rounds of events."""
    for _ in range(20_000):
        if until():
            return
        reactor.run_once(0.001)
    raise AssertionError("the condition never held")


def counted(shelf: PoolState[C]) -> list[Address]:
    """For each look of a caller that waits for a channel of `shelf` from now on, the address."""
    looks: list[Address] = []
    look = shelf.acquire_or_queue

    def counting(address: Address, waiter: Waiter[C]) -> tuple[ChannelPermit | None, C | None]:
        looks.append(address)
        return look(address, waiter)

    shelf.acquire_or_queue = counting  # type: ignore[method-assign]
    return looks


@dataclass(eq=False)
class Recorder:
    """A daemon's handler. `room` says what `payload` does: "now", "later", or an exception to raise."""

    room: str | Exception = "now"
    parts: tuple[int, ...] = ()
    on_frame: Callable[[Session, FrameHeader, bytes], None] = lambda _session, _header, _body: None
    frames: list[tuple[int, int, bytes, bytes]] = field(default_factory=list)
    closed_count: int = 0
    memory: bytearray = field(default_factory=bytearray)
    waiting: list[Session] = field(default_factory=list)

    def frame(self, session: Session, header: FrameHeader, body: memoryview) -> None:
        self.frames.append((header.type, header.request_id, bytes(body), bytes(self.memory[: header.payload_bytes])))
        self.on_frame(session, header, bytes(body))

    def payload(self, session: Session, header: FrameHeader, body: memoryview) -> list[memoryview] | None:
        self.memory = bytearray(header.payload_bytes)
        if isinstance(self.room, Exception):
            raise self.room
        if self.room == "later":
            self.waiting.append(session)
            return None
        return self.views()

    def views(self) -> list[memoryview]:
        """The payload's memory, cut after each of `parts`."""
        whole = memoryview(self.memory)
        edges = [0, *(edge for edge in self.parts if edge < len(whole)), len(whole)]
        return [whole[start:end] for start, end in itertools.pairwise(edges)]

    def closed(self, session: Session) -> None:
        self.closed_count += 1


@dataclass
class Replies:
    """Notes what a request's `on_reply` is called with."""

    bodies: list[bytes] = field(default_factory=list)
    errors: list[KVStoreError] = field(default_factory=list)

    def __call__(self, header: FrameHeader | None, body: "memoryview | KVStoreError") -> None:
        if isinstance(body, KVStoreError):
            assert header is None
            self.errors.append(body)
        else:
            assert header is not None
            self.bodies.append(bytes(body))
