"""Connection over UCX: tagged messages, one per part, directly between the memory of both ends.

A TCP connection to the listener exchanges the addresses of the two UCX workers. It stays open: its end reports the
peer's death for every transport of UCX, also for those that do not detect it.
"""

import contextlib
import errno
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from kvstore.protocol.errors import Closed, ConfigError, InvalidArgument, KVStoreError, ProtocolError, Unreachable
from kvstore.rpc.address import Address, connect, parse_address
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.agent import Rail
from kvstore.transfer.streams.connection import Connection, Listener
from kvstore.transfer.ucx.unauthenticated import UnauthenticatedEndpoints
from kvstore.transfer.ucx.worker import MAX_CONNECTION_ID, TaggedMessage, UcxOperation, UcxWorker

MAGIC: Final = b"ucx1 "
"""Metadata: this, then HOST:PORT in ASCII."""
LOOPBACK: Final = "127.0.0.1"
BACKLOG: Final = 256
KEEPALIVE_S: Final = 60
HANDSHAKE_S: Final = 1.0
"""Timeout of the handshake of an accepted peer."""
MAX_PENDING_HANDSHAKES: Final = 64
"""Accepted peers without a completed handshake; one more displaces the oldest."""
MAX_ADDRESS_BYTES: Final = 32 << 10
PART_BITS: Final = 36
"""A tag is the receiver's number of the connection, then the part's size: a part of another size matches no receive."""
_HELLO: Final = struct.Struct("!4sBHQ")
"""Magic, version, size of the worker's address (which follows), number of the connection."""
_MAGIC: Final = b"kvUX"
_VERSION: Final = 1


