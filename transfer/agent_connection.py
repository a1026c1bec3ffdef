"""Makes a Connection of any TransferAgent: send and receive, carried by one-sided writes.

Each end has a ring in registered memory. The sender copies into a staging ring of its own, writes that into the peer's ring and notifies
it; the receiver copies out and gives credit back by a notification. So every byte is copied twice and moved once: what a transport
with receive of its own does better, and what an agent's `transfer` does better for large regions.

    class NixlConnection(AgentConnection):
        transport = "nixl"

        @classmethod
        def make_agent(cls, name: str, rail: Rail) -> TransferAgent:
            return NixlAgent(name, rail, TransferSettings())

A peer that dies silently is found out when it is written to, else at the deadline or after the stall timeout.
"""

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import ClassVar, Final, Self

from kvstore.protocol.errors import Closed, ConfigError, DeadlineExceeded, KVStoreError, ProtocolError, Unreachable
from kvstore.transfer.agent import Direction, Rail, Remote, Request, TransferAgent
from kvstore.transfer.agent_hub import SEND_TIMEOUT_S, FollowUp, RingMemory, SharedHub
from kvstore.transfer.agent_messages import (
    LISTENER,
    Kind,
    Offer,
    kind_of,
    pack_offer,
    pack_plain,
    pack_position,
    unpack_offer,
    unpack_position,
)
from kvstore.transfer.connection import Connection, Listener
from kvstore.transfer.deadline import Deadline
from kvstore.transfer.memory import Piece, RemoteRegion

MAGIC: Final = b"AGENT\x01"
"""Begins a listener's metadata, before its agent's; the last byte is the version."""
MAX_BACKLOG: Final = 128
"""Peers that wait to be accepted; more are refused."""
DRAIN_TIMEOUT_S: Final = 5.0
"""Past its deadline: so late an agent may say that a write is over."""


