"""TransferAgent over any Connection: one-sided reads and writes for transports that only send and receive.

target.py is the passive side, request_stream.py the protocol of the active side. This module owns the connections (an
endpoint pool per rail). It chooses the stream of each request and the thread that runs it: the caller's if it waits
anyway, else one of a pool.
"""

import contextlib
import functools
import itertools
import logging
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from kvstore.protocol.errors import Closed, DeadlineExceeded, InvalidArgument, KVStoreError, ProtocolError, Unreachable
from kvstore.protocol.transfers import MAX_NOTICE_BYTES, MAX_PIECE_BYTES, MAX_PIECES
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.thread_pools import submit_once
from kvstore.transfer.agent import AgentRequest, Direction, Rail, Remote, TransferAgent, cancelled
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.memory.pieces import check_pieces, longest_bytes
from kvstore.transfer.memory.region import Exports, Region
from kvstore.transfer.memory.signal_safety import Shield
from kvstore.transfer.streams.connection import Connection, Transport
from kvstore.transfer.streams.endpoints import EndpointPool, OpenEndpoint, ReadyEndpoint
from kvstore.transfer.streams.request_stream import NoticeRequest, PeerConnection, RequestStream
from kvstore.transfer.streams.target import Target

WINDOW_SLICES: Final = 2
"""Slices in flight per connection: one in progress, the others requested ahead."""

MAGIC: Final = b"kvagent1 "
"""Metadata: this, the transport's name, a space, and the listener's metadata."""
MAX_REQUEST_BYTES: Final = 4 << 30
MAX_METADATA_BYTES: Final = 64 << 10
log = logging.getLogger("kvstore.transfer")


class _RemoteAgent:
    """A peer's agent: its metadata, and the request streams to it."""

    def __init__(self, metadata: bytes, streams: list[RequestStream]) -> None:
        self.metadata = metadata
        self.streams = streams
        self.secret = b""
        self.is_loaded = True


