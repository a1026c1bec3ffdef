"""Passive side of a ConnectionAgent: accepts and authenticates connections, and assigns them to threads. responder.py
handles the requests.

A busy connection has a thread, which replies with blocking calls. An idle connection with a descriptor waits in an
epoll set and costs no thread; nor does an unauthenticated one (unauthenticated.py).
"""

import contextlib
import functools
import hmac
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Final

from kvstore.protocol.errors import Closed, KVStoreError, ProtocolError, Unauthorized, Unavailable
from kvstore.protocol.frames import FrameHeader
from kvstore.protocol.session_messages import Failure, Ok
from kvstore.protocol.transfers import Fence, JoinEngine, JoinReply, Notice, ReadRegions, WriteRegions
from kvstore.rpc.thread_pools import start_error
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.memory.region import Exports
from kvstore.transfer.streams.connection import Connection, Listener
from kvstore.transfer.streams.responder import FINAL_REPLY_TIMEOUT_S, Responder
from kvstore.transfer.streams.server_threads import ServerThreads
from kvstore.transfer.streams.unauthenticated import HandshakeState, PendingHandshakes

LINGER_MS: Final = 20
"""A thread waits this long for its peer's next request before it parks the connection in epoll: a hand-over costs some
50 us.
"""
ACCEPT_POLL_S: Final = 1.0
CLOSE_TIMEOUT_S: Final = 5.0
"""Longest wait of `close` for a transport that fails to wake its threads."""
log = logging.getLogger("kvstore.transfer")


class _InboundConnection:
    """A connection from a peer, and its serving state."""

    __slots__ = ("connection", "finished", "handshake", "is_dropped", "is_queued", "key", "parked_fd")

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.key: tuple[str, int] = ("", 0)
        """(agent's name, connection number) once it has joined."""
        self.handshake = HandshakeState()
        self.parked_fd = -1
        self.is_queued = False
        """Readable, and waiting for a thread."""
        self.is_dropped = False
        self.finished = threading.Event()
        """Set once no byte received on it is written to memory any more."""


