"""Interface of transfer agents: one-sided reads and writes of registered memory over one transport.

Agents are one-sided plug-ins. The two-sided plug-ins are connections (streams/connection.py), which streams/agent.py
turns into an agent.

An agent serves one rail. The engine (engine.py) cuts transfers into requests, chooses the rail of each, and retries
failed ones elsewhere. An agent only executes requests and reports their end.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Final

from kvstore.protocol.errors import Cancelled, Full, InvalidArgument, KVStoreError
from kvstore.protocol.transfers import MAX_NOTICE_BYTES
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.memory.pieces import Pieces, total_bytes
from kvstore.transfer.memory.region import Region

MAX_NOTICES: Final = 65_536
MAX_NOTICES_BYTES: Final = 16 << 20
"""Senders' names included: 256 of the longest, or all 65,536 of 200 bytes."""


class Notices:
    """Bounded queue of received notifications. Thread-safe. `name` is the agent's, for errors."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._kept: list[tuple[str, bytes]] = []
        self._bytes = 0

    def put(self, sender: str, message: bytes) -> None:
        """Queue a notification. Raises InvalidArgument if it is too long, Full if the queue is full."""
        if len(message) > MAX_NOTICE_BYTES:
            raise InvalidArgument(f"a notification is at most {MAX_NOTICE_BYTES} bytes long")
        size_bytes = len(message) + len(sender)
        with self._lock:
            if len(self._kept) >= MAX_NOTICES or self._bytes + size_bytes > MAX_NOTICES_BYTES:
                raise Full(f"{self._name} has {len(self._kept)} queued notifications, the most that it keeps: call notifications()")
            self._kept.append((sender, message))
            self._bytes += size_bytes

    def take(self) -> list[tuple[str, bytes]]:
        """Remove and return all (name of the sending agent, message), in order."""
        with self._lock:
            taken, self._kept, self._bytes = self._kept, [], 0
        return taken


class Direction(Enum):
    """Direction of a one-sided transfer, as seen by the initiator."""

    READ = "read"
    """From the peer's region to ours."""
    WRITE = "write"
    """From our region to the peer's."""


@dataclass(frozen=True, slots=True)
class Rail:
    """A NIC, or the host's own memory, as an agent uses it.

    `device` is the system's name of the NIC ("eth0", "mlx5_0"), "" for any. `address` is its IP address; "" if the
    transport needs none, and TCP then uses the loopback. `numa_node` is -1 if unknown or irrelevant. `speed_gbit_s` is
    the link's nominal speed, 0 if unknown.
    """

    device: str = ""
    address: str = ""
    numa_node: int = -1
    speed_gbit_s: float = 0.0
    port: int = 0
    """Port to listen on, for transports with ports; 0 chooses a free one."""


Remote = Any
"""An agent's object for a peer, made from the peer's metadata and opaque to others."""


@dataclass(slots=True, eq=False)
class AgentRequest:
    """A request to move pieces between this side's regions and one peer's, in one direction. Thread-safe.

    The submitter holds the regions (`Region.hold`) until the request is over. The agent calls `finish` exactly once.
    """

    direction: Direction
    remote: Remote
    pieces: Pieces
    deadline: Deadline
    callback: "Callable[[AgentRequest], None] | None" = None
    """Called by `finish` in the thread that calls it: must be short and must not block."""
    error: KVStoreError | None = None
    """The failure; None while the request is in flight and after success."""
    context: Any = None
    """For the submitter's use."""
    waits_for: Any = None
    """The object that the submitter waits for, with an attribute `is_over`: a thread that runs this request serves
    other requests until then.
    """
    caller_runs: bool = False
    """The submitter calls `run` right after `submit`: no other thread needs to be woken."""
    fences: Sequence[int] = ()
    """Connections on which earlier attempts of this write failed. The peer must close them before it accepts this one:
    late bytes could otherwise overwrite later writes.
    """
    unsettled: Sequence[int] = ()
    """After a failed write: connections that may still deliver part of it, for the next attempt's `fences`."""
    is_cancelled: bool = False
    """Set by `TransferAgent.cancel`, in agents that support it."""
    state: Any = None
    """For the agent's use."""
    size_bytes: int = -1
    """Sum over all pieces; computed unless given."""
    _over: threading.Event | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    is_over: bool = False

    def __post_init__(self) -> None:
        if self.size_bytes < 0:
            self.size_bytes = total_bytes(self.pieces)

    def finish(self, error: KVStoreError | None = None) -> None:
        """Mark the request as over. Called by the agent; from now on no byte of it moves, so its memory may be reused."""
        with self._lock:
            assert not self.is_over, "a request is over once"
            self.error = error
            self.is_over = True
            over = self._over
        if over is not None:
            over.set()
        if self.callback is not None:
            self.callback(self)

    def wait(self, deadline: Deadline | None) -> None:
        """Block until the request is over, without limit if `deadline` is None. Raises its error, or DeadlineExceeded
        (it may still be in flight).
        """
        with self._lock:
            if not self.is_over and self._over is None:
                self._over = threading.Event()
            over = self._over
        if not self.is_over and over is not None and not over.wait(deadline.left_s() if deadline is not None else None):
            assert deadline is not None
            raise deadline.exceeded()
        if self.error is not None:
            raise self.error


