"""Interface of connections: ordered, bidirectional, blocking.

Connections are two-sided plug-ins. The one-sided plug-ins are agents (transfer/agent.py). streams/agent.py makes a
TransferAgent of any Connection.
"""

import math
import select
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

from kvstore.rpc.deadline import Deadline
from kvstore.transfer.agent import Rail


class Transport(Protocol):
    """Factory of connections: a Connection class, or an object with further state."""

    transport: str

    def listen(self, rail: Rail) -> "Listener":
        """As Connection.listen."""

    def connect(self, metadata: bytes, rail: Rail, deadline: Deadline) -> "Connection":
        """As Connection.connect."""


class Connection(ABC):
    """One connection between two processes. One thread may send while another receives; `close` is thread-safe.

    Both ends agree on sizes: the parts passed to `recv_into` match, one by one, those passed to `send` (a part may be
    empty). Both streams and message fabrics can therefore implement it.

    Any error closes the connection, as its position in the sequence is lost: Unreachable (the peer or the network is
    gone), DeadlineExceeded, ProtocolError (a part of another size, if the transport can tell), Closed (by this side).
    """

    transport: ClassVar[str]
    """Name of the transport; both ends use the same."""
    stall_timeout_s: float = math.inf
    """Set by the owner: `send` and `recv_into` fail with Unreachable after this long without progress, even before the
    deadline. A transport that cannot observe bytes uses whole parts.
    """

    @classmethod
    @abstractmethod
    def listen(cls, rail: Rail) -> "Listener":
        """Listen on this rail. Raises ConfigError: the library is missing (with the extra to install), or the address
        is not local.
        """

    @classmethod
    @abstractmethod
    def connect(cls, metadata: bytes, rail: Rail, deadline: Deadline) -> "Connection":
        """Connect from this rail to the listener with this metadata. Raises ProtocolError (malformed metadata),
        Unreachable, DeadlineExceeded.
        """

    @abstractmethod
    def send(self, parts: Sequence[memoryview | bytes], deadline: Deadline) -> None:
        """Send all parts in order. On return their memory may be changed; the peer need not have received them."""

    @abstractmethod
    def recv_into(self, parts: Sequence[memoryview], deadline: Deadline) -> None:
        """Fill all parts in order. After an error nothing is written to them any more."""

    @abstractmethod
    def close(self) -> None:
        """Close at once: unsent bytes are dropped, and `send` or `recv_into` in another thread fails with Closed. A
        second close is a no-op.
        """

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """False after `close` and after any error."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when the peer has sent something or closed, while no thread receives; -1
        if there is none. A connection without a descriptor costs its owner a waiting thread.
        """
        return -1

    def has_unread(self) -> bool:
        """Return True if received bytes are buffered in the transport, where the descriptor does not show them."""
        return False

    def recv_arrived(self, part: memoryview) -> int:
        """Fill the beginning of `part` with what has arrived, without blocking, and return the number of bytes, 0 for
        none. Raises as `recv_into`. For stream transports with a descriptor. The default reads one byte per call.
        """
        poller = select.poll()
        poller.register(self.fileno(), select.POLLIN)
        if not poller.poll(0):
            return 0
        self.recv_into([part[:1]], Deadline(1.0))  # it has arrived
        return 1


class Listener(ABC):
    """Accepts peers on one rail. `accept` is for one thread at a time; `close` is thread-safe."""

    @abstractmethod
    def metadata(self) -> bytes:
        """Return how peers reach it: the transport's own bytes, at most 64 KiB."""

    @abstractmethod
    def accept(self, timeout_s: float) -> Connection | None:
        """Return the next connection, or None on timeout. Raises Closed."""

    @abstractmethod
    def close(self) -> None:
        """Stop listening; connections stay open. A second close is a no-op."""
