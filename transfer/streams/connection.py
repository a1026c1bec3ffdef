"""The Connection interface: ordered, bidirectional, blocking. One of the two families of plug-in; the other, one-sided one is agent.py.

`agent.py` makes any Connection into a TransferAgent.
"""

import math
import select
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

from kvstore.rpc.deadline import Deadline
from kvstore.transfer.agent import Rail


class Transport(Protocol):
    """What makes connections: a class of them, or an object that knows more than a class does."""

    transport: str

    def listen(self, rail: Rail) -> "Listener":
        """As Connection.listen."""

    def connect(self, metadata: bytes, rail: Rail, deadline: Deadline) -> "Connection":
        """As Connection.connect."""


class Connection(ABC):
    """One connection between two processes. One thread may send while another receives; `close` is for any thread.

    Both ends agree on the sizes: the parts that one side passes to `recv_into` are as long, one by one, as those that the other side
    passed to `send` (a part may be empty). So a stream and a fabric of messages can both be a Connection.

    Any error closes it, for its place in the sequence is lost: Unreachable (the peer or the network is gone), DeadlineExceeded,
    ProtocolError (a part of another size came, where the transport can tell), Closed (by this side).
    """

    transport: ClassVar[str]
    """Name of the transport; both ends use the same one."""
    stall_timeout_s: float = math.inf
    """Set by its owner: after this long without a byte moved, `send` and `recv_into` fail with Unreachable, though their deadline is
    further away. A transport that cannot see bytes move goes by whole parts."""

    @classmethod
    @abstractmethod
    def listen(cls, rail: Rail) -> "Listener":
        """Wait for peers on this rail. Raises ConfigError: the library is missing (saying which extra to install), or the address is
        not this machine's."""

    @classmethod
    @abstractmethod
    def connect(cls, metadata: bytes, rail: Rail, deadline: Deadline) -> "Connection":
        """Connect from this rail to the listener that described itself so. Raises ProtocolError (no listener of this kind made these
        bytes), Unreachable, DeadlineExceeded."""

    @abstractmethod
    def send(self, parts: Sequence[memoryview | bytes], deadline: Deadline) -> None:
        """Send all parts, in order. When it returns, the parts' memory may be changed; the peer need not have received them."""

    @abstractmethod
    def recv_into(self, parts: Sequence[memoryview], deadline: Deadline) -> None:
        """Fill all parts, in order. After an error nothing is written to them any more."""

    @abstractmethod
    def close(self) -> None:
        """Hang up at once: what is not sent yet is thrown away, and a `send` or `recv_into` in another thread ends with Closed.
        A second close is a no-op."""

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """False after `close`, and after any error."""

    def fileno(self) -> int:
        """A descriptor that can be read whenever the peer has sent something or hung up, for as long as nobody receives; -1 if the
        transport has none, and a connection then costs its owner a waiting thread."""
        return -1

    def has_unread(self) -> bool:
        """Whether something has arrived of which the descriptor does not tell any more: the transport has taken it already."""
        return False

    def recv_arrived(self, part: memoryview) -> int:
        """Fill the beginning of `part` with what has arrived, without waiting; how many bytes that was, 0 for none. Raises as
        `recv_into`. For transports with a descriptor, which are streams.

        The default takes one byte a call."""
        poller = select.poll()
        poller.register(self.fileno(), select.POLLIN)
        if not poller.poll(0):
            return 0
        self.recv_into([part[:1]], Deadline(1.0))  # it is there
        return 1


class Listener(ABC):
    """Waits for peers on one rail. `accept` is for one thread at a time, `close` for any."""

    @abstractmethod
    def metadata(self) -> bytes:
        """How peers reach it: the transport's own bytes, at most 64 KiB."""

    @abstractmethod
    def accept(self, timeout_s: float) -> Connection | None:
        """The next peer, or None when none has come in time. Raises Closed."""

    @abstractmethod
    def close(self) -> None:
        """Stop listening; connections stay. A second close is a no-op."""
