"""The passive side of a ConnectionAgent: serves peers' requests for this process's registered memory.

A connection in use has a thread, which answers with blocking calls; an idle one that has a descriptor waits in an epoll set and costs
none. It chooses no paths and asks nothing of peers.
"""

import contextlib
import logging
import os
import select
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from kvstore.protocol.errors import Closed, Full, InvalidArgument, KVStoreError, ProtocolError, Unavailable
from kvstore.protocol.frames import HEADER_BYTES, MAX_PAYLOAD_BYTES, Header, pack_header, unpack_header
from kvstore.protocol.message import Message
from kvstore.protocol.session_messages import Failure, Ok
from kvstore.protocol.transfers import (
    MAX_NOTICE_BYTES,
    MAX_PIECE_BYTES,
    MAX_PIECES,
    MAX_TRANSFER_BODY_BYTES,
    Fence,
    Fetch,
    Join,
    Joined,
    Notice,
    Store,
)
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.connection import Connection, Listener
from kvstore.transfer.deadline import Deadline
from kvstore.transfer.exports import Exports, release

LINGER_MS: Final = 20
"""A thread waits this long for its peer's next request before it leaves the connection to epoll: a hand-over costs some 50 us."""
ACCEPT_POLL_S: Final = 1.0
MAX_NOTICES: Final = 65_536
"""Untaken notifications beyond which further ones are refused."""
IDLE_S: Final = 86_400.0
"""How long a connection without a descriptor may be idle."""
LAST_WORD_S: Final = 0.5
"""How long a peer that made a mistake has to read the answer before the connection is closed under it."""
REFUSED_ROOM: Final = 64
"""Connections beyond max_connections that are kept until they can be told so; further ones are closed without a word."""
HANG_UP_S: Final = 5.0
"""How long `close` waits for a transport that does not wake its threads, as it should."""
log = logging.getLogger("kvstore.transfer")


class _Peer:
    """One connection from a peer, and whether a thread serves it now."""

    __slots__ = ("connection", "gone", "is_dropped", "is_queued", "is_refused", "key", "parked_fd")

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.key: tuple[str, int] = ("", 0)
        self.parked_fd = -1
        self.is_queued = False
        """Something came by it, and no thread has begun to read it."""
        self.is_dropped = False
        self.is_refused = False
        self.gone = threading.Event()
        """Nothing that came by it is written any more."""