class Target:
    """Server of all ConnectionAgents of an engine. Thread-safe. `name` is reported to peers."""

    def __init__(self, name: str, exports: Exports, settings: TransferSettings, secret: bytes = b"") -> None:
        """Peers must present `secret` to join; b"" accepts any peer."""
        self._secret = secret
        self._name = name
        self._settings = settings
        self._responder = Responder(name, exports, settings)
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []
        self._peers: dict[tuple[str, int], _InboundConnection] = {}
        self._open: set[_InboundConnection] = set()
        self._handshakes: PendingHandshakes[_InboundConnection] = PendingHandshakes(
            max_pending=settings.max_handshakes, timeout_s=settings.handshake_timeout_s
        )
        self._parked: dict[int, _InboundConnection] = {}
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._threads: list[threading.Thread] = []
        self._servers = ServerThreads(settings.serve_threads, settings.serve_threads + settings.max_connections)
        self._demand = 0
        """Connections that have one of these threads or wait for one."""
        self._yield_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
        """Semaphore: connections for which a lingering thread must park its own."""
        self._closing = threading.Event()

    def attach(self, listener: Listener) -> None:
        """Serve connections of this listener until it or the target is closed; the target closes it too.

        Raises Closed, or ConfigError (no thread can be started). The listener is closed then.
        """
        with self._lock:
            if self._closing.is_set():
                listener.close()
                raise Closed("the transfer engine is closed")
            try:
                if not self._threads:
                    self._spawn(self._dispatch, "kvstore-parked")
                self._spawn(lambda: self._accept(listener), "kvstore-accept")
            except (RuntimeError, MemoryError) as error:
                listener.close()
                raise start_error(1, "kvstore-accept", error) from error
            self._listeners.append(listener)

    def _spawn(self, function: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=function, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)  # joined by `close`

    @property
    def connections(self) -> int:
        """Peers' connections, idle ones included."""
        return len(self._open)

    @property
    def served_bytes(self) -> int:
        """Bytes that peers read and wrote."""
        return self._responder.served_bytes

    def notices(self) -> list[tuple[str, bytes]]:
        """Remove and return the notifications, as (name of the agent, message)."""
        return self._responder.notices()

    def close(self) -> None:
        """Close all connections; on return no region is in use by them. A second close is a no-op."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            peers = list(self._open)
        os.eventfd_write(self._wake_fd, 1)
        for listener in self._listeners:
            listener.close()
        for peer in peers:
            self._drop(peer)
        self._servers.close()
        for peer in peers:  # those without a descriptor have threads of their own
            peer.finished.wait(CLOSE_TIMEOUT_S)
        for thread in self._threads:
            thread.join()
        self._epoll.close()
        os.close(self._wake_fd)
        os.close(self._yield_fd)

    # --- connections ---

    def _accept(self, listener: Listener) -> None:
        while not self._closing.is_set():
            try:
                connection = listener.accept(ACCEPT_POLL_S)
                if connection is not None:
                    self._register(connection)
            except Closed:
                return
            except Exception as error:  # out of descriptors or threads, for example, or a faulty plug-in: try the next one
                log.error("the transfer engine cannot accept: %r", error)
                self._closing.wait(ACCEPT_POLL_S)

    def _register(self, connection: Connection) -> None:
        connection.stall_timeout_s = self._settings.stall_timeout_s
        peer = _InboundConnection(connection)
        displaced = None
        with self._lock:
            is_accepted = not self._closing.is_set()
            if is_accepted:
                self._open.add(peer)
                is_first = self._handshakes.next_ns() is None
                displaced = self._handshakes.add(peer, time.monotonic_ns())
                if is_first:  # the event loop must observe its time limit
                    os.eventfd_write(self._wake_fd, 1)
        if displaced is not None:
            log.warning("%d connections are unauthenticated (max_handshakes): closing the oldest", self._settings.max_handshakes)
            self._drop(displaced)
        if not is_accepted:
            connection.close()
            return
        try:
            if connection.fileno() >= 0:
                self._park(peer)
            else:
                threading.Thread(target=self._serve, args=(peer,), name="kvstore-serve", daemon=True).start()
        except Exception:
            self._forget(peer)
            raise

    def _park(self, peer: _InboundConnection) -> None:
        """Park an idle connection in epoll."""
        with self._lock:
            if peer.key[0] and peer.connection.has_unread() and not self._closing.is_set():
                self._queue(peer)  # epoll would not report these bytes
                return
            # `_drop` sets the flag before it closes: until then the descriptor cannot be reused.
            if peer.connection.is_open and not peer.is_dropped and not self._closing.is_set():
                fd = peer.connection.fileno()
                self._epoll.register(fd, select.EPOLLIN | select.EPOLLONESHOT)
                self._parked[fd], peer.parked_fd = peer, fd
                return
        self._forget(peer)

    def _dispatch(self) -> None:
        """Event loop: assigns readable connections to threads, starts extra threads when due, and runs and expires
        handshakes.
        """
        while not self._closing.is_set():
            with self._lock:
                due_ns = [due_ns for due_ns in (self._handshakes.next_ns(), self._servers.next_ns()) if due_ns is not None]
            for fd, _ in self._epoll.poll(max(min(due_ns) - time.monotonic_ns(), 0) / 1e9 if due_ns else None):
                if fd == self._wake_fd:
                    os.eventfd_read(fd)
                else:
                    self._on_readable(fd)
            with self._lock:
                late = self._handshakes.expire(time.monotonic_ns())
            for peer in late:
                self._drop(peer)
            self._servers.run_due(time.monotonic_ns())

    def _on_readable(self, fd: int) -> None:
        """Handle a readable connection. A failure does not affect other connections."""
        peer: _InboundConnection | None = None
        try:
            with self._lock:
                peer = self._unpark(fd)
                has_joined = peer is not None and bool(peer.key[0])
                if peer is not None and has_joined:
                    self._queue(peer)
            if peer is not None and not has_joined:
                self._continue_handshake(peer)
        except Exception:
            log.exception("serving a peer failed")
            if peer is not None:
                self._forget(peer)

    def _queue(self, peer: _InboundConnection) -> None:
        """Queue it for a thread. Called with the lock held."""
        peer.is_queued = True
        self._demand += 1
        if self._demand > self._settings.serve_threads:
            os.eventfd_write(self._yield_fd, 1)
        self._servers.submit(functools.partial(self._serve_queued, peer))

    def _continue_handshake(self, peer: _InboundConnection) -> None:
        """Read from an unauthenticated connection. Never blocks: the reply to a first message always fits the socket
        buffer.
        """
        handshake = peer.handshake
        try:
            join = handshake.receive(peer.connection)
            if join is not None:
                self._join(peer, handshake.request_id, join)
        except (ProtocolError, Unauthorized, Unavailable) as error:
            if handshake.is_refused:  # it sends on after the refusal: another reply could block
                self._forget(peer)
                return
            handshake.is_refused = True
            with self._lock:
                self._handshakes.shorten(peer, time.monotonic_ns() + int(FINAL_REPLY_TIMEOUT_S * 1e9))
            with contextlib.suppress(KVStoreError):
                self._responder.respond(peer.connection, handshake.request_id, Failure(error.code, str(error)))
        except KVStoreError:
            self._forget(peer)
            return
        self._park(peer)

    def _unpark(self, fd: int) -> _InboundConnection | None:
        peer = self._parked.pop(fd, None)
        if peer is not None:
            peer.parked_fd = -1
            self._epoll.unregister(fd)
        return peer

    def _drop(self, peer: _InboundConnection) -> None:
        """Close a connection. `finished` is set once no thread uses it."""
        with self._lock:
            peer.is_dropped = True
            was_parked = peer.parked_fd >= 0 and self._unpark(peer.parked_fd) is peer
            was_idle = was_parked or peer.is_queued
            peer.is_queued = False
        peer.connection.close()
        if was_idle:
            self._forget(peer)

    def _forget(self, peer: _InboundConnection) -> None:
        peer.connection.close()
        with self._lock:
            self._open.discard(peer)
            self._handshakes.remove(peer)
            if self._peers.get(peer.key) is peer:
                del self._peers[peer.key]
        peer.finished.set()

    # --- serving ---

    def _serve_queued(self, peer: _InboundConnection) -> None:
        with self._lock:
            was_queued, peer.is_queued = peer.is_queued, False
        if was_queued:
            self._serve(peer)
        with self._lock:
            self._demand -= 1

    def _serve(self, peer: _InboundConnection) -> None:
        """Handle requests until the peer pauses or disconnects."""
        connection = peer.connection
        fd = connection.fileno()
        poller = select.poll() if fd >= 0 else None
        if poller is not None:
            poller.register(fd, select.POLLIN)
            poller.register(self._yield_fd, select.POLLIN)
        try:
            while True:
                self._serve_one(peer)
                if poller is not None and self._should_park(poller):
                    self._park(peer)
                    return
        except KVStoreError:
            pass
        except Exception:
            log.exception("serving a peer failed")
        self._forget(peer)

    def _should_park(self, poller: select.poll) -> bool:
        """Return True if the thread should park its connection.

        It should if no request arrived for LINGER_MS, or if another connection waits for a thread.
        """
        while True:
            ready = [fd for fd, _ in poller.poll(LINGER_MS)]
            if self._yield_fd not in ready:
                return not ready
            with contextlib.suppress(BlockingIOError):  # another thread parked first
                os.eventfd_read(self._yield_fd)
                return True

    def _serve_one(self, peer: _InboundConnection) -> None:
        """Handle one request. Raises what ends the connection."""
        connection = peer.connection
        header, body = self._responder.receive(connection)
        try:
            self._handle(peer, header, body)
        except (
            ProtocolError,
            Unauthorized,
            Unavailable,
        ) as error:  # the position in the stream is lost, or it may not join
            self._responder.send_final(connection, header.request_id, error)
            raise

    def _handle(self, peer: _InboundConnection, header: FrameHeader, body: memoryview) -> None:
        if header.payload_bytes and header.type != WriteRegions.TYPE:
            raise ProtocolError(f"a message of type {header.type} has no payload, and {header.payload_bytes} bytes were announced")
        if header.type == ReadRegions.TYPE and peer.key[0]:
            self._responder.handle_read(peer.connection, header, ReadRegions.unpack(body))
        elif header.type == WriteRegions.TYPE and peer.key[0]:
            self._responder.handle_write(peer.connection, header, WriteRegions.unpack(body))
        elif header.type == JoinEngine.TYPE and not peer.key[0]:
            self._join(peer, header.request_id, JoinEngine.unpack(body))
        elif header.type == Fence.TYPE and peer.key[0]:
            self._fence(peer, header, Fence.unpack(body))
        elif header.type == Notice.TYPE and peer.key[0]:
            self._responder.handle_notice(peer.connection, peer.key[0], header, Notice.unpack(body))
        else:
            raise ProtocolError(f"a message of type {header.type} instead of {'a request' if peer.key[0] else 'JoinEngine'}")

    def _join(self, peer: _InboundConnection, request_id: int, message: JoinEngine) -> None:
        """Raises ProtocolError, Unauthorized, or Unavailable (too many connections)."""
        key = (message.name, message.connection)
        if not message.name or len(message.name) > 255:
            raise ProtocolError("an agent's name has 1 to 255 characters")
        if not hmac.compare_digest(message.secret, self._secret):
            raise Unauthorized(f"wrong secret for {self._name}: connect with its current description, from its cluster")
        with self._lock:
            if key in self._peers:
                raise ProtocolError(f"connection {message.connection} of {message.name} is open already")
            if len(self._peers) >= self._settings.max_connections:
                log.warning("refusing a peer: %d connections are open (max_connections)", len(self._peers))
                raise Unavailable(f"all {self._settings.max_connections} connections of {self._name} are in use (max_connections)")
            if peer.is_dropped:  # its time limit passed meanwhile
                raise ProtocolError("the handshake took too long")
            self._peers[key] = peer
            peer.key = key
            self._handshakes.remove(peer)
        self._responder.respond(peer.connection, request_id, JoinReply(self._name))

    def _fence(self, peer: _InboundConnection, header: FrameHeader, message: Fence) -> None:
        deadline = self._responder.deadline_of(header)
        for number in message.connections:
            with self._lock:
                old = self._peers.get((peer.key[0], number))
            if old is peer:
                raise ProtocolError("a connection cannot fence itself off")
            if old is not None:
                self._drop(old)
                if not old.finished.wait(deadline.left_s()):
                    stuck = Unavailable(f"connection {number} is still being written from")
                    self._responder.respond(peer.connection, header.request_id, Failure(stuck.code, str(stuck)))
                    return
        self._responder.respond(peer.connection, header.request_id, Ok())