class AgentConnection(Connection):
    """See the module. Subclasses say what agent; its transport is theirs."""

    ring_bytes: ClassVar[int] = 8 << 20
    """What the peer may send before this end receives it."""
    chunk_bytes: ClassVar[int] = 1 << 20
    """At most this much is written at once; as much is staged meanwhile."""

    @classmethod
    @abstractmethod
    def make_agent(cls, name: str, rail: Rail) -> TransferAgent:
        """An agent of this name, which is unique. Raises ConfigError."""

    def __init__(self, shared: SharedHub, remote: Remote) -> None:
        """For `connect` and the listener. The peer is not known yet."""
        self._shared, self._hub, self.agent, self._remote = shared, shared.hub, shared.hub.agent, remote
        shared.enter(self)
        self._ring, self._staging = RingMemory(self.ring_bytes), RingMemory(2 * self.chunk_bytes)
        self.peer: Offer | None = None
        """What it said of itself; None until it is met."""
        self._sent = self._allowed = 0
        """Positions in what this end sends: written, and where the peer's ring is full."""
        self._arrived = self._received = self._credited = 0
        """Positions in what the peer sends: in the ring, copied out, and told to the peer."""
        self._writes: deque[Request] = deque()
        """Under way, or over and not yet announced."""
        self._busy = 0
        """Calls of `send` and `recv_into`."""
        self._error: KVStoreError | None = None
        """Why this end has ended it."""
        self._fault: KVStoreError | None = None
        """Why it is no use any more, though this end has not ended it."""
        self._has_peer_left = False
        """The peer writes into the ring no more."""
        self._has_said_bye = self._has_left = self._is_freed = False
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self.number = self._hub.attach(self._receive)

    @classmethod
    def listen(cls, rail: Rail) -> "AgentListener":
        return AgentListener(cls, SharedHub(lambda name: cls.make_agent(name, rail)))

    @classmethod
    def connect(cls, metadata: bytes, rail: Rail, deadline: Deadline) -> Self:
        if not metadata.startswith(MAGIC):
            raise ProtocolError("not the metadata of an agent connection's listener of this version")
        shared = SharedHub.of_outgoing((cls, rail), lambda name: cls.make_agent(name, rail))
        try:
            connection = cls(shared, shared.hub.agent.load_remote(metadata[len(MAGIC) :]))
        finally:
            shared.release()
        with connection._ending_on_error():
            connection._greet(deadline)
        return connection

    def send(self, parts: Sequence[memoryview | bytes], deadline: Deadline) -> None:
        views = deque(view for part in parts if len(view := memoryview(part).cast("B")))
        with self._sending, self._ending_on_error():
            try:
                while views:
                    # The peer gives no room for what it has not been told of.
                    while len(self._writes) > (self._allowed > self._sent):
                        self._announce(deadline)
                    self._write(views, deadline)
                while self._writes:
                    self._announce(deadline)
            finally:
                self._drain()

    def recv_into(self, parts: Sequence[memoryview], deadline: Deadline) -> None:
        with self._receiving, self._ending_on_error():
            for part in parts:
                view, filled = part.cast("B"), 0
                while filled < len(view):
                    self._await(lambda: self._arrived > self._received, deadline)
                    filled += self._copy_out(view[filled:])
                    if self._received - self._credited >= self.ring_bytes // 4:
                        self._credited = self._received
                        self._notify(Kind.CREDIT, self._received, deadline)

    def close(self) -> None:
        self._end(Closed("the connection was closed"))
        self._settle()
        self._leave()

    @property
    def is_open(self) -> bool:
        return self._error is None

    def _greet(self, deadline: Deadline) -> None:
        try:
            self.agent.notify(self._remote, self._offer(Kind.HELLO, LISTENER, self.agent.metadata()), deadline)
        except KVStoreError as error:
            self._has_peer_left = True  # it was not told of the ring
            self._fault = error
            raise
        self._await(lambda: self.peer is not None, deadline)

    def accept(self, peer: Offer) -> None:
        """For the listener: tell the peer that it is connected. Raises ConfigError, Unreachable."""
        with self._hub.changed:
            self._meet(peer)
        try:
            self.agent.notify(self._remote, self._offer(Kind.WELCOME, peer.sender, b""), Deadline(SEND_TIMEOUT_S))
        except KVStoreError:
            self._has_peer_left = True  # it was not told of the ring
            raise

    def _meet(self, peer: Offer) -> None:
        self.peer = peer
        self._allowed = peer.ring.size_bytes

    def _offer(self, kind: Kind, recipient: int, metadata: bytes) -> bytes:
        region = self._ring.region
        descriptor = self.agent.export(region)
        if descriptor is None:
            raise ConfigError(f"agents of the transport {self.transport} cannot reach a ring in shared memory")
        ring = RemoteRegion(region.region_id, self.ring_bytes, region.write_key, {self.transport: descriptor})
        return pack_offer(kind, recipient, self.transport, Offer(self.number, ring, metadata))

    def _notify(self, kind: Kind, position: int, deadline: Deadline) -> None:
        assert self.peer is not None
        self.agent.notify(self._remote, pack_position(kind, self.peer.sender, position), deadline)

    def _write(self, views: "deque[memoryview]", deadline: Deadline) -> None:
        """Stage as much as one write takes, and begin it."""
        self._await(lambda: self._allowed > self._sent, deadline)
        if self._fault is not None:  # the ring may have room, but nobody reads it
            raise self._fault
        assert self.peer is not None
        ring = self.peer.ring
        offset = self._sent % ring.size_bytes
        slot = self.chunk_bytes if self._writes and self._writes[-1].pieces[0].local_offset == 0 else 0
        room = min(self._allowed - self._sent, ring.size_bytes - offset, self.chunk_bytes)
        size = _stage(views, self._staging.region.part(slot, room))
        deadline = Deadline(min(deadline.left_s(), self.stall_timeout_s))
        write = Request(Direction.WRITE, self._remote, [Piece(self._staging.region, slot, ring, offset, size)], deadline, callback=_release)
        write.caller_runs = not views and not self._writes
        self._sent += size
        write.context = self._sent
        self._writes.append(write)
        self._staging.region.hold()
        self.agent.submit(write)

    def _announce(self, deadline: Deadline) -> None:
        """Wait until the oldest write is over and tell the peer."""
        write = self._writes[0]
        self.agent.run(write)
        try:
            write.wait(deadline)
        except DeadlineExceeded as error:
            deadline.left_s()
            raise Unreachable(f"the peer took no byte for {self.stall_timeout_s:g} s") from error
        self._writes.popleft()
        self._notify(Kind.DATA, write.context, deadline)

    def _drain(self) -> None:
        """After an error: have the writes under way end, for they use the staging memory and the peer's ring."""
        while self._writes:
            write = self._writes[0]
            self.agent.cancel(write)
            self.agent.run(write)
            with suppress(KVStoreError):
                write.wait(Deadline(write.deadline.timeout_s + DRAIN_TIMEOUT_S))
            self._writes.popleft()

    def _copy_out(self, view: memoryview) -> int:
        offset = self._received % self.ring_bytes
        size = min(len(view), self._arrived - self._received, self.ring_bytes - offset)
        view[:size] = self._ring.region.memory[offset : offset + size]
        self._received += size
        return size

    def _await(self, is_ready: Callable[[], bool], deadline: Deadline) -> None:
        """Wait for the peer. Raises what ended the connection; what has arrived is received first."""
        left_s = deadline.left_s()
        if not self._hub.wait(lambda: is_ready() or self._error is not None or self._fault is not None, min(left_s, self.stall_timeout_s)):
            deadline.left_s()
            raise Unreachable(f"the peer moved no byte for {self.stall_timeout_s:g} s")
        if self._error is not None:
            raise self._error
        if self._fault is not None and not is_ready():
            raise self._fault

    def _receive(self, message: bytes) -> FollowUp | None:
        """A notification, with the hub's lock held."""
        try:
            kind = kind_of(message)
            if kind is Kind.WELCOME and self.peer is None:
                self._meet(unpack_offer(message, self.transport))
                return self._settle  # it may have come too late
            elif kind is Kind.DATA and self._arrived <= (arrived := unpack_position(message)) <= self._received + self.ring_bytes:
                self._arrived = arrived
            elif kind is Kind.CREDIT and self.peer is not None and (read := unpack_position(message)) <= self._sent:
                self._allowed = max(self._allowed, read + self.peer.ring.size_bytes)
            elif kind in (Kind.BYE, Kind.REFUSED):
                self._has_peer_left = True
                self._fault = self._fault or Unreachable("the peer hung up" if kind is Kind.BYE else "the listener is closed or full")
                return self._settle
            else:
                raise ProtocolError(f"the peer sent {kind.name} out of turn")
        except ProtocolError as error:
            self._fault = self._fault or error
        return None

    @contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        """Around a call: an error in it ends the connection. Raises Closed when that has ended before."""
        with self._hub.changed:
            if self._error is not None:
                raise Closed(f"the connection has ended: {self._error}")
            self._busy += 1
        try:
            yield
        except BaseException as error:
            ended = self._end(error if isinstance(error, KVStoreError) else Closed("a call was interrupted"))
            if ended is not error and isinstance(error, KVStoreError):
                raise Closed(str(ended)) from error
            raise
        finally:
            with self._hub.changed:
                self._busy -= 1
            self._settle()
            self._leave()

    def _end(self, error: KVStoreError) -> KVStoreError:
        """Why it has ended: for this, unless there was a reason before."""
        with self._hub.changed:
            ended = self._error = self._error or error
            self._hub.changed.notify_all()
            writes = list(self._writes)
        for write in writes:
            self.agent.cancel(write)
        return ended

    def _leave(self) -> None:
        """Let go of the agent, once."""
        with self._hub.changed:
            leaves = self._error is not None and not self._has_left
            self._has_left |= leaves
        if leaves:
            self._shared.release()

    def _settle(self) -> None:
        """Say farewell once nothing is written any more; free the ring once the peer has said so too."""
        with self._hub.changed:
            is_over = not self._busy and (self._error is not None or self._has_peer_left)
            says_bye = is_over and self.peer is not None and not self._has_said_bye
            self._has_said_bye |= says_bye
        if says_bye and self.peer is not None and not self._hub.tell(self._remote, pack_plain(Kind.BYE, self.peer.sender)):
            self._has_peer_left = True
        with self._hub.changed:
            is_freed = not self._busy and self._error is not None and self._has_peer_left and not self._is_freed
            self._is_freed |= is_freed
        if is_freed:
            self.free()

    def free(self) -> None:
        """For the hub, which has closed its agent: nothing writes into the ring any more."""
        self._hub.detach(self.number)
        self._shared.forget(self)
        self._ring.close()
        self._staging.close()


