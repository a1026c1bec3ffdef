"""Peers that speak the wire of agents by hand, well or badly, over raw sockets; and agents over TCP to try them on."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from kvstore.protocol.errors import KVStoreError, from_code
from kvstore.protocol.frames import HEADER, HEADER_BYTES, MAGIC, VERSION, FrameHeader, unpack_header
from kvstore.protocol.message import Message
from kvstore.protocol.session_messages import Failure, Ok
from kvstore.protocol.transfers import JoinEngine, JoinReply, ReadRegions, WriteRegions
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.agent import AgentRequest, Direction, Rail, Remote
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.memory.region import Exports, Piece, Region, RemoteRegion
from kvstore.transfer.streams.agent import ConnectionAgent
from kvstore.transfer.streams.connection import Connection
from kvstore.transfer.streams.target import Target
from kvstore.transfer.streams.tcp import TcpConnection, TcpListener

PATIENCE_S = 60.0
AGENT_MAGIC = b"kvagent1 tcp "
_RESET = struct.pack("@ii", 1, 0)
Columns = Sequence[tuple[RemoteRegion, int, int]]
"""Pieces of a request made by hand: (region, offset, size)."""


def make_region(size_bytes: int, data: bytes = b"\0") -> Region:
    """Of `data`, repeated."""
    return Region(memoryview(bytearray(data * (size_bytes // len(data) + 1))[:size_bytes]))


def shown(region: Region, *, writable: bool = True) -> RemoteRegion:
    """As a peer knows it."""
    return RemoteRegion(region.region_id, region.size_bytes, region.write_key if writable else region.read_key, {"tcp": b""})


@contextmanager
def an_agent(
    name: str = "asker",
    *,
    connection_class: type[Connection] = TcpConnection,
    target: Target | None = None,
    listens: bool = True,
    **settings: Any,
) -> Iterator[ConnectionAgent]:
    agent = ConnectionAgent(name, Rail(), TransferSettings(**settings), connection_class, target=target, listens=listens)
    try:
        yield agent
    finally:
        agent.close()


def submit(
    agent: ConnectionAgent,
    direction: Direction,
    remote: Remote,
    pieces: Sequence[Piece],
    *,
    timeout_s: float = PATIENCE_S,
    fences: Sequence[int] = (),
) -> AgentRequest:
    """As the engine does: the regions are held until the request is over."""

    def release(request: AgentRequest) -> None:
        for piece in request.pieces:
            piece.local.release()

    for piece in pieces:
        piece.local.hold()
    request = AgentRequest(direction, remote, pieces, Deadline(timeout_s), release, fences=fences)
    agent.submit(request)
    return request


def outcome(request: AgentRequest) -> KVStoreError | None:
    """Wait for the end of the request and return its error, or None."""
    with suppress(KVStoreError):
        request.wait(Deadline(PATIENCE_S))
    assert request.is_over
    return request.error


class RawAsker:
    """A connection to an agent's target. A context manager."""

    def __init__(self, metadata: bytes) -> None:
        """`metadata` is an agent's, or a TCP listener's."""
        host, _, port = metadata.rpartition(b" ")[2].decode().rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        self._request_id = 0

    def send(self, message: Message, payload: bytes = b"", *, payload_bytes: int | None = None, deadline_ms: int = 0) -> None:
        """A frame, with the payload announced as so long."""
        body = message.pack()
        self._request_id += 1
        announced = len(payload) if payload_bytes is None else payload_bytes
        self.socket.sendall(HEADER.pack(MAGIC, VERSION, message.TYPE, self._request_id, deadline_ms, len(body), announced) + body + payload)

    def answer(self) -> tuple[FrameHeader, bytes]:
        """The next answer; its body, or its payload if it has no body."""
        header = unpack_header(read(self.socket, HEADER_BYTES))
        return header, read(self.socket, header.body_bytes or header.payload_bytes)

    def failure(self) -> KVStoreError:
        """The next answer, which is a failure."""
        header, body = self.answer()
        assert header.type == Failure.TYPE
        failure = Failure.unpack(body)
        return from_code(failure.code, failure.text)

    def join(self, name: str = "raw", number: int = 1, secret: bytes = b"") -> None:
        self.send(JoinEngine(name, number, secret))
        header, body = self.answer()
        assert (header.type, header.request_id) == (JoinReply.TYPE, self._request_id)
        assert JoinReply.unpack(body).name

    def is_refused(self) -> bool:
        """Return True if the peer closes the connection without sending more."""
        try:
            return not self.socket.recv(1)
        except ConnectionResetError:
            return True

    def works(self) -> bool:
        """Return True if the peer still responds to a request."""
        self.send(ReadRegions([], [], [], []))
        return self.answer()[0].type == Ok.TYPE

    def __enter__(self) -> "RawAsker":
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()


