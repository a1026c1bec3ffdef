"""Limits of the master's control plane: threads by caller, time for a peer's messages, unauthenticated connections.

gRPC's own pool gives a thread to each call as soon as its headers arrive. The thread waits for the message, and for
the peer to take each response. A handful of stalled calls would hold all threads. gRPC limits the number of
connections regardless of credentials, and can neither list nor close one."""

import contextlib
import ipaddress
import logging
import os
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Final, Protocol
from urllib.parse import unquote

from kvstore.protocol.errors import Full
from kvstore.rpc.thread_pools import started
from kvstore.security.identity import Identity, IdentityKind

MAX_WAITING: Final = 1024
"""Calls of one caller that wait for a thread; each takes a few KiB, without its message."""
SEND_TIMEOUT_S: Final = 30.0
"""Time that a peer has to take one message."""
DESCRIPTORS: Final = "/proc/self/fd"
KNOWN_SHARE: Final = 2
"""Authenticated peers that are remembered, as a multiple of max_connections: the latest, so that closed connections
are dropped."""

Call = Callable[[], None]
Caller = tuple[IdentityKind, str]
"""Kind and name; all unauthenticated callers are one."""
Peer = tuple[str, int]
"""Address and port of a TCP peer."""
log = logging.getLogger("kvstore.master")


class Cancellable(Protocol):
    """The part of a grpc.ServicerContext that is needed here."""

    def cancel(self) -> None: ...


class _CallQueue:
    """Calls of one caller."""

    def __init__(self) -> None:
        self.waiting: deque[Call] = deque()
        self.running = 0


