"""The passive side of a ConnectionAgent: who may speak, which thread listens to whom. What is said is responder.py's.

A connection in use has a thread, which answers with blocking calls; an idle one that has a descriptor waits in an epoll set and costs
none, and nor does one that has not said who it is (unauthenticated.py). It chooses no paths and asks nothing of peers.
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
from kvstore.transfer.streams.responder import LAST_WORD_S, Responder
from kvstore.transfer.streams.server_threads import ServerThreads
from kvstore.transfer.streams.unauthenticated import HandshakeState, PendingHandshakes

LINGER_MS: Final = 20
"""A thread waits this long for its peer's next request before it leaves the connection to epoll: a hand-over costs some 50 us."""
ACCEPT_POLL_S: Final = 1.0
HANG_UP_S: Final = 5.0
"""How long `close` waits for a transport that does not wake its threads, as it should."""
log = logging.getLogger("kvstore.transfer")


class _InboundConnection:
    """One connection from a peer, and whether a thread serves it now."""

    __slots__ = ("connection", "gone", "greeting", "is_dropped", "is_queued", "key", "parked_fd")

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.key: tuple[str, int] = ("", 0)
        """Its agent's name and number, once it has joined."""
        self.greeting = HandshakeState()
        self.parked_fd = -1
        self.is_queued = False
        """Something came by it, and no thread has begun to read it."""
        self.is_dropped = False
        self.gone = threading.Event()
        """Nothing that came by it is written any more."""