class UcxConnection(Connection):
    """Connection over a UCX endpoint. Detects stalls by whole parts."""

    transport = "ucx"

    def __init__(self, sock: socket.socket, worker: UcxWorker, connection_id: int, peer: "_Introduction", name: str) -> None:
        """Takes ownership of `sock`, one reference to `worker` and `connection_id`, also when it raises Unreachable."""
        self._sock = sock
        self._worker = worker
        self._connection_id = connection_id
        self._peer = peer
        self._name = name
        self._lock = threading.Lock()
        self._failure: KVStoreError | None = None
        self._operations: set[UcxOperation] = set()
        self._users = 1
        self._is_reported = False
        """True if the failure was raised to a caller."""
        self._is_released = False
        self._endpoint: Any = None
        try:
            self._endpoint = worker.endpoint(peer.address)
            self._endpoint.set_close_callback(self._on_endpoint_closed)
            worker.watch(sock.fileno(), self._on_readable)
        except KVStoreError as error:
            self._fail(error)
            raise
        finally:
            self._leave()

    @classmethod
    def listen(cls, rail: Rail) -> "UcxListener":
        return UcxListener(rail)

    @classmethod
    def connect(cls, metadata: bytes, rail: Rail, deadline: Deadline) -> "UcxConnection":
        """Also raises ConfigError: UCX is missing, or has no such device."""
        address = _parse(metadata)
        worker = UcxWorker.acquire(rail.device)
        connection_id = worker.connection_ids.take()
        try:
            sock, peer = _exchange_introductions(address, rail, worker, connection_id, deadline)
        except BaseException:
            worker.connection_ids.release(connection_id)
            worker.release()
            raise
        return cls(sock, worker, connection_id, peer, str(address))

    def send(self, parts: Sequence[memoryview | bytes], deadline: Deadline) -> None:
        self._move(parts, self._peer.connection_id, deadline, is_receive=False)

    def recv_into(self, parts: Sequence[memoryview], deadline: Deadline) -> None:
        self._move(parts, self._connection_id, deadline, is_receive=True)

    def _move(self, parts: Sequence[memoryview | bytes], connection_id: int, deadline: Deadline, *, is_receive: bool) -> None:
        """Send or receive all parts, as messages with this number. Any error closes the connection."""
        operation = self._enter(parts, connection_id, is_receive)
        try:
            self._worker.post(operation)
            self._wait(operation, deadline)
            if operation.error is not None:
                raise self._translate(operation.error)
        except KVStoreError as error:
            raise self._end(operation, error) from None
        except BaseException as error:
            self._end(operation, Closed(f"the connection to {self._name} was given up: {error!r}"))
            raise
        finally:
            self._leave(operation)

    def _wait(self, operation: UcxOperation, deadline: Deadline) -> None:
        while operation.requests:
            if self._failure is not None:
                raise self._failure
            left_s, began_s, before = deadline.left_s(), time.monotonic(), len(operation.requests)
            self._worker.wait(operation, min(left_s, self.stall_timeout_s))
            stalled_s = time.monotonic() - began_s
            if len(operation.requests) == before and stalled_s >= self.stall_timeout_s:
                raise Unreachable(f"{self._name} has stalled: no part for {self.stall_timeout_s:g} s")

    def _translate(self, error: Exception) -> KVStoreError:
        if isinstance(error, self._worker.api.UCXMessageTruncatedError):
            return ProtocolError(f"a part from {self._name} is of another size")
        return Unreachable(f"the connection to {self._name} broke: {error}")

    def _enter(self, parts: Sequence[memoryview | bytes], connection_id: int, is_receive: bool) -> UcxOperation:
        """Raises InvalidArgument: a part is too long; Closed, or the connection's failure if no caller has seen it."""
        if any(len(part) >> PART_BITS for part in parts):
            raise InvalidArgument(f"a part has at most {(1 << PART_BITS) - 1} bytes")
        with self._lock:
            failure, is_reported = self._failure, self._is_reported
            if failure is None:
                call = self._endpoint.tag_recv if is_receive else self._endpoint.tag_send
                base = connection_id << PART_BITS
                operation = UcxOperation([TaggedMessage(call, part, base | len(part)) for part in parts if len(part)])
                self._operations.add(operation)
                self._users += 1
                return operation
        self.close()
        raise self._closed() if is_reported else failure

    def _leave(self, operation: UcxOperation | None = None) -> None:
        """Leave; the last thread to leave a broken connection releases its resources."""
        with self._lock:
            if operation is not None:
                self._operations.remove(operation)
            self._users -= 1
            is_last = self._failure is not None and not self._users and not self._is_released
            self._is_released = self._is_released or is_last
        if is_last:
            self._worker.unwatch(self._sock.fileno())
            self._sock.close()
            self._close_endpoint()
            self._worker.connection_ids.release(self._connection_id)
            self._worker.release()

    def _end(self, operation: UcxOperation, error: KVStoreError) -> KVStoreError:
        """Fail, and stop all bytes of the operation. Returns the error to raise: the connection's first failure."""
        self._fail(error)
        self._is_reported = True
        self._close_endpoint()
        self._worker.finish(operation)
        assert self._failure is not None
        return self._failure

    def _fail(self, error: KVStoreError) -> None:
        """Fail permanently, and interrupt all operations."""
        self._mark(error)
        for operation in list(self._operations):
            self._worker.interrupt(operation)

    def _mark(self, error: KVStoreError) -> None:
        """Record the first failure and shut the socket down."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
            with contextlib.suppress(OSError):  # the peer closed first
                self._sock.shutdown(socket.SHUT_RDWR)

    def _close_endpoint(self) -> None:
        with self._lock:
            endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            self._worker.close_endpoint(endpoint)

    def _on_endpoint_closed(self, *status: Any) -> None:
        """Callback of UCX for a failed endpoint, whose messages UCX ends. Called with the worker's lock held."""
        self._mark(Unreachable(f"the connection to {self._name} broke"))

    def _on_readable(self) -> None:
        """The peer sends nothing more, so readable means closed. Messages that arrived before still count."""
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:  # a reset also means closed
            pass
        self._worker.unwatch(self._sock.fileno())
        self._worker.flush()
        self._fail(Unreachable(f"{self._name} closed the connection"))

    def _closed(self) -> Closed:
        return Closed(f"the connection to {self._name} is closed")

    def close(self) -> None:
        with self._lock:
            self._users += 1
        self._fail(self._closed())
        self._is_reported = True
        self._leave()

    @property
    def is_open(self) -> bool:
        return self._failure is None