class CallExecutor:
    """Threads that run calls, shared fairly between callers. Thread-safe.

    A call holds its thread until it ends, and a caller can make that as long as it likes. So no caller gets all
    threads: unauthenticated callers together get a quarter, any other caller half, and a quarter is reserved for
    nodes' heartbeats. Callers are served round robin."""

    def __init__(self, threads: int, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError if the system cannot start so many threads."""
        self._max_running = threads
        self._threads = started(threads, "control")
        self._lock = threading.Lock()
        self._clock_s = clock_s
        self._queues: dict[Caller, _CallQueue] = {}
        """In round-robin order. A queue without calls is removed."""
        self._expiry_s: dict[Cancellable, float] = {}
        """Calls whose peers a thread waits for, and until when."""
        self._is_closed = False

    def submit(self, identity: Identity, call: Call, *, joins: bool) -> None:
        """Run `call` when a thread is free for this caller. `joins` marks a call that only nodes make, which
        identifies them while authentication is off. Raises Full: too many calls of this caller are queued."""
        kind, name = identity.kind, identity.name
        if kind is IdentityKind.ANONYMOUS and joins:
            kind = IdentityKind.NODE
        elif kind is IdentityKind.UNAUTHENTICATED:
            name = ""
        with self._lock:
            queue = self._queues.setdefault((kind, name), _CallQueue())
            if len(queue.waiting) >= MAX_WAITING:
                raise Full(f"{MAX_WAITING} control calls of this caller are queued: wait for their responses")
            queue.waiting.append(call)
            self._start()

    def _start(self) -> None:
        """Give free threads to waiting calls."""
        while not self._is_closed and (caller := next(filter(self._may_run, self._queues), None)) is not None:
            queue = self._queues[caller] = self._queues.pop(caller)
            queue.running += 1
            self._threads.submit(self._run, caller, queue.waiting.popleft())

    def _may_run(self, caller: Caller) -> bool:
        queue, quarter = self._queues[caller], max(1, self._max_running // 4)
        if not queue.waiting or sum(one.running for one in self._queues.values()) >= self._max_running:
            return False
        if caller[0] is IdentityKind.NODE:
            return True
        most = {IdentityKind.UNAUTHENTICATED: quarter, IdentityKind.ANONYMOUS: self._max_running}.get(
            caller[0], max(1, self._max_running // 2)
        )
        others = sum(one.running for (kind, _), one in self._queues.items() if kind is not IdentityKind.NODE)
        return queue.running < most and others < max(1, self._max_running - quarter)

    def _run(self, caller: Caller, call: Call) -> None:
        try:
            call()
        except Exception:
            log.exception("a control call failed")
        finally:
            with self._lock:
                queue = self._queues[caller]
                queue.running -= 1
                if not (queue.running or queue.waiting):
                    del self._queues[caller]
                self._start()

    @contextmanager
    def waiting_for(self, context: Cancellable, timeout_s: float) -> Iterator[None]:
        """Register a wait for the peer of a call: `expire` cancels the call after `timeout_s`."""
        self._expiry_s[context] = self._clock_s() + timeout_s
        try:
            yield
        finally:
            self._expiry_s.pop(context, None)

    def expire(self) -> int:
        """Cancel the calls whose peers have made a thread wait too long. Returns their number."""
        now_s = self._clock_s()
        late = [context for context, until_s in list(self._expiry_s.items()) if until_s <= now_s]
        for context in late:
            context.cancel()
        return len(late)

    def close(self) -> None:
        """Start no more calls. Running ones end on their own, or with the server."""
        with self._lock:
            self._is_closed = True
        self._threads.shutdown(wait=False)


class UnauthenticatedConnections:
    """Limit of the connections to one port whose peers have made no call with a good credential.

    The connections are found among this process's descriptors by their local port. The oldest ones over the limit are shut down, which
    gRPC notices. A peer that has authenticated once stays so while its connection lasts.
    """

    def __init__(self, port: int, *, most: int, max_connections: int) -> None:
        """At most `most` connections to `port` may be unauthenticated."""
        self._port = port
        self._most = most
        self._max_known = KNOWN_SHARE * max_connections
        self._lock = threading.Lock()
        self._known: OrderedDict[Peer, None] = OrderedDict()
        self._descriptors: dict[Peer, int] = {}
        """Connections at the last check, oldest first."""

    def authenticated(self, peer: str) -> None:
        """The peer with this gRPC address (`ipv4:10.0.0.7:4711`) has shown a good credential. For any thread."""
        found = _tcp_peer(peer)
        if found is not None:
            with self._lock:
                self._known[found] = None
                self._known.move_to_end(found)
                if len(self._known) > self._max_known:
                    self._known.popitem(last=False)

    def enforce(self) -> int:
        """Shut down the connections over the limit. Returns their number. For one thread."""
        descriptors = [int(name) for name in os.listdir(DESCRIPTORS)]
        if len(descriptors) <= self._most:  # nearly always: no need to check each
            self._descriptors.clear()
            return 0
        found = {peer: descriptor for descriptor in descriptors if (peer := self._peer_of(descriptor)) is not None}
        self._descriptors = {peer: found[peer] for peer in (*filter(found.__contains__, self._descriptors), *found)}
        with self._lock:
            unknown = [peer for peer in self._descriptors if peer not in self._known]
        late = unknown[: max(0, len(unknown) - self._most)]
        for peer in late:
            self._peer_of(self._descriptors[peer], shut_down=peer)
        if late:
            log.warning("closing %d control connections: %d others have not authenticated either", len(late), self._most)
        return len(late)

    def _peer_of(self, descriptor: int, *, shut_down: Peer | None = None) -> Peer | None:
        """Return the peer of a connection to the port, None for another descriptor. Shut it down if it is
        `shut_down`'s. Uses a duplicate, since gRPC may close the descriptor at any time."""
        with contextlib.suppress(OSError, ValueError), _copy_of(descriptor) as sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockname()[1] == self._port:
                host, port = sock.getpeername()[:2]
                peer = _address(host), port
                if peer == shut_down:
                    sock.shutdown(socket.SHUT_RDWR)
                return peer
        return None


def _copy_of(descriptor: int) -> socket.socket:
    """Raises OSError if it is closed, or not a socket."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


@lru_cache(maxsize=4096)
def _tcp_peer(text: str) -> Peer | None:
    """None for other than a TCP connection, such as a Unix socket."""
    host, _, port = unquote(text).partition(":")[2].rpartition(":")
    try:
        return _address(host.strip("[]")), int(port)
    except ValueError:
        return None


def _address(host: str) -> str:
    """Return the canonical text of an address: without a zone, and IPv4 if it is mapped in IPv6. Raises ValueError."""
    found = ipaddress.ip_address(host.partition("%")[0])
    return str(getattr(found, "ipv4_mapped", None) or found)