class Target:
    """See the module. Thread-safe. `name` is what peers are told."""

    def __init__(self, name: str, exports: Exports, settings: TransferSettings, secret: bytes = b"") -> None:
        """Peers join by showing `secret`; b"": whoever comes may."""
        self._secret = secret
        self._name = name
        self._settings = settings
        self._answering = Responder(name, exports, settings)
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []
        self._peers: dict[tuple[str, int], _InboundConnection] = {}
        self._open: set[_InboundConnection] = set()
        self._strangers: PendingHandshakes[_InboundConnection] = PendingHandshakes(
            most=settings.max_handshakes, timeout_s=settings.handshake_timeout_s
        )
        self._parked: dict[int, _InboundConnection] = {}
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._threads: list[threading.Thread] = []
        self._servers = ServerThreads(settings.serve_threads, settings.serve_threads + settings.max_connections)
        self._demand = 0
        """Connections that have one of these threads or wait for one."""
        self._wanted_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
        """Counts connections for which a thread that lingers is to leave its own."""
        self._closing = threading.Event()

    def attach(self, listener: Listener) -> None:
        """Serve whoever comes by this listener until it or the target is closed; the target closes it too.

        Raises Closed, or ConfigError: the system gives no thread. The listener is closed then, too.
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
        self._threads.append(thread)  # which `close` waits for

    @property
    def connections(self) -> int:
        """Peers' connections, idle ones included."""
        return len(self._open)

    @property
    def served_bytes(self) -> int:
        """What peers have read and written."""
        return self._answering.served_bytes

    def notices(self) -> list[tuple[str, bytes]]:
        """(name of the agent, message) of what has come since the last call."""
        return self._answering.notices()

    def close(self) -> None:
        """Hang up on everyone; when it returns, no region is used by it any more. A second close is a no-op."""
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
        for peer in peers:  # those without a descriptor are served by threads of their own
            peer.gone.wait(HANG_UP_S)
        for thread in self._threads:
            thread.join()
        self._epoll.close()
        os.close(self._wake_fd)
        os.close(self._wanted_fd)

    # --- connections ---

    def _accept(self, listener: Listener) -> None:
        while not self._closing.is_set():
            try:
                connection = listener.accept(ACCEPT_POLL_S)
                if connection is not None:
                    self._welcome(connection)
            except Closed:
                return
            except Exception as error:  # out of descriptors or threads, say, or a fault of a plug-in: the next one may be luckier
                log.error("the transfer engine cannot accept: %r", error)
                self._closing.wait(ACCEPT_POLL_S)

    def _welcome(self, connection: Connection) -> None:
        connection.stall_timeout_s = self._settings.stall_timeout_s
        peer = _InboundConnection(connection)
        displaced = None
        with self._lock:
            is_welcome = not self._closing.is_set()
            if is_welcome:
                self._open.add(peer)
                is_first = self._strangers.next_ns() is None
                displaced = self._strangers.add(peer, time.monotonic_ns())
                if is_first:  # the dispatcher looks after its time
                    os.eventfd_write(self._wake_fd, 1)
        if displaced is not None:
            log.warning("%d connections have not said who they are: the oldest is closed", self._settings.max_handshakes)
            self._drop(displaced)
        if not is_welcome:
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
        """Leave an idle connection to epoll."""
        with self._lock:
            if peer.key[0] and peer.connection.has_unread() and not self._closing.is_set():
                self._queue(peer)  # of that epoll would not tell
                return
            # Whoever drops it closes it afterwards: until then its descriptor is no other connection's.
            if peer.connection.is_open and not peer.is_dropped and not self._closing.is_set():
                fd = peer.connection.fileno()
                self._epoll.register(fd, select.EPOLLIN | select.EPOLLONESHOT)
                self._parked[fd], peer.parked_fd = peer, fd
                return
        self._forget(peer)

    def _dispatch(self) -> None:
        """Give connections on which something arrived to a thread, to one more where the others are held up; hear strangers out, and see
        them off."""
        while not self._closing.is_set():
            with self._lock:
                due_ns = [due_ns for due_ns in (self._strangers.next_ns(), self._servers.next_ns()) if due_ns is not None]
            for fd, _ in self._epoll.poll(max(min(due_ns) - time.monotonic_ns(), 0) / 1e9 if due_ns else None):
                if fd == self._wake_fd:
                    os.eventfd_read(fd)
                else:
                    self._take_up(fd)
            with self._lock:
                late = self._strangers.expire(time.monotonic_ns())
            for peer in late:
                self._drop(peer)
            self._servers.relieve(time.monotonic_ns())

    def _take_up(self, fd: int) -> None:
        """Something came by a connection. What goes wrong with one is no end of the others."""
        peer: _InboundConnection | None = None
        try:
            with self._lock:
                peer = self._unpark(fd)
                has_joined = peer is not None and bool(peer.key[0])
                if peer is not None and has_joined:
                    self._queue(peer)
            if peer is not None and not has_joined:
                self._greet(peer)
        except Exception:
            log.exception("serving a peer failed")
            if peer is not None:
                self._forget(peer)

    def _queue(self, peer: _InboundConnection) -> None:
        """Have a thread serve it. Called with the lock held."""
        peer.is_queued = True
        self._demand += 1
        if self._demand > self._settings.serve_threads:
            os.eventfd_write(self._wanted_fd, 1)
        self._servers.submit(functools.partial(self._serve_queued, peer))

    def _greet(self, peer: _InboundConnection) -> None:
        """A stranger has said something. Waits for nothing: an answer to a first message always has room."""
        greeting = peer.greeting
        try:
            join = greeting.hear(peer.connection)
            if join is not None:
                self._join(peer, greeting.request_id, join)
        except (ProtocolError, Unauthorized, Unavailable) as error:
            if greeting.is_refused:  # it goes on after it was told: another answer might find no room, and nobody here may wait
                self._forget(peer)
                return
            greeting.is_refused = True
            with self._lock:
                self._strangers.shorten(peer, time.monotonic_ns() + int(LAST_WORD_S * 1e9))
            with contextlib.suppress(KVStoreError):
                self._answering.answer(peer.connection, greeting.request_id, Failure(error.code, str(error)))
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
        """Hang up. `gone` is set once no thread is at it any more."""
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
            self._strangers.remove(peer)
            if self._peers.get(peer.key) is peer:
                del self._peers[peer.key]
        peer.gone.set()

    # --- serving ---

    def _serve_queued(self, peer: _InboundConnection) -> None:
        with self._lock:
            was_queued, peer.is_queued = peer.is_queued, False
        if was_queued:
            self._serve(peer)
        with self._lock:
            self._demand -= 1

    def _serve(self, peer: _InboundConnection) -> None:
        """Answer requests until the peer pauses or leaves."""
        connection = peer.connection
        fd = connection.fileno()
        poller = select.poll() if fd >= 0 else None
        if poller is not None:
            poller.register(fd, select.POLLIN)
            poller.register(self._wanted_fd, select.POLLIN)
        try:
            while True:
                self._answer_one(peer)
                if poller is not None and self._pauses(poller):
                    self._park(peer)
                    return
        except KVStoreError:
            pass
        except Exception:
            log.exception("serving a peer failed")
        self._forget(peer)

    def _pauses(self, poller: select.poll) -> bool:
        """Whether the thread is to leave its connection: nothing came for a while, or another one waits for a thread."""
        while True:
            ready = [fd for fd, _ in poller.poll(LINGER_MS)]
            if self._wanted_fd not in ready:
                return not ready
            with contextlib.suppress(BlockingIOError):  # another thread was quicker to leave
                os.eventfd_read(self._wanted_fd)
                return True

    def _answer_one(self, peer: _InboundConnection) -> None:
        """One request. Raises whatever ends the connection."""
        connection = peer.connection
        header, body = self._answering.receive(connection)
        try:
            self._handle(peer, header, body)
        except (
            ProtocolError,
            Unauthorized,
            Unavailable,
        ) as error:  # where the next request begins is no longer certain, or it may not join
            self._answering.say_last(connection, header.request_id, error)
            raise

    def _handle(self, peer: _InboundConnection, header: FrameHeader, body: memoryview) -> None:
        if header.payload_bytes and header.type != WriteRegions.TYPE:
            raise ProtocolError(f"a message of type {header.type} has no payload, and {header.payload_bytes} bytes were announced")
        if header.type == ReadRegions.TYPE and peer.key[0]:
            self._answering.fetch(peer.connection, header, ReadRegions.unpack(body))
        elif header.type == WriteRegions.TYPE and peer.key[0]:
            self._answering.store(peer.connection, header, WriteRegions.unpack(body))
        elif header.type == JoinEngine.TYPE and not peer.key[0]:
            self._join(peer, header.request_id, JoinEngine.unpack(body))
        elif header.type == Fence.TYPE and peer.key[0]:
            self._fence(peer, header, Fence.unpack(body))
        elif header.type == Notice.TYPE and peer.key[0]:
            self._answering.notice(peer.connection, peer.key[0], header, Notice.unpack(body))
        else:
            raise ProtocolError(f"a message of type {header.type} where {'a request' if peer.key[0] else 'Join'} belongs")

    def _join(self, peer: _InboundConnection, request_id: int, message: JoinEngine) -> None:
        """Raises ProtocolError, Unauthorized, or Unavailable: there is no room for one more."""
        key = (message.name, message.connection)
        if not message.name or len(message.name) > 255:
            raise ProtocolError("an agent's name has 1 to 255 characters")
        if not hmac.compare_digest(message.secret, self._secret):
            raise Unauthorized(f"{self._name} lets in who shows the secret of its description, as its cluster tells it to whom it knows")
        with self._lock:
            if key in self._peers:
                raise ProtocolError(f"connection {message.connection} of {message.name} is there already")
            if len(self._peers) >= self._settings.max_connections:
                log.warning("refusing a peer: %d connections are open (max_connections)", len(self._peers))
                raise Unavailable(f"all {self._settings.max_connections} connections of {self._name} are in use (max_connections)")
            if peer.is_dropped:  # its time was over a moment ago
                raise ProtocolError("it took too long to say who it is")
            self._peers[key] = peer
            peer.key = key
            self._strangers.remove(peer)
        self._answering.answer(peer.connection, request_id, JoinReply(self._name))

    def _fence(self, peer: _InboundConnection, header: FrameHeader, message: Fence) -> None:
        deadline = self._answering.deadline_of(header)
        for number in message.connections:
            with self._lock:
                old = self._peers.get((peer.key[0], number))
            if old is peer:
                raise ProtocolError("a connection cannot fence itself off")
            if old is not None:
                self._drop(old)
                if not old.gone.wait(deadline.left_s()):
                    stuck = Unavailable(f"connection {number} is still being written from")
                    self._answering.answer(peer.connection, header.request_id, Failure(stuck.code, str(stuck)))
                    return
        self._answering.answer(peer.connection, header.request_id, Ok())
