"""Pipelined requests to one peer over one connection at a time: the active side of a ConnectionAgent.

One thread at a time runs a stream: it sends a few requests ahead, so that the peer is never idle, and receives replies
in order. agent.py decides which stream takes a request and which thread runs it.
"""

import threading
import time
from collections import deque
from itertools import islice
from typing import Any, Final

from kvstore.protocol.errors import (
    Cancelled,
    Closed,
    DeadlineExceeded,
    KVStoreError,
    ProtocolError,
    Unreachable,
    from_code,
)
from kvstore.protocol.frames import HEADER_BYTES, MAX_DEADLINE_MS, FrameHeader, pack_header, unpack_header
from kvstore.protocol.message import Message
from kvstore.protocol.session_messages import Failure, Ok
from kvstore.protocol.transfers import MAX_TRANSFER_BODY_BYTES, Fence, JoinEngine, JoinReply, Notice, ReadRegions, WriteRegions
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.agent import AgentRequest, Direction
from kvstore.transfer.memory.pieces import local_views, wire_columns
from kvstore.transfer.streams.connection import Connection

MAX_AHEAD_PIECES: Final = 2048
"""Pieces of read requests sent ahead of the first: 64 KiB, which fit a peer's socket buffer while the peer sends and
does not receive.
"""
LAST_ID: Final = 0xFFFFFFFF


class PeerConnection:
    """A connection that has joined a peer's target; an entry of the endpoint pool. Replies arrive in the order of the
    requests.
    """

    __slots__ = ("connection", "head", "number", "reply_id", "request_id")

    def __init__(self, connection: Connection, number: int) -> None:
        self.connection = connection
        self.number = number
        self.request_id = 0
        self.reply_id = 0
        self.head = memoryview(bytearray(HEADER_BYTES))

    def join(self, name: str, secret: bytes, deadline: Deadline) -> None:
        """Authenticate with the peer's secret. Raises the peer's refusal, Unreachable, DeadlineExceeded or
        ProtocolError.
        """
        self.call(JoinEngine(name, self.number, secret), JoinReply, deadline)

    def call(self, message: Message, reply: type[Message], deadline: Deadline) -> None:
        """Send a message without payload and receive its reply, while no other is outstanding. Raises the peer's typed
        error (the connection stays open) or the connection's failure.
        """
        self.send(message, deadline)
        self.receive(reply, deadline)

    def send(self, message: Message, deadline: Deadline, payload: "list[memoryview] | None" = None, payload_bytes: int = 0) -> None:
        self.request_id = self.request_id % LAST_ID + 1
        body = message.pack()
        deadline_ms = min(int(deadline.left_s() * 1000) + 1, MAX_DEADLINE_MS)
        head = pack_header(message.TYPE, self.request_id, len(body), payload_bytes, deadline_ms)
        parts: list[memoryview | bytes] = [head, body] if body else [head]
        if payload:
            parts += payload
        self.connection.send(parts, deadline)

    def receive(self, reply: type[Message], deadline: Deadline, *, payload_bytes: int = 0) -> None:
        """Receive the reply to the oldest outstanding request, up to its payload of `payload_bytes`. Raises as `call`."""
        self.reply_id = self.reply_id % LAST_ID + 1
        self.connection.recv_into([self.head], deadline)
        try:
            header = unpack_header(self.head)
            if header.body_bytes > MAX_TRANSFER_BODY_BYTES:
                raise ProtocolError(f"the peer announced a body of {header.body_bytes} bytes; the limit is {MAX_TRANSFER_BODY_BYTES}")
            body = memoryview(bytearray(header.body_bytes))
            if header.body_bytes:
                self.connection.recv_into([body], deadline)
            if header.type == Failure.TYPE and not header.payload_bytes and header.request_id in (0, self.reply_id):
                raise self._failure(header, Failure.unpack(body))
            if header.type != reply.TYPE or header.request_id != self.reply_id:
                raise ProtocolError(f"the peer answered with a message of type {header.type} instead of {reply.__name__}")
            reply.unpack(body)
            if header.payload_bytes != payload_bytes:
                raise ProtocolError(f"the peer sent {header.payload_bytes} bytes where {payload_bytes} were requested")
        except ProtocolError:
            self.connection.close()
            raise

    def _failure(self, header: FrameHeader, message: Failure) -> KVStoreError:
        if not header.request_id:
            self.connection.close()  # the peer rejects this connection, and closes it
        error = from_code(message.code, message.text)
        if isinstance(error, (Cancelled, Closed, DeadlineExceeded)):  # these would count as this side's own, and be retried
            return ProtocolError(f"the peer sent an error that only this side can raise: {error!r}")
        return error


class NoticeRequest(AgentRequest):
    """A notification, queued in a stream like any request."""

    __slots__ = ("message",)

    message: bytes