class UcxListener(Listener):
    """Listener for UCX connections."""

    def __init__(self, rail: Rail) -> None:
        host = rail.address or LOOPBACK
        self._worker = UcxWorker.acquire(rail.device)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._sock = socket.create_server((host, rail.port), family=family, backlog=BACKLOG)
        except OSError as error:
            self._worker.release()
            raise ConfigError(f"the transfer engine cannot listen on {host}:{rail.port}: {error.strerror or error}") from None
        # Accept a peer only once it has sent data: a silent one takes no descriptor.
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, KEEPALIVE_S)
        self._address = Address(host=host, port=self._sock.getsockname()[1])
        self._handshakes = UnauthenticatedEndpoints(
            self._sock,
            head_bytes=_HELLO.size,
            introduction_bytes=_introduction_size,
            max_pending=MAX_PENDING_HANDSHAKES,
            timeout_s=lambda: HANDSHAKE_S,
        )
        self._lock = threading.Lock()
        self._is_closed = False
        self._is_accepting = threading.Lock()

    def metadata(self) -> bytes:
        return MAGIC + str(self._address).encode()

    def accept(self, timeout_s: float) -> UcxConnection | None:
        end_s = time.monotonic() + timeout_s
        while not self._is_closed:
            try:
                with self._is_accepting:
                    arrived = self._handshakes.next(end_s - time.monotonic()) if not self._is_closed else None
            except OSError as error:
                if self._is_closed:
                    break
                raise Unreachable(f"cannot accept a connection: {error.strerror or error}") from None
            if arrived is None and not self._is_closed:
                return None
            connection = self._complete_handshake(*arrived) if arrived is not None else None
            if connection is not None:
                return connection
        raise Closed("the listener is closed")

    def _complete_handshake(self, sock: socket.socket, name: str) -> UcxConnection | None:
        """Return the connection, or None for a peer that is not ours or has disconnected."""
        worker = UcxWorker.acquire(self._worker.device)  # another worker, if the listener's was abandoned
        connection_id = worker.connection_ids.take()
        try:
            peer = _read_introduction(sock, Deadline(HANDSHAKE_S))
            sock.sendall(_pack_introduction(worker, connection_id))
        except (OSError, KVStoreError):
            sock.close()
            worker.connection_ids.release(connection_id)
            worker.release()
            return None
        try:
            return UcxConnection(sock, worker, connection_id, peer, name)
        except Unreachable:
            return None

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        try:
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        finally:
            with self._is_accepting:
                self._handshakes.close()
                self._sock.close()
            self._worker.release()


class _Introduction(NamedTuple):
    """Handshake data of a peer."""

    connection_id: int
    """The peer's number of the connection; messages to it carry this."""
    address: bytes
    """Address of its UCX worker."""


def _exchange_introductions(
    address: Address, rail: Rail, worker: UcxWorker, connection_id: int, deadline: Deadline
) -> tuple[socket.socket, _Introduction]:
    """Connect to the listener and return the socket and its introduction. Raises Unreachable, DeadlineExceeded,
    ProtocolError.
    """
    try:
        sock = connect(address, timeout_s=deadline.left_s(), source=rail.address)
        try:
            sock.sendall(_pack_introduction(worker, connection_id))
            return sock, _read_introduction(sock, deadline)
        except BaseException:
            sock.close()
            raise
    except TimeoutError:
        raise deadline.exceeded() from None
    except OSError as error:
        raise Unreachable(f"cannot connect to {address} over {rail.device or 'any device'}: {error.strerror or error}") from None


def _pack_introduction(worker: UcxWorker, connection_id: int) -> bytes:
    return _HELLO.pack(_MAGIC, _VERSION, len(worker.address), connection_id) + worker.address


def _introduction_size(head: bytes) -> int:
    """Return the length of an introduction from its head. Raises ProtocolError if it is malformed."""
    magic, version, size, _connection_id = _HELLO.unpack(head)
    if magic != _MAGIC or version != _VERSION or not 0 < size <= MAX_ADDRESS_BYTES:
        raise ProtocolError("the peer is not a UCX connection of this version")
    return _HELLO.size + int(size)


def _read_introduction(sock: socket.socket, deadline: Deadline) -> _Introduction:
    """Raises OSError, DeadlineExceeded, ProtocolError. The socket then detects the peer's death."""
    magic, version, size, connection_id = _HELLO.unpack(_read(sock, _HELLO.size, deadline))
    if magic != _MAGIC or version != _VERSION or not 0 < size <= MAX_ADDRESS_BYTES or not 0 < connection_id <= MAX_CONNECTION_ID:
        raise ProtocolError("the peer is not a UCX connection of this version")
    address = _read(sock, size, deadline)
    sock.settimeout(None)
    # Detects a peer that died without closing.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    return _Introduction(connection_id, address)


def _read(sock: socket.socket, size: int, deadline: Deadline) -> bytes:
    """Receive `size` bytes. Raises OSError, DeadlineExceeded."""
    data = bytearray()
    while len(data) < size:
        sock.settimeout(deadline.left_s())
        got = sock.recv(size - len(data))
        if not got:
            raise ConnectionResetError(errno.ECONNRESET, "the peer closed the connection")
        data += got
    return bytes(data)


def _parse(metadata: bytes) -> Address:
    """Raises ProtocolError for bytes that no UcxListener made."""
    try:
        if not metadata.startswith(MAGIC) or len(metadata) > 300:
            raise ValueError
        return parse_address(metadata[len(MAGIC) :].decode("ascii"))
    except (ValueError, KVStoreError):
        raise ProtocolError("malformed metadata of a UCX listener") from None