def fetch(columns: Columns) -> ReadRegions:
    return ReadRegions(*_columns(columns))


def store(columns: Columns) -> WriteRegions:
    return WriteRegions(*_columns(columns))


def _columns(columns: Columns) -> tuple[list[int], list[int], list[int], list[int]]:
    return (
        [region.region_id for region, _, _ in columns],
        [region.key for region, _, _ in columns],
        [offset for _, offset, _ in columns],
        [size for _, _, size in columns],
    )


class RawAnswerer:
    """A listener whose connections are answered by `play(socket)`, each in a thread of its own. A context manager.

    A connection is closed when `play` returns; one that it raised OSError for was given up by the other side.
    """

    def __init__(self, play: Callable[[socket.socket], None]) -> None:
        self._play = play
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.metadata = AGENT_MAGIC + b"tcp1 127.0.0.1:%d" % self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                sock.settimeout(PATIENCE_S)
                self._sockets.append(sock)
                self._threads.append(threading.Thread(target=self._serve, args=(sock,)))
                self._threads[-1].start()

    def _serve(self, sock: socket.socket) -> None:
        with suppress(OSError, EOFError), sock:
            self._play(sock)

    def __enter__(self) -> "RawAnswerer":
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()


def read(sock: socket.socket, size_bytes: int) -> bytes:
    """Exactly so many bytes. Raises EOFError."""
    data = bytearray()
    while len(data) < size_bytes:
        part = sock.recv(size_bytes - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def frame(
    message: Message | int,
    request_id: int,
    *,
    body: bytes | None = None,
    payload: bytes = b"",
    payload_bytes: int | None = None,
    version: int = VERSION,
) -> bytes:
    """An answer: a message, or any bytes under any type number."""
    kind, packed = (message, b"") if isinstance(message, int) else (message.TYPE, message.pack())
    body = packed if body is None else body
    announced = len(payload) if payload_bytes is None else payload_bytes
    return HEADER.pack(MAGIC, version, kind, request_id, 0, len(body), announced) + body + payload


def read_request(sock: socket.socket) -> FrameHeader:
    """The next request, its payload read and thrown away."""
    header = unpack_header(read(sock, HEADER_BYTES))
    read(sock, header.body_bytes + header.payload_bytes)
    return header


def welcome(sock: socket.socket) -> None:
    """Answer Join as it should be."""
    sock.sendall(frame(JoinReply("raw"), read_request(sock).request_id))


def reset(sock: socket.socket) -> None:
    """Close the connection without sending anything."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    sock.close()


class Proxy:
    """Passes bytes on between askers and a listener, until `limit_bytes` have gone there; the rest waits for `release`.

    A context manager.
    """

    def __init__(self, metadata: bytes, *, limit_bytes: int) -> None:
        self._address = metadata
        self._limit_bytes = limit_bytes
        self._released = threading.Event()
        self.held = threading.Event()
        """Bytes were held back."""
        self.passed = threading.Event()
        """All that the asker had sent has been passed on, or could not be."""
        self._answerer = RawAnswerer(self._pass)
        self.metadata = self._answerer.metadata

    def _pass(self, near: socket.socket) -> None:
        with RawAsker(self._address) as asker:
            back = threading.Thread(target=_copy, args=(asker.socket, near))
            back.start()
            try:
                self._pass_there(near, asker.socket)
            finally:
                self.passed.set()
                with suppress(OSError):
                    asker.socket.shutdown(socket.SHUT_RDWR)
                back.join()

    def _pass_there(self, near: socket.socket, far: socket.socket) -> None:
        waiting = bytearray()
        left = self._limit_bytes
        with suppress(ConnectionResetError):
            while data := near.recv(65_536):
                far.sendall(data[:left])
                waiting += data[left:]
                left -= min(left, len(data))
                if waiting:
                    self.held.set()
        assert self._released.wait(PATIENCE_S)
        far.sendall(waiting)

    def release(self) -> None:
        self._released.set()

    def lift(self) -> None:
        """Hold nothing back on connections made from now on."""
        self._limit_bytes = 1 << 62

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *error: object) -> None:
        self._released.set()
        self._answerer.__exit__()


def _copy(source: socket.socket, destination: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65_536):
            destination.sendall(data)


@contextmanager
def a_target(exports: Exports, secret: bytes = b"", **settings: Any) -> Iterator[tuple[Target, bytes]]:
    """A target that listens, and the metadata of its listener."""
    target = Target("target", exports, TransferSettings(**settings), secret)
    listener = TcpListener("127.0.0.1", 0)
    target.attach(listener)
    try:
        yield target, listener.metadata()
    finally:
        target.close()