class RequestStream:
    """Queue of requests to one peer, and those sent. `lock` guards the queues; `step` is called only by the thread that
    runs the stream.
    """

    def __init__(self, lock: threading.Lock, window: int) -> None:
        self._lock = lock
        self._window = window
        self.queue: deque[AgentRequest] = deque()
        self.sent: deque[AgentRequest] = deque()
        """Requests without a reply yet, all of one direction; otherwise both sides could send and neither receive."""
        self.queued_bytes = 0
        self.is_running = False
        self.endpoint: PeerConnection | None = None
        self.connection: Connection | None = None
        """The endpoint's connection, or one being established: closed when no request needs it any more."""
        self.is_proven = False
        """The connection has replied since it was taken; a pooled one may have died unnoticed."""
        self._step_ns = 0

    def add(self, request: AgentRequest) -> None:
        """Queue a request. Called with the lock held."""
        self.queue.append(request)
        self.queued_bytes += request.size_bytes

    def remove(self, request: AgentRequest) -> bool:
        """Remove a request that was not sent yet. Called with the lock held."""
        if request not in self.queue:
            return False
        self.queue.remove(request)
        self.queued_bytes -= request.size_bytes
        return True

    def step(self, endpoint: PeerConnection, *, may_send: bool, caller: Any = None) -> None:
        """Send requests as the window allows, if it `may_send`, and receive one reply. Raises the connection's failure;
        `sent` then has the requests in flight. In the thread of a `caller`, no payload of other callers is sent ahead.
        """
        self._step_ns = time.monotonic_ns()
        while may_send and len(self.sent) < self._window:
            with self._lock:
                request = self._next(caller)
            if request is None:
                break
            self._send_request(endpoint, request)
        if self.sent:
            self._receive_reply(endpoint, self.sent[0])

    def _next(self, caller: Any) -> AgentRequest | None:
        """Return the next request to send now, moved to `sent`."""
        if not self.queue:
            return None
        head = self.queue[0]
        if self.sent and (head.fences or isinstance(head, NoticeRequest) or not self._may_follow(head)):
            return None
        if self.sent and head.direction is Direction.WRITE and caller is not None and caller not in (head, head.waits_for):
            return None
        self.sent.append(head)
        return self.queue.popleft()

    def _may_follow(self, request: AgentRequest) -> bool:
        """Return True if the request can be sent while the peer replies.

        If the request exceeded the socket buffers, both sides would block.
        """
        if request.direction is not self.sent[0].direction:
            return False
        ahead = sum(len(other.pieces) for other in islice(self.sent, 1, None)) + len(request.pieces)
        return request.direction is Direction.WRITE or ahead <= MAX_AHEAD_PIECES

    def _send_request(self, endpoint: PeerConnection, request: AgentRequest) -> None:
        deadline = request.deadline
        if isinstance(request, NoticeRequest):
            endpoint.send(Notice(request.message), deadline)
            return
        if request.fences:
            endpoint.call(Fence(list(request.fences)), Ok, deadline)
        columns = wire_columns(request.pieces)
        if request.direction is Direction.READ:
            endpoint.send(ReadRegions(*columns), deadline)
        else:
            endpoint.send(WriteRegions(*columns), deadline, local_views(request.pieces), request.size_bytes)

    def _receive_reply(self, endpoint: PeerConnection, request: AgentRequest) -> None:
        """Receive the reply to the oldest request. A typed error of the peer fails only that request."""
        error: KVStoreError | None = None
        try:
            payload_bytes = request.size_bytes if request.direction is Direction.READ else 0
            endpoint.receive(Ok, request.deadline, payload_bytes=payload_bytes)
            if payload_bytes:
                endpoint.connection.recv_into(local_views(request.pieces), request.deadline)
        except KVStoreError as failure:
            if not endpoint.connection.is_open:
                raise
            error = failure
        self.is_proven = True
        self.finish_first(error)

    def _has_stalled(self, endpoint: PeerConnection) -> bool:
        """Return True if the failed step took as long as a stall.

        Then the path is bad; a connection that died unnoticed fails at once.
        """
        return time.monotonic_ns() - self._step_ns >= endpoint.connection.stall_timeout_s * 1e9

    def finish_first(self, error: KVStoreError | None = None) -> None:
        """Finish the oldest request in flight."""
        with self._lock:
            request = self.sent.popleft()
            self.queued_bytes -= request.size_bytes
        request.finish(error)

    def on_broken(self, endpoint: PeerConnection | None, error: KVStoreError) -> list[tuple[AgentRequest, KVStoreError]]:
        """Handle a broken connection (`endpoint`), or a failed attempt to get one (None). Returns the requests that
        fail; others stay queued.

        A request's own end, by deadline or cancellation, does not fail the others. Nor does a pooled connection that
        turns out to be dead. Called with the lock held.
        """
        if endpoint is not None:
            for request in self.sent:
                if request.direction is Direction.WRITE:
                    request.unsettled = (*request.unsettled, endpoint.number)
        own_end = isinstance(error, (Closed, DeadlineExceeded))
        try_again = own_end or (
            endpoint is not None and isinstance(error, Unreachable) and not self.is_proven and not self._has_stalled(endpoint)
        )
        requests = [*self.sent, *self.queue]
        self.sent.clear()
        self.queue.clear()
        failed: list[tuple[AgentRequest, KVStoreError]] = []
        for request in requests:
            request_error = _own_error(request) or (None if try_again else error)
            if request_error is None:
                request.fences, request.unsettled = (*request.fences, *request.unsettled), ()
                self.queue.append(request)
            else:
                failed.append((request, request_error))
                self.queued_bytes -= request.size_bytes
        return failed


def _own_error(request: AgentRequest) -> KVStoreError | None:
    """Return the error of a request that was cancelled or whose deadline is over, else None."""
    if request.is_cancelled:
        return Cancelled("the transfer was cancelled")
    try:
        request.deadline.left_s()
    except DeadlineExceeded as error:
        return error
    return None
