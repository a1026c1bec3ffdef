"""A lane: one stream of requests to one peer, over one connection at a time. The active side of a ConnectionAgent.

One thread at a time runs a lane: it asks for a few requests ahead, so that the peer is never idle, and takes the answers in order. It
knows the messages; which lane a request takes and which thread runs it is agent.py's.
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
"""Of requests to read, behind the first: 64 KiB, for which a peer's socket has room while the peer sends and does not receive."""
LAST_ID: Final = 0xFFFFFFFF


class PeerConnection:
    """A connection that has joined a peer's target: what is kept in the endpoint pool. Answers come in the order of the requests."""

    __slots__ = ("connection", "head", "number", "reply_id", "request_id")

    def __init__(self, connection: Connection, number: int) -> None:
        self.connection = connection
        self.number = number
        self.request_id = 0
        self.reply_id = 0
        self.head = memoryview(bytearray(HEADER_BYTES))

    def join(self, name: str, secret: bytes, deadline: Deadline) -> None:
        """Introduce this agent with the peer's secret. Raises the peer's refusal, Unreachable, DeadlineExceeded or ProtocolError."""
        self.call(JoinEngine(name, self.number, secret), JoinReply, deadline)

    def call(self, message: Message, reply: type[Message], deadline: Deadline) -> None:
        """Send a message without payload and take its answer, when no other is awaited. Raises the peer's typed error (the connection
        lives on) or what broke the connection."""
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
        """Take the answer to the oldest request not answered yet, up to its payload, of this size. Raises as `call`."""
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
                raise ProtocolError(f"the peer answered with a message of type {header.type} where {reply.__name__} belongs")
            reply.unpack(body)
            if header.payload_bytes != payload_bytes:
                raise ProtocolError(f"the peer sent {header.payload_bytes} bytes where {payload_bytes} were asked for")
        except ProtocolError:
            self.connection.close()
            raise

    def _failure(self, header: FrameHeader, message: Failure) -> KVStoreError:
        if not header.request_id:
            self.connection.close()  # the peer could not read us, or refuses us, and hangs up
        error = from_code(message.code, message.text)
        if isinstance(error, (Cancelled, Closed, DeadlineExceeded)):  # would be taken for a reason of this side's, and tried again
            return ProtocolError(f"the peer answered what only this side can know: {error!r}")
        return error


class NoticeRequest(AgentRequest):
    """A notification, in the queue of a lane like any request."""

    __slots__ = ("message",)

    message: bytes


class RequestStream:
    """See the module. `lock` guards the queues; `step` is for the one thread that runs the lane."""

    def __init__(self, lock: threading.Lock, window: int) -> None:
        self._lock = lock
        self._window = window
        self.queue: deque[AgentRequest] = deque()
        self.sent: deque[AgentRequest] = deque()
        """Asked for and not answered yet, all of one direction: else both sides could send and neither receive."""
        self.queued_bytes = 0
        self.is_running = False
        self.endpoint: PeerConnection | None = None
        self.connection: Connection | None = None
        """The link's, or one that is about to be it: to be closed when nobody wants it any more."""
        self.is_proven = False
        """The connection has answered since it was taken; one that was open before may have died unnoticed."""
        self._step_ns = 0

    def add(self, request: AgentRequest) -> None:
        """Called with the lock held."""
        self.queue.append(request)
        self.queued_bytes += request.size_bytes

    def remove(self, request: AgentRequest) -> bool:
        """Remove a request that is not asked for yet. Called with the lock held."""
        if request not in self.queue:
            return False
        self.queue.remove(request)
        self.queued_bytes -= request.size_bytes
        return True

    def step(self, endpoint: PeerConnection, *, may_send: bool, caller: Any = None) -> None:
        """Ask for as much as the window allows, if it `may_send`, and take one answer. Raises what broke the connection; `sent` says who
        was under way. In the thread of a `caller`, which waits for that, no other's payload is sent ahead."""
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
        """The next request to ask for now, moved to `sent`."""
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
        """Whether this side can ask for it while the peer is busy answering: both would wait if it did not fit the sockets."""
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
        """Take the answer to the oldest request. A typed error of the peer's ends that request alone."""
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
        """Whether the step that broke took as long as a stall: then the way is bad, for what has died unnoticed is refused at once."""
        return time.monotonic_ns() - self._step_ns >= endpoint.connection.stall_timeout_s * 1e9

    def finish_first(self, error: KVStoreError | None = None) -> None:
        """The oldest request under way is over."""
        with self._lock:
            request = self.sent.popleft()
            self.queued_bytes -= request.size_bytes
        request.finish(error)

    def on_broken(self, endpoint: PeerConnection | None, error: KVStoreError) -> list[tuple[AgentRequest, KVStoreError]]:
        """The connection is gone (`endpoint`), or none could be had (None). Returns who fails by it; others stay, to be asked for anew.

        A request's own end, its deadline or cancellation, is no fault of the others. Nor is it anyone's that a connection which had
        been open before turns out to be dead. Called with the lock held.
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
    """Why a request ends by itself: it was cancelled, or its deadline is over."""
    if request.is_cancelled:
        return Cancelled("the transfer was cancelled")
    try:
        request.deadline.left_s()
    except DeadlineExceeded as error:
        return error
    return None