class TransferAgent(ABC):
    """Base class of agents, also of users' own. Thread-safe. Made as `Agent(name, rail)`, which raises ConfigError,
    naming what to install, if a library or device is missing.

    A write is over when its bytes are in the peer's memory. After a request is over (by success, failure, `cancel` or
    deadline) the agent moves none of its bytes in either direction. Requests may be executed in any order.
    """

    transport: ClassVar[str]
    """Name of the transport: "tcp", "shm", "ucx", "nixl". Both ends of a transfer use the same."""
    window: int = 8
    """Useful number of requests in flight per peer. The engine queues the rest, so that urgent ones can overtake."""

    honours_fences: ClassVar[bool] = False
    """True if the agent closes a request's `fences` before it moves. A write with fences uses no other agent."""

    def __init__(self, name: str, rail: Rail) -> None:
        self.name = name
        """Name of this side, unique among its peers."""
        self.rail = rail

    @abstractmethod
    def metadata(self) -> bytes:
        """Return this agent's address for peers: opaque bytes, at most 64 KiB, distributed by the application."""

    @abstractmethod
    def load_remote(self, metadata: bytes) -> Remote:
        """Return the peer with this metadata. Does no I/O. Raises ProtocolError for malformed metadata."""

    def set_secret(self, remote: Remote, secret: bytes) -> None:
        """Set the secret with which the peer's engine authenticates its peers, from its description; b"" for none.
        Ignored by default, for transports without authentication.
        """

    def unload_remote(self, remote: Remote) -> None:
        """Forget a peer: its connections may be closed, and requests in flight fail."""

    def export(self, region: Region) -> bytes | None:
        """Register a region and return what peers' agents of this transport need besides its id and key, at most 64
        KiB; None if this transport cannot reach it.

        Until the region is closed, peers that present its keys may read and write it. The agents of all rails are
        called; if their results differ, a peer's agent finds the one of its rail in the region's `descriptors`, under
        the transport's name.
        """
        return b""

    @abstractmethod
    def submit(self, request: AgentRequest) -> None:
        """Begin a request. Never waits for the network; `request.finish` is called exactly once, possibly before this
        returns.

        A request fails with one of:

        - Unreachable: the peer or the path is gone; DeadlineExceeded.
        - Denied: wrong key; StaleHandle: no such region; InvalidArgument: outside the region.
        - ProtocolError: the peer violates the protocol.
        - Cancelled or Closed.
        """

    def run(self, request: AgentRequest) -> None:
        """Execute a submitted request in the calling thread unless it has begun: the caller waits for it anyway, and a
        hand-over to another thread costs more than a small request. By default the agent's own threads execute all
        requests.
        """

    def cancel(self, request: AgentRequest) -> None:
        """Make a request end soon, with Cancelled unless it ends before. By default it runs to its end."""

    @abstractmethod
    def notify(self, remote: Remote, message: bytes, deadline: Deadline) -> None:
        """Deliver `message` (at most 64 KiB) to the peer's `notifications`, after all of our requests to it that are
        over by now.
        """

    @abstractmethod
    def notifications(self) -> list[tuple[str, bytes]]:
        """Remove and return the notifications received, as (name of the agent, message), in order per peer."""

    @abstractmethod
    def close(self) -> None:
        """Stop threads and connections; requests in flight fail with Closed. A second close is a no-op."""

    def cancel_and_wait(self, request: AgentRequest) -> None:
        """Cancel a request and return when it is over."""
        if not request.is_over:
            self.cancel(request)
        with suppress(KVStoreError):
            request.wait(None)


def cancelled() -> Cancelled:
    return Cancelled("the transfer was cancelled")
