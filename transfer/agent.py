"""The TransferAgent interface: one-sided reads and writes of registered memory. One of the two families of plug-in; the other, two-sided
one is streams/connection.py, which `streams/agent.py` turns into an agent.

An agent serves one rail. The engine (engine.py) cuts transfers into requests, chooses the rail of each, and tries failed ones elsewhere;
an agent only carries out, and says truthfully when a request is over.
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
"""Names of their senders included: 256 of the longest, or all 65,536 of 200 bytes."""


class Notices:
    """Thread-safe. `name` is the agent's that keeps them, for errors."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._kept: list[tuple[str, bytes]] = []
        self._bytes = 0

    def put(self, sender: str, message: bytes) -> None:
        """Keep one. Raises InvalidArgument: it is too long; Full: nobody takes those that are kept."""
        if len(message) > MAX_NOTICE_BYTES:
            raise InvalidArgument(f"a notification is at most {MAX_NOTICE_BYTES} bytes long")
        size_bytes = len(message) + len(sender)
        with self._lock:
            if len(self._kept) >= MAX_NOTICES or self._bytes + size_bytes > MAX_NOTICES_BYTES:
                raise Full(f"{self._name} has {len(self._kept)} notifications that nobody took")
            self._kept.append((sender, message))
            self._bytes += size_bytes

    def take(self) -> list[tuple[str, bytes]]:
        """(name of the agent, message) of what has come since the last call, in its order."""
        with self._lock:
            taken, self._kept, self._bytes = self._kept, [], 0
        return taken


class Direction(Enum):
    """Of a one-sided transfer, seen from the side that asks."""

    READ = "read"
    """From the peer's region to ours."""
    WRITE = "write"
    """From our region to the peer's."""


@dataclass(frozen=True, slots=True)
class Rail:
    """One way out of this host, as an agent uses it: a NIC, or the host's own memory.

    `device` is the NIC's name as the system knows it ("eth0", "mlx5_0"), "" for any. `address` is its IP address; "" where the
    transport needs none, and TCP then stays on the loopback. `numa_node` is where it is attached, -1 if that is unknown or makes no
    difference. `speed_gbit_s` is what the link is said to carry, 0 if unknown.
    """

    device: str = ""
    address: str = ""
    numa_node: int = -1
    speed_gbit_s: float = 0.0
    port: int = 0
    """Where to listen, for transports that have ports; 0 takes a free one."""


Remote = Any
"""What an agent made of a peer's metadata: its own class, opaque to everyone else."""