class ConnectionAgent(TransferAgent):
    """Agent of a Connection transport. `exports` and `target` may be shared with agents of other rails; the target is
    then closed by its owner.
    """

    honours_fences = True

    def __init__(
        self,
        name: str,
        rail: Rail,
        settings: TransferSettings,
        connection_class: Transport,
        *,
        exports: Exports | None = None,
        target: Target | None = None,
        listens: bool = True,
    ) -> None:
        """Raises ConfigError: the transport's library is missing, its address is not local or in use, or no thread can
        be started.
        """
        super().__init__(name, rail)
        self.transport = connection_class.transport  # type: ignore[misc]
        self.window = settings.tcp_streams * WINDOW_SLICES
        self._settings = settings
        self._connection_class = connection_class
        self._exports = exports or Exports()
        self._listener = connection_class.listen(rail) if listens else None
        self._owns_target = target is None
        self._target = target or Target(name, self._exports, settings)
        if self._listener is not None:
            self._target.attach(self._listener)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._pool: EndpointPool[RequestStream, PeerConnection] = EndpointPool(
            max_endpoints=settings.max_endpoints, idle_ttl_s=settings.idle_ttl_s
        )
        self._peers: set[_RemoteAgent] = set()
        self._runners = ThreadPoolExecutor(min(256, settings.max_endpoints + 8), thread_name_prefix=f"kvstore-{self.transport}")
        # Random start: another process of the same name must not fence or collide with these connections.
        self._numbers = itertools.count(secrets.randbits(62))
        self._expiry_thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._closed = False

    # --- peers ---

    def metadata(self) -> bytes:
        listener = b"" if self._listener is None else self._listener.metadata()
        return MAGIC + self.transport.encode() + b" " + listener

    def load_remote(self, metadata: bytes) -> Remote:
        head = MAGIC + self.transport.encode() + b" "
        if not metadata.startswith(head) or not len(head) < len(metadata) <= MAX_METADATA_BYTES:
            raise ProtocolError(f"malformed metadata of an agent of transport {self.transport}")
        streams = self._settings.tcp_streams
        peer = _RemoteAgent(metadata[len(head) :], [RequestStream(self._lock, WINDOW_SLICES) for _ in range(streams)])
        with self._lock:
            self._peers.add(peer)
        return peer

    def set_secret(self, remote: Remote, secret: bytes) -> None:
        _as_agent(remote).secret = secret

    def unload_remote(self, remote: Remote) -> None:
        peer = _as_agent(remote)
        with self._lock:
            if not peer.is_loaded:
                return
            peer.is_loaded = False
            self._peers.remove(peer)
            queued = [request for stream in peer.streams for request in stream.queue]
            for stream in peer.streams:
                self._clear(stream)
                idle = self._pool.drop(stream)
                if idle is not None:
                    idle.connection.close()
                if stream.connection is not None:
                    stream.connection.close()
            self._changed.notify_all()
        for request in queued:
            request.finish(Unreachable("the peer was unloaded"))

    def export(self, region: Region) -> bytes:
        self._exports.add(region)
        return b""

    def notify(self, remote: Remote, message: bytes, deadline: Deadline) -> None:
        if len(message) > MAX_NOTICE_BYTES:
            raise InvalidArgument(f"a notification is at most {MAX_NOTICE_BYTES} bytes long, not {len(message)}")
        request = NoticeRequest(Direction.WRITE, remote, (), deadline, caller_runs=True)
        request.message = message
        with Shield() as shield:
            self.submit(request)
            shield.cancels(functools.partial(self.cancel, request))
            try:
                self.run(request)
                request.wait(deadline)
            except BaseException:
                self.cancel_and_wait(request)
                raise

    def notifications(self) -> list[tuple[str, bytes]]:
        return self._target.notices()

    # --- requests ---

    def submit(self, request: AgentRequest) -> None:
        peer = _as_agent(request.remote)
        error = self._refusal(request)
        if error is None and not request.pieces and not isinstance(request, NoticeRequest):
            request.finish()
            return
        starts = False
        if error is None:
            with self._lock:
                if self._closed or not peer.is_loaded:
                    error = Closed("the agent is closed") if self._closed else Unreachable("the peer was unloaded")
                else:
                    stream = min(peer.streams, key=_load_of)
                    stream.add(request)
                    request.state = stream
                    starts = not stream.is_running and not request.caller_runs
                    stream.is_running |= starts
        if error is not None:
            request.finish(error)
        elif starts:
            self._start(stream)

    def _refusal(self, request: AgentRequest) -> KVStoreError | None:
        try:
            if len(request.pieces) > MAX_PIECES or request.size_bytes > MAX_REQUEST_BYTES:
                raise InvalidArgument(f"a request has at most {MAX_PIECES} pieces and {MAX_REQUEST_BYTES} bytes: cut it")
            if longest_bytes(request.pieces) > MAX_PIECE_BYTES:
                raise InvalidArgument(f"a piece has at most {MAX_PIECE_BYTES} bytes: cut it")
            check_pieces(request.pieces, is_read=request.direction is Direction.READ)
            request.deadline.left_s()
        except KVStoreError as error:
            return error
        return None

    def run(self, request: AgentRequest) -> None:
        stream = request.state
        if stream is None:
            return
        with self._lock:
            if request.is_over or stream.is_running:
                return
            stream.is_running = True
        self._run(stream, request.waits_for or request)

    def cancel(self, request: AgentRequest) -> None:
        stream = request.state
        if stream is None:
            return
        with self._lock:
            if request.is_over:
                return
            request.is_cancelled = True
            was_pending = stream.remove(request)
            connection = stream.connection if request in stream.sent else None
            self._changed.notify_all()  # the stream may need no connection any more
        if was_pending:
            request.finish(cancelled())
        elif connection is not None:
            connection.close()  # part of a slice is in flight: only closing the connection stops it

    # --- running streams ---

    def _start(self, stream: RequestStream) -> None:
        """Have a pool thread serve a stream marked as running. If none is available, this thread does."""
        if submit_once(self._runners, functools.partial(self._run, stream)) is None:
            self._run(stream)

    def _run(self, stream: RequestStream, until: Any = None) -> None:
        """Serve a stream marked as running until it is empty; for a caller that waits for `until`, only while its
        request is next.

        Then another thread continues: requests of others have later deadlines than the caller's.
        """
        while True:
            with self._lock:
                if not stream.queue and not stream.sent:
                    stream.is_running = False
                    self._release_endpoint(stream)
                    return
                first = (stream.sent or stream.queue)[0]
                is_other_callers = until is not None and first is not until and first.waits_for is not until
                is_draining = stream.endpoint is not None and self._pool.is_draining(stream.endpoint)
                if is_draining and not stream.sent:  # another stream waits for its slot
                    self._release_endpoint(stream)
                    continue
            if is_other_callers or (until is not None and until.is_over):
                self._start(stream)
                return
            try:
                stream.step(stream.endpoint or self._connect(stream, first), may_send=not is_draining, caller=until)
            except KVStoreError as error:
                self._on_broken(stream, error)
            except Exception as error:  # of a faulty plug-in: its requests must still end
                log.exception("a connection over %s failed", self.transport)
                self._on_broken(stream, Unreachable(f"{self.transport} failed: {error!r}"))
            except BaseException:  # interrupted: the position in the stream is unknown
                self._on_broken(stream, Closed("the thread that ran this connection was interrupted"))
                self._start(stream)
                raise

    def _on_broken(self, stream: RequestStream, error: KVStoreError) -> None:
        with self._lock:
            failed = stream.on_broken(stream.endpoint, error if not self._closed else Closed("the agent is closed"))
            if self._closed:
                failed += [(request, error) for request in stream.queue]
                self._clear(stream)
            self._release_endpoint(stream, broken=True)
        for request, reason in failed:
            request.finish(Closed("the agent is closed") if self._closed else reason)

    def _clear(self, stream: RequestStream) -> None:
        stream.queued_bytes -= sum(request.size_bytes for request in stream.queue)
        stream.queue.clear()

    def _release_endpoint(self, stream: RequestStream, *, broken: bool = False) -> None:
        """Release the stream's connection. Called with the lock held."""
        endpoint, stream.endpoint, stream.connection = stream.endpoint, None, None
        if endpoint is None:
            return
        broken = broken or not endpoint.connection.is_open
        drained = self._pool.release(stream, endpoint, time.monotonic_ns(), broken=broken)
        if drained is not None:
            drained.connection.close()
        self._changed.notify_all()

    def _expire_idle(self) -> None:
        """Thread that closes idle connections."""
        while not self._closing.wait(self._settings.idle_ttl_s / 2):
            with self._lock:
                for endpoint in self._pool.expire(time.monotonic_ns()):
                    endpoint.connection.close()
                self._changed.notify_all()

    def _connect(self, stream: RequestStream, first: AgentRequest) -> PeerConnection:
        """Return a connection for the stream, pooled or new. Raises Unreachable, DeadlineExceeded, Closed, or the
        peer's refusal.
        """
        with self._lock:
            endpoint = self._take_endpoint(stream, first.deadline)
            if endpoint is not None:
                stream.endpoint, stream.connection, stream.is_proven = endpoint, endpoint.connection, False
                return endpoint
        try:
            endpoint = self._open_endpoint(stream, first)
        except BaseException:
            with self._lock:
                stream.connection = None
                self._pool.failed(stream)
                self._changed.notify_all()
            raise
        with self._lock:
            if self._expiry_thread is None:
                expiry_thread = threading.Thread(target=self._expire_idle, name="kvstore-sweep", daemon=True)
                with contextlib.suppress(RuntimeError):  # no thread can be started: idle connections stay open until one can
                    expiry_thread.start()
                    self._expiry_thread = expiry_thread
            self._pool.opened(stream, endpoint)
            stream.endpoint, stream.is_proven = endpoint, True
            self._changed.notify_all()
        return endpoint

    def _take_endpoint(self, stream: RequestStream, deadline: Deadline) -> PeerConnection | None:
        """Return an open connection, or None with a pool slot reserved for a new one. Called with the lock held."""
        while True:
            taken = self._pool.take(stream)
            if isinstance(taken, ReadyEndpoint):
                return taken.endpoint
            if isinstance(taken, OpenEndpoint):
                if taken.evicted is not None:
                    taken.evicted.connection.close()
                return None
            try:
                self._changed.wait(deadline.left_s())
                if not stream.queue:
                    raise Closed("the requests that needed a connection are over")
            except BaseException:
                self._pool.withdraw(stream)
                self._changed.notify_all()
                raise

    def _open_endpoint(self, stream: RequestStream, first: AgentRequest) -> PeerConnection:
        """Connect and join. Raises Unreachable if that takes longer than one attempt may."""
        peer, deadline = _as_agent(first.remote), first.deadline
        attempt = Deadline(min(deadline.left_s(), self._settings.connect_timeout_s))
        connection: Connection | None = None
        try:
            connection = self._connection_class.connect(peer.metadata, self.rail, attempt)
            connection.stall_timeout_s = self._settings.stall_timeout_s
            endpoint = PeerConnection(connection, next(self._numbers) & 0x7FFFFFFFFFFFFFFF)
            with self._lock:
                if self._closed or not peer.is_loaded:
                    raise Closed("the agent is closed") if self._closed else Unreachable("the peer was unloaded")
                stream.connection = connection
            endpoint.join(self.name, peer.secret, attempt)
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, DeadlineExceeded):
                deadline.left_s()
                raise Unreachable(f"no connection within {self._settings.connect_timeout_s:g} s") from None
            raise
        return endpoint

    def close(self) -> None:
        """As TransferAgent. Waits for a connection attempt to end, `connect_timeout_s` at most."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            streams = [stream for peer in self._peers for stream in peer.streams]
            queued = [request for stream in streams for request in stream.queue if not stream.is_running]
            for stream in streams:
                if not stream.is_running:
                    self._clear(stream)
                elif stream.connection is not None:
                    stream.connection.close()
            for endpoint in self._pool.close():
                endpoint.connection.close()
            self._changed.notify_all()
        for request in queued:
            request.finish(Closed("the agent is closed"))
        self._closing.set()
        self._runners.shutdown(wait=True)
        if self._expiry_thread is not None:
            self._expiry_thread.join()
        if self._listener is not None:
            self._listener.close()
        if self._owns_target:
            self._target.close()


def _load_of(stream: RequestStream) -> tuple[int, bool]:
    return stream.queued_bytes, stream.is_running


def _as_agent(remote: Remote) -> _RemoteAgent:
    if not isinstance(remote, _RemoteAgent):
        raise InvalidArgument("not a peer of this agent: pass what load_remote returned")
    return remote