class AgentListener(Listener):
    """Waits for peers on an agent of its own, which the connections accepted share."""

    def __init__(self, kind: type[AgentConnection], shared: SharedHub) -> None:
        """Owns one use of `shared`."""
        self._kind, self._shared, self._hub, self.agent = kind, shared, shared.hub, shared.hub.agent
        self._backlog: deque[AgentConnection] = deque()
        self._is_closed = False
        self._metadata = MAGIC + self.agent.metadata()
        self._hub.attach(self._receive, recipient=LISTENER)

    def metadata(self) -> bytes:
        return self._metadata

    def accept(self, timeout_s: float) -> AgentConnection | None:
        self._hub.wait(lambda: bool(self._backlog) or self._is_closed, timeout_s)
        with self._hub.changed:
            if self._is_closed:
                raise Closed("the listener is closed")
            return self._backlog.popleft() if self._backlog else None

    def close(self) -> None:
        with self._hub.changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._hub.changed.notify_all()
            backlog = list(self._backlog)
        for connection in backlog:
            connection.close()
        self._shared.release()

    def _receive(self, message: bytes) -> FollowUp | None:
        """A notification, with the hub's lock held."""
        try:
            if kind_of(message) is not Kind.HELLO:
                return None
            offer = unpack_offer(message, self._kind.transport)
            remote = self.agent.load_remote(offer.metadata)
        except ProtocolError:
            return None
        if self._is_closed or len(self._backlog) >= MAX_BACKLOG:
            return lambda: self._refuse(remote, offer)
        return lambda: self._welcome(remote, offer)

    def _refuse(self, remote: Remote, offer: Offer) -> None:
        self._hub.tell(remote, pack_plain(Kind.REFUSED, offer.sender))

    def _welcome(self, remote: Remote, offer: Offer) -> None:
        try:
            connection = self._kind(self._shared, remote)
        except Closed:
            return  # the last one is leaving just now
        try:
            connection.accept(offer)
        except KVStoreError:
            connection.close()
            return
        with self._hub.changed:
            is_late = self._is_closed
            if not is_late:
                self._backlog.append(connection)
            self._hub.changed.notify_all()
        if is_late:
            connection.close()


def _stage(views: "deque[memoryview]", room: memoryview) -> int:
    """Move bytes from the front of `views` into `room`; how many."""
    staged = 0
    while views and staged < len(room):
        view = views.popleft()
        size = min(len(view), len(room) - staged)
        room[staged : staged + size] = view[:size]
        staged += size
        if size < len(view):
            views.appendleft(view[size:])
    return staged


def _release(write: Request) -> None:
    for piece in write.pieces:
        piece.local.release()