@dataclass(slots=True, eq=False)
class AgentRequest:
    """Pieces to be moved between this side's regions and one peer's, all in one direction; and whether that is over. Thread-safe.

    The submitter owns the regions and holds them (`Region.hold`) until the request is over. The agent calls `finish` exactly once.
    """

    direction: Direction
    remote: Remote
    pieces: Pieces
    deadline: Deadline
    callback: "Callable[[AgentRequest], None] | None" = None
    """Called by `finish`, in whatever thread that is: it must be short and must not block."""
    error: KVStoreError | None = None
    """Why it failed; None while it goes on and after success."""
    context: Any = None
    """The submitter's own."""
    waits_for: Any = None
    """What the submitter really waits for, with an attribute `is_over`: a thread that runs this request goes on with others until then."""
    caller_runs: bool = False
    """The submitter calls `run` right after `submit`: no other thread needs to be woken for it."""
    fences: Sequence[int] = ()
    """Connections on which an earlier attempt of this write failed: the peer must close them before it takes this one, or late bytes
    of theirs could overwrite what is written afterwards."""
    unsettled: Sequence[int] = ()
    """After a failed write: the connection that may still deliver some of it, for the next attempt's `fences`."""
    is_cancelled: bool = False
    """Set by `TransferAgent.cancel` of agents that can."""
    state: Any = None
    """The agent's own."""
    size_bytes: int = -1
    """Of all pieces; counted unless the submitter says it."""
    _over: threading.Event | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    is_over: bool = False

    def __post_init__(self) -> None:
        if self.size_bytes < 0:
            self.size_bytes = total_bytes(self.pieces)

    def finish(self, error: KVStoreError | None = None) -> None:
        """For the agent. After this no byte of the request moves any more: its memory may be used for something else."""
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
        """Block until it is over, as long as that takes if `deadline` is None. Raises its error, or DeadlineExceeded (it may go on)."""
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
    """See the module. Thread-safe. A user's own is made by `Agent(name, rail)`; it raises ConfigError when its library or device is
    missing, saying what to install.

    A write is over when its bytes are in the peer's memory, not when they are on their way. After a request is over (also by failure,
    `cancel` or its deadline) the agent moves none of its bytes any more, in either direction. Requests may be carried out in any order.
    """

    transport: ClassVar[str]
    """Name of the transport: "tcp", "shm", "ucx", "nixl". Both ends of a transfer use the same one."""
    window: int = 8
    """Requests to one peer that are worth having under way at once; the engine keeps the rest back, for a more urgent one to overtake."""

    honours_fences: ClassVar[bool] = False
    """Whether a request's `fences` are closed off before it moves: a write that has any goes by no other agent."""

    def __init__(self, name: str, rail: Rail) -> None:
        self.name = name
        """Of this side, unique among its peers."""
        self.rail = rail

    @abstractmethod
    def metadata(self) -> bytes:
        """How peers reach this agent: its own bytes, at most 64 KiB, carried by whoever introduces peers to one another."""

    @abstractmethod
    def load_remote(self, metadata: bytes) -> Remote:
        """The peer that described itself so. Does no I/O. Raises ProtocolError for bytes that no agent of this kind made."""

    def set_secret(self, remote: Remote, secret: bytes) -> None:
        """What the peer's engine lets in those by who show it, as its description says; b"" for one that asks for nothing. The default
        leaves it: for transports that do without."""

    def unload_remote(self, remote: Remote) -> None:
        """Nothing more will be asked of this peer: connections to it may be closed. Requests under way fail."""

    def export(self, region: Region) -> bytes | None:
        """What peers' agents of this transport have to know of a region of ours besides its id and key, at most 64 KiB; None if this
        transport cannot reach it. The agents of all rails are asked; where they say different things, a peer's agent finds in a region's
        `descriptors`, by its transport's name, what the agent said that it is to reach.

        From now on, until the region is closed, peers that show its keys may read and write it. Registers it where that is needed.
        """
        return b""

    @abstractmethod
    def submit(self, request: AgentRequest) -> None:
        """Begin. Never waits for the network; `request.finish` is called exactly once, possibly before this returns.

        It fails with Unreachable (the peer or the way to it is gone), DeadlineExceeded, Denied (wrong key), StaleHandle (no such
        region), InvalidArgument (outside the region), ProtocolError (the peer does not keep to the protocol), Cancelled or Closed.
        """

    def run(self, request: AgentRequest) -> None:
        """Carry out a submitted request in the calling thread, if it has not been begun: its caller waits for it anyway, and handing
        work to another thread costs more than a small request. The default leaves it to the agent's own threads."""

    def cancel(self, request: AgentRequest) -> None:
        """Have a request end soon, with Cancelled unless it is over before that. The default lets it run to its end."""

    @abstractmethod
    def notify(self, remote: Remote, message: bytes, deadline: Deadline) -> None:
        """Have `message` (at most 64 KiB) told by the peer's `notifications`, after all our requests to it that are over by now."""

    @abstractmethod
    def notifications(self) -> list[tuple[str, bytes]]:
        """(name of the agent, message) of what has come since the last call, in order for each peer."""

    @abstractmethod
    def close(self) -> None:
        """End threads and connections; requests under way end with Closed. A second close is a no-op."""

    def cancel_and_wait(self, request: AgentRequest) -> None:
        """Return when a request is over, however it ends."""
        if not request.is_over:
            self.cancel(request)
        with suppress(KVStoreError):
            request.wait(None)


def cancelled() -> Cancelled:
    return Cancelled("the transfer was cancelled")