class Target:
    """See the module. Thread-safe. `name` is what peers are told."""

    def __init__(self, name: str, exports: Exports, settings: TransferSettings) -> None:
        self._name = name
        self._exports = exports
        self._settings = settings
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []
        self._peers: dict[tuple[str, int], _Peer] = {}
        self._open: set[_Peer] = set()
        self._parked: dict[int, _Peer] = {}
        self._notices: list[tuple[str, bytes]] = []
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._threads: list[threading.Thread] = []
        self._pool = ThreadPoolExecutor(settings.serve_threads, thread_name_prefix="kvstore-serve")
        self._demand = 0
        """Connections that have a thread of the pool or wait for one."""
        self._wanted_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
        """Counts connections for which a thread that lingers is to leave its own."""
        self._closing = threading.Event()
        self.served_bytes = 0

    def attach(self, listener: Listener) -> None:
        """Serve whoever comes by this listener until it or the target is closed; the target closes it too. Raises Closed."""
        with self._lock:
            if self._closing.is_set():
                listener.close()
                raise Closed("the transfer engine is closed")
            if not self._threads:
                self._spawn(self._dispatch, "kvstore-parked")
            self._listeners.append(listener)
            self._spawn(lambda: self._accept(listener), "kvstore-accept")

    def _spawn(self, function: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=function, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    @property
    def connections(self) -> int:
        return len(self._open)

    def notices(self) -> list[tuple[str, bytes]]:
        """(name of the agent, message) of what has come since the last call."""
        with self._lock:
            taken, self._notices = self._notices, []
        return taken

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
        self._pool.shutdown(wait=True)
        for peer in peers:  # those without a descriptor are served by no thread of the pool
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
            except Closed:
                return
            except KVStoreError as error:  # out of descriptors, say: the next one may be luckier
                log.error("the transfer engine cannot accept: %s", error)
                self._closing.wait(ACCEPT_POLL_S)
                continue
            if connection is not None:
                self._welcome(connection)

    def _welcome(self, connection: Connection) -> None:
        connection.stall_timeout_s = self._settings.stall_timeout_s
        peer = _Peer(connection)
        with self._lock:
            excess = len(self._open) - self._settings.max_connections
            is_welcome = not self._closing.is_set() and excess < REFUSED_ROOM
            if is_welcome:
                self._open.add(peer)
                peer.is_refused = excess >= 0
        if peer.is_refused or not is_welcome:
            log.warning("refusing a peer: %d connections are open (max_connections)", len(self._open))
        if not is_welcome:
            connection.close()
        elif connection.fileno() >= 0:
            self._park(peer)
        else:
            threading.Thread(target=self._serve, args=(peer,), name="kvstore-serve", daemon=True).start()

    def _park(self, peer: _Peer) -> None:
        """Leave an idle connection to epoll."""
        with self._lock:
            # Whoever drops it closes it afterwards: until then its descriptor is no other connection's.
            if peer.connection.is_open and not peer.is_dropped and not self._closing.is_set():
                fd = peer.parked_fd = peer.connection.fileno()
                self._parked[fd] = peer
                self._epoll.register(fd, select.EPOLLIN | select.EPOLLONESHOT)
                return
        self._forget(peer)

    def _dispatch(self) -> None:
        """Give connections on which something arrived to a thread."""
        while not self._closing.is_set():
            for fd, _ in self._epoll.poll():
                with self._lock:
                    peer = self._unpark(fd)
                    if peer is not None:
                        peer.is_queued = True
                        self._demand += 1
                        if self._demand > self._settings.serve_threads:
                            os.eventfd_write(self._wanted_fd, 1)
                        self._pool.submit(self._serve_queued, peer)

    def _unpark(self, fd: int) -> _Peer | None:
        peer = self._parked.pop(fd, None)
        if peer is not None:
            peer.parked_fd = -1
            self._epoll.unregister(fd)
        return peer

    def _drop(self, peer: _Peer) -> None:
        """Hang up. `gone` is set once no thread is at it any more."""
        with self._lock:
            peer.is_dropped = True
            was_parked = peer.parked_fd >= 0 and self._unpark(peer.parked_fd) is peer
            was_idle = was_parked or peer.is_queued
            peer.is_queued = False
        peer.connection.close()
        if was_idle:
            self._forget(peer)

    def _forget(self, peer: _Peer) -> None:
        peer.connection.close()
        with self._lock:
            self._open.discard(peer)
            if self._peers.get(peer.key) is peer:
                del self._peers[peer.key]
        peer.gone.set()

    # --- serving ---

    def _serve_queued(self, peer: _Peer) -> None:
        with self._lock:
            was_queued, peer.is_queued = peer.is_queued, False
        if was_queued:
            self._serve(peer)
        with self._lock:
            self._demand -= 1

    def _serve(self, peer: _Peer) -> None:
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

    def _answer_one(self, peer: _Peer) -> None:
        """One request. Raises whatever ends the connection."""
        connection = peer.connection
        header, body = self._receive(connection)
        try:
            self._handle(peer, header, body)
        except ProtocolError as error:  # where the next request begins is no longer certain
            self._say_last(connection, header.request_id, error)
            raise

    def _receive(self, connection: Connection) -> tuple[Header, memoryview]:
        head = memoryview(bytearray(HEADER_BYTES))
        if connection.fileno() >= 0:  # something is there: a header that comes in drops would keep the thread from others
            connection.recv_into([head], Deadline(self._settings.stall_timeout_s))
        else:
            connection.stall_timeout_s = IDLE_S
            connection.recv_into([head], Deadline(IDLE_S))
            connection.stall_timeout_s = self._settings.stall_timeout_s
        try:
            header = unpack_header(head)
            if header.body_bytes > MAX_TRANSFER_BODY_BYTES:
                raise ProtocolError(f"a body of {header.body_bytes} bytes is over the limit of {MAX_TRANSFER_BODY_BYTES}")
        except ProtocolError as error:
            self._say_last(connection, 0, error)
            raise
        body = memoryview(bytearray(header.body_bytes))
        if header.body_bytes:
            connection.recv_into([body], self._deadline(header))
        return header, body

    def _deadline(self, header: Header) -> Deadline:
        return Deadline(header.deadline_ms / 1000 if header.deadline_ms else self._settings.deadline_s)

    def _handle(self, peer: _Peer, header: Header, body: memoryview) -> None:
        if header.payload_bytes and header.type != Store.TYPE:
            raise ProtocolError(f"a message of type {header.type} has no payload, and {header.payload_bytes} bytes were announced")
        if header.type == Fetch.TYPE and peer.key[0]:
            self._fetch(peer, header, Fetch.unpack(body))
        elif header.type == Store.TYPE and peer.key[0]:
            self._store(peer, header, Store.unpack(body))
        elif header.type == Join.TYPE and not peer.key[0]:
            self._join(peer, header, Join.unpack(body))
        elif header.type == Fence.TYPE and peer.key[0]:
            self._fence(peer, header, Fence.unpack(body))
        elif header.type == Notice.TYPE and peer.key[0]:
            self._notice(peer, header, Notice.unpack(body))
        else:
            raise ProtocolError(f"a message of type {header.type} where {'a request' if peer.key[0] else 'Join'} belongs")

    def _join(self, peer: _Peer, header: Header, message: Join) -> None:
        key = (message.name, message.connection)
        if not message.name or len(message.name) > 255:
            raise ProtocolError("an agent's name has 1 to 255 characters")
        if peer.is_refused:
            refusal = Unavailable(f"all {self._settings.max_connections} connections of {self._name} are in use (max_connections)")
            self._say_last(peer.connection, header.request_id, refusal)
            raise refusal
        with self._lock:
            if key in self._peers:
                raise ProtocolError(f"connection {message.connection} of {message.name} is there already")
            self._peers[key] = peer
            peer.key = key
        self._answer(peer.connection, header.request_id, Joined(self._name))

    def _fetch(self, peer: _Peer, header: Header, message: Fetch) -> None:
        try:
            payload_bytes = _check_pieces(message)
            views, held = self._exports.hold(message)
        except ProtocolError:
            raise
        except KVStoreError as error:
            self._answer(peer.connection, header.request_id, Failure(error.code, str(error)))
            return
        try:
            head = pack_header(Ok.TYPE, header.request_id, 0, payload_bytes)
            peer.connection.send([head, *views], self._deadline(header))
            self._count(payload_bytes)
        finally:
            del views
            release(held)

    def _store(self, peer: _Peer, header: Header, message: Store) -> None:
        deadline = self._deadline(header)
        payload_bytes = _check_pieces(message)
        if header.payload_bytes != payload_bytes:
            raise ProtocolError(f"a payload of {header.payload_bytes} bytes for pieces of {payload_bytes} bytes")
        try:
            views, held = self._exports.hold(message)
        except KVStoreError as error:
            nowhere = memoryview(bytearray(max(message.sizes, default=0)))
            peer.connection.recv_into([nowhere[:size] for size in message.sizes], deadline)
            self._answer(peer.connection, header.request_id, Failure(error.code, str(error)))
            return
        try:
            peer.connection.recv_into(views, deadline)
            self._count(payload_bytes)
        finally:
            del views
            release(held)
        self._answer(peer.connection, header.request_id, Ok())

    def _count(self, payload_bytes: int) -> None:
        with self._lock:
            self.served_bytes += payload_bytes

    def _fence(self, peer: _Peer, header: Header, message: Fence) -> None:
        deadline = self._deadline(header)
        for number in message.connections:
            with self._lock:
                old = self._peers.get((peer.key[0], number))
            if old is peer:
                raise ProtocolError("a connection cannot fence itself off")
            if old is not None:
                self._drop(old)
                if not old.gone.wait(deadline.left_s()):
                    stuck = Unavailable(f"connection {number} is still being written from")
                    self._answer(peer.connection, header.request_id, Failure(stuck.code, str(stuck)))
                    return
        self._answer(peer.connection, header.request_id, Ok())

    def _notice(self, peer: _Peer, header: Header, message: Notice) -> None:
        answer: Message = Ok()
        if len(message.message) > MAX_NOTICE_BYTES:
            answer = Failure(InvalidArgument.code, f"a notification is at most {MAX_NOTICE_BYTES} bytes long")
        else:
            with self._lock:
                if len(self._notices) >= MAX_NOTICES:
                    answer = Failure(Full.code, f"{self._name} has {MAX_NOTICES} notifications that nobody took")
                else:
                    self._notices.append((peer.key[0], message.message))
        self._answer(peer.connection, header.request_id, answer)

    def _answer(self, connection: Connection, request_id: int, message: Message) -> None:
        body = message.pack()
        parts = [pack_header(message.TYPE, request_id, len(body)), body] if body else [pack_header(message.TYPE, request_id, 0)]
        connection.send(parts, Deadline(self._settings.stall_timeout_s))

    def _say_last(self, connection: Connection, request_id: int, error: KVStoreError) -> None:
        """Tell the peer why and give it the time to read: closing at once could throw the answer away."""
        with contextlib.suppress(KVStoreError):
            self._answer(connection, request_id, Failure(error.code, str(error)))
            connection.recv_into([memoryview(bytearray(1))], Deadline(LAST_WORD_S))


def _check_pieces(message: Fetch | Store) -> int:
    """The sum of the pieces. Raises ProtocolError for a request that no agent of ours sends."""
    if len(message.sizes) > MAX_PIECES:
        raise ProtocolError(f"a request of {len(message.sizes)} pieces; the limit is {MAX_PIECES}")
    if message.sizes and max(message.sizes) > MAX_PIECE_BYTES:
        raise ProtocolError(f"a piece of {max(message.sizes)} bytes; the limit is {MAX_PIECE_BYTES}")
    payload_bytes = sum(message.sizes)
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"pieces of {payload_bytes} bytes; a frame has at most {MAX_PAYLOAD_BYTES}")
    return payload_bytes
