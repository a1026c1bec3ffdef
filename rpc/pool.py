"""Open channels of one process, shared out by address: the only place that opens them, says Hello and drops broken ones.

The last one given back is the first one taken (its buffers are warm, and the rest can grow old and be closed). `Shelf` is the
bookkeeping, without locks or sockets; `Pool` lends blocking channels to threads; `async_pool.py` lends to tasks.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from kvstore.protocol.errors import Closed, DeadlineExceeded, KVStoreError, Unavailable
from kvstore.protocol.session_messages import Hello, Welcome
from kvstore.rpc.address import Address
from kvstore.rpc.channel import Channel
from kvstore.rpc.deadline import Deadline


class Closable(Protocol):
    """What the bookkeeping needs of a channel."""

    address: Address
    is_open: bool
    welcome: Welcome

    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)
Lent = TypeVar("Lent", bound=Closable, covariant=True)


class Loan(Generic[Lent]):
    """A channel in one caller's hands until `give_back`, or the end of a `with` block."""

    __slots__ = ("_give_back", "channel", "reused")

    def __init__(self, channel: Lent, give_back: Callable[[Lent], None], *, reused: bool) -> None:
        self.channel = channel
        self.reused = reused
        """It was open before: the peer may have gone since."""
        self._give_back: Callable[[Lent], None] | None = give_back

    def give_back(self, error: BaseException | None = None) -> None:
        """After an `error` that is not kvstore's own (an interrupt, a cancelled task) the channel is closed first: its stream may be
        anywhere. A second call is a no-op."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            if error is not None and not isinstance(error, KVStoreError):
                self.channel.close()
            give_back(self.channel)

    def discard(self) -> None:
        """Hang up and give back: the peer then frees what it held for this connection."""
        self.channel.close()
        self.give_back()

    def __enter__(self) -> "Loan[Lent]":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.give_back(error)


class _Endpoint(Generic[C]):
    """Of one address: channels idle, each with the time it was given back, and the number lent."""

    __slots__ = ("idle", "lent")

    def __init__(self) -> None:
        self.idle: deque[tuple[int, C]] = deque()
        self.lent = 0


class Shelf(Generic[C]):
    """Idle channels and the number lent, by address. Not thread-safe; time is passed in."""

    def __init__(self, *, max_channels: int, idle_ttl_s: float) -> None:
        self._max_channels = max_channels
        self._idle_ttl_ns = int(idle_ttl_s * 1e9)
        self._endpoints: dict[Address, _Endpoint[C]] = {}
        self._next_sweep_ns = 0
        self.is_closed = False

    def lend(self, address: Address) -> tuple[bool, C | None]:
        """(False, None) when as many as allowed are lent; else count one more and return it, None if the caller must open it.

        Raises Closed.
        """
        if self.is_closed:
            raise Closed("the client is closed")
        endpoint = self._endpoints.get(address)
        if endpoint is None:
            endpoint = self._endpoints[address] = _Endpoint()
        if endpoint.lent >= self._max_channels:
            return False, None
        endpoint.lent += 1
        return True, endpoint.idle.pop()[1] if endpoint.idle else None

    def not_opened(self, address: Address) -> None:
        """One counted as lent could not be opened."""
        self._endpoints[address].lent -= 1

    def give_back(self, channel: C, now_ns: int) -> None:
        """Keep `channel` for the next, unless it broke."""
        endpoint = self._endpoints[channel.address]
        endpoint.lent -= 1
        if self.is_closed:
            channel.close()
        elif channel.is_open:
            endpoint.idle.append((now_ns, channel))
        if now_ns >= self._next_sweep_ns:
            self._sweep(now_ns)

    def _sweep(self, now_ns: int) -> None:
        """Close what nobody needed for the time to live; the next sweep is half of it away."""
        self._next_sweep_ns = now_ns + self._idle_ttl_ns // 2
        for endpoint in self._endpoints.values():
            while endpoint.idle and endpoint.idle[0][0] <= now_ns - self._idle_ttl_ns:
                endpoint.idle.popleft()[1].close()

    def counts(self, address: Address) -> tuple[int, int]:
        """(lent, idle) channels to `address`."""
        endpoint = self._endpoints.get(address)
        return (0, 0) if endpoint is None else (endpoint.lent, len(endpoint.idle))

    def close(self) -> None:
        """Close the idle ones now and the lent ones when they come back."""
        self.is_closed = True
        for endpoint in self._endpoints.values():
            while endpoint.idle:
                endpoint.idle.pop()[1].close()


def connect_deadline(deadline: Deadline, connect_timeout_s: float) -> Deadline:
    """For one attempt to connect: a dead address must leave time for another one."""
    return Deadline(min(deadline.left_s(), connect_timeout_s))


def connect_failed(error: DeadlineExceeded, address: Address, deadline: Deadline) -> KVStoreError:
    """What an attempt that ran out of time means: the operation's end, or an address that does not answer."""
    try:
        deadline.left_s()
    except DeadlineExceeded:
        return error
    return Unavailable(f"{address} does not answer")


class Pool:
    """Blocking channels for threads. Thread-safe. Every connection introduces itself with the same `hello`."""

    def __init__(
        self,
        hello: Hello,
        *,
        max_channels: int,
        idle_ttl_s: float,
        connect_timeout_s: float,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._hello = hello
        self._shelf: Shelf[Channel] = Shelf(max_channels=max_channels, idle_ttl_s=idle_ttl_s)
        self._connect_timeout_s = connect_timeout_s
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._given_back = threading.Condition(self._lock)
        self._waiting = 0

    def take(self, address: Address, deadline: Deadline) -> Loan[Channel]:
        """Lend a channel to `address`, opening one if none is idle; waits while `max_channels` are lent.

        Raises Unavailable, DeadlineExceeded, Closed, or the peer's refusal.
        """
        with self._lock:
            is_lent, channel = self._shelf.lend(address)
            while not is_lent:
                self._wait(deadline)
                is_lent, channel = self._shelf.lend(address)
        if channel is not None:
            return Loan(channel, self._give_back, reused=True)
        try:
            return Loan(self._open(address, deadline), self._give_back, reused=False)
        except BaseException:
            with self._lock:
                self._shelf.not_opened(address)
                self._given_back.notify()
            raise

    def _wait(self, deadline: Deadline) -> None:
        self._waiting += 1
        try:
            self._given_back.wait(deadline.left_s())
        finally:
            self._waiting -= 1

    def _open(self, address: Address, deadline: Deadline) -> Channel:
        try:
            return Channel.open(address, self._hello, connect_deadline(deadline, self._connect_timeout_s))
        except DeadlineExceeded as error:
            raise connect_failed(error, address, deadline) from None

    def _give_back(self, channel: Channel) -> None:
        with self._lock:
            self._shelf.give_back(channel, self._clock_ns())
            if self._waiting:
                self._given_back.notify_all()

    def counts(self, address: Address) -> tuple[int, int]:
        """(lent, idle) channels to `address`."""
        with self._lock:
            return self._shelf.counts(address)

    def close(self) -> None:
        """Hang up on everyone; lent channels close when they come back, and `take` raises Closed. A second close is a no-op."""
        with self._lock:
            self._shelf.close()
            self._given_back.notify_all()
