"""Peers of a transfer engine: the handshake that finds them, and their registered memory.

An engine listens on a TCP port and sends its description and registered memory to every connection. Its name is the
address of that port, as with Mooncake's P2PHANDSHAKE, so no metadata server is needed.

Security: the reply has the secret that authorizes transfers. As with Mooncake, any host that can connect to the port
can read and write the memory.
"""

import base64
import contextlib
import json
import logging
import socket
import struct
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.protocol.errors import InvalidArgument, ProtocolError, Unreachable
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.paths.batch import Span
from kvstore.transfer.paths.peer import Peer, PeerRegion

log = logging.getLogger("kvstore.engines.mooncake")

TIMEOUT_S: Final = 5.0
"""For a connection and its reply."""
MAX_ANSWER_BYTES: Final = 64 << 20
BACKLOG: Final = 128
_LENGTH: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class RegisteredSegment:
    """Memory that an engine has registered."""

    address: int
    size_bytes: int
    description: bytes
    """Exported region, for the peer's transfer engine."""


@dataclass(frozen=True, slots=True)
class HandshakeReply:
    """Reply of an engine to a handshake."""

    description: bytes
    segments: Sequence[RegisteredSegment]

    def packed(self) -> bytes:
        segments = [[one.address, one.size_bytes, base64.b64encode(one.description).decode()] for one in self.segments]
        return json.dumps({"engine": base64.b64encode(self.description).decode(), "segments": segments}).encode()


def unpacked(data: bytes) -> HandshakeReply:
    """Parse a reply. Raises ProtocolError."""
    try:
        whole = json.loads(data)
        segments = [RegisteredSegment(int(address), int(size), base64.b64decode(region)) for address, size, region in whole["segments"]]
        return HandshakeReply(base64.b64decode(whole["engine"]), segments)
    except (ValueError, TypeError, KeyError) as error:
        raise ProtocolError(f"the peer's handshake cannot be read: {error}") from None


class HandshakeServer:
    """Thread that replies to every connection to one port, one at a time, with the result of `answer`."""

    def __init__(self, host: str, port: int, answer: Callable[[], bytes]) -> None:
        """Listen; port 0 is any. Raises OSError: the address is in use, or not one of this host."""
        self._answer = answer
        self._socket = socket.create_server((host, port), backlog=BACKLOG, family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="mooncake-handshake", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            with connection:
                try:
                    connection.settimeout(TIMEOUT_S)
                    data = self._answer()
                    connection.sendall(_LENGTH.pack(len(data)) + data)
                except Exception as error:  # noqa: BLE001 one peer's failure must not end the thread
                    log.warning("a handshake failed: %s", error)

    def close(self) -> None:
        """Close the port and stop the thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()
        self._thread.join(TIMEOUT_S)


def handshake(name: str) -> HandshakeReply:
    """Return the reply of the engine named HOST:PORT. Raises Unreachable, ProtocolError."""
    host, _, port = name.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=TIMEOUT_S) as connection:
            (size,) = _LENGTH.unpack(_received(connection, _LENGTH.size))
            if size > MAX_ANSWER_BYTES:
                raise ProtocolError(f"{name} answered a handshake with {size} bytes, more than {MAX_ANSWER_BYTES}")
            return unpacked(_received(connection, size))
    except (OSError, ValueError, OverflowError) as error:
        raise Unreachable(f"no transfer engine answers at {name}: {error}") from None


def _received(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(min(1 << 20, size - len(data)))
        if not piece:
            raise ConnectionError("the connection ended")
        data += piece
    return bytes(data)


@dataclass(frozen=True, slots=True)
class KnownPeer:
    """A connected peer and its memory at the time of the handshake."""

    peer: Peer
    first_address: int
    """First memory that the peer registered; 0 without any."""
    addresses: list[int]
    """In rising order, like `regions`."""
    regions: list[PeerRegion]

    def span(self, address: int, size_bytes: int) -> Span:
        """Return a range of the peer's memory. Raises InvalidArgument: part of it is not registered."""
        at = bisect_right(self.addresses, address) - 1
        if at < 0 or address + size_bytes > self.addresses[at] + self.regions[at].remote.size_bytes:
            raise InvalidArgument(f"{size_bytes} bytes at address {address:#x} are not registered memory of {self.peer.name}")
        return Span(self.regions[at], address - self.addresses[at])


class Peers:
    """Cache of connected peers. Thread-safe. Peers are contacted at first use, and again after a failure."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._known: dict[str, KnownPeer] = {}

    def known(self, name: str) -> KnownPeer:
        """Return the peer, from the cache or by a handshake. Raises Unreachable, ProtocolError."""
        with self._lock:
            found = self._known.get(name)
        return found or self.refreshed(name)

    def refreshed(self, name: str) -> KnownPeer:
        """Return the peer by a new handshake, with its current memory. Raises as `known`."""
        answer = handshake(name)
        peer = self._engine.connect(answer.description)
        segments = sorted(answer.segments, key=lambda one: one.address)
        regions = [self._engine.import_region(peer, one.description) for one in segments]
        first = answer.segments[0].address if answer.segments else 0
        found = KnownPeer(peer, first, [one.address for one in segments], regions)
        with self._lock:
            self._known[name] = found
        return found

    def forget(self, name: str) -> None:
        with self._lock:
            self._known.pop(name, None)
