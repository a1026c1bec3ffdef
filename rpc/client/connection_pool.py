"""Connection pool of a blocking client: opens channels, leases them to threads, drops broken ones.

`pool_state.py` is the bookkeeping, without locks or sockets. `async_connection_pool.py` is the pool for asyncio.
"""

import threading
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from kvstore.protocol.errors import DeadlineExceeded, KVStoreError, TooManyConnections, Unavailable
from kvstore.protocol.session_messages import Hello
from kvstore.rpc.address import Address
from kvstore.rpc.busy_poll import BusyPoll
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.client.pool_state import ChannelPermit, Closable, PoolState, Waiter
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.descriptors import max_open_files
from kvstore.rpc.gil_contention import GilContention

if TYPE_CHECKING:
    from kvstore.security.tls.certificates import Certificates

Leased = TypeVar("Leased", bound=Closable, covariant=True)


class PoolSettings(Protocol):
    """Settings of a client that its pools use."""

    @property
    def max_channels(self) -> int: ...

    @property
    def idle_ttl_s(self) -> float: ...

    @property
    def connect_timeout_s(self) -> float: ...

    @property
    def peer_timeout_s(self) -> float: ...

    @property
    def busy_poll_us(self) -> int: ...


class ConnectionLease(Generic[Leased]):
    """Exclusive use of a channel until `release`, or the end of a `with` block."""

    __slots__ = ("_release", "channel", "reused")

    def __init__(self, channel: Leased, release: Callable[[Leased], None], *, reused: bool) -> None:
        self.channel = channel
        self.reused = reused
        """True if the channel was open before; the peer may have closed it since."""
        self._release: Callable[[Leased], None] | None = release

    def release(self, error: BaseException | None = None) -> None:
        """Return the channel to the pool. A second call is a no-op.

        The channel is closed first if its stream's position is unknown: within a call, or after a foreign `error` (an
        interrupt, a cancelled task).
        """
        release, self._release = self._release, None
        if release is not None:
            if not self.channel.is_settled or (error is not None and not isinstance(error, KVStoreError)):
                self.channel.close()
            release(self.channel)

    def discard(self) -> None:
        """Close the channel and release it: the peer frees the connection's state."""
        self.channel.close()
        self.release()

    def __enter__(self) -> "ConnectionLease[Leased]":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release(error)


def connect_deadline(deadline: Deadline, connect_timeout_s: float) -> Deadline:
    """Return the deadline of one connect, which leaves time for another address."""
    return deadline.part(min(deadline.left_s(), connect_timeout_s))


def connect_failed(error: DeadlineExceeded, address: Address, deadline: Deadline) -> KVStoreError:
    """Return the error of a connect that timed out: the operation's DeadlineExceeded, or Unavailable if it has time
    left.
    """
    try:
        deadline.left_s()
    except DeadlineExceeded:
        return error
    return Unavailable(f"{address} does not answer")


class ConnectionPool:
    """Pool of blocking channels. Thread-safe. New connections send `hello`, or that of `take`."""

    def __init__(
        self,
        hello: Hello,
        settings: PoolSettings,
        *,
        gil: GilContention | None = None,
        tls: "Certificates | None" = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._hello = hello
        self._tls = tls
        # The program keeps the other half of the descriptors.
        self._state: PoolState[Channel] = PoolState(
            max_channels=settings.max_channels, max_open=max_open_files() // 2, idle_ttl_s=settings.idle_ttl_s
        )
        self._settings = settings
        self._busy_poll = BusyPoll(settings.busy_poll_us, gil=gil)
        self._clock_ns = clock_ns
        self._lock = threading.Lock()

    def take(self, address: Address, deadline: Deadline, hello: Hello | None = None) -> ConnectionLease[Channel]:
        """Lease a channel to `address`, opening one if none is idle; waits in a queue while the limit is reached.

        A new channel sends `hello` if it is given. Raises Unavailable, DeadlineExceeded, Closed, or the peer's error.
        """
        while True:
            permit, channel = self._next(address, deadline)
            if channel is not None:
                return ConnectionLease(channel, partial(self.release, permit), reused=True)
            try:
                opened = self._open(address, deadline, hello or self._hello)
                self._state.opened(opened, permit)
            except TooManyConnections:
                with self._lock:
                    may_wait = self._state.open_refused(address, permit, self._clock_ns())
                if not may_wait:
                    raise
            except BaseException:
                with self._lock:
                    self._state.not_opened(address, permit)
                raise
            else:
                return ConnectionLease(opened, partial(self.release, permit), reused=False)

    def acquire_idle(self, address: Address) -> ConnectionLease[Channel] | None:
        """Lease an idle channel; None if there is none. Raises Closed."""
        borrowed = self.borrow(address)
        return self.lent(*borrowed) if borrowed is not None else None

    def borrow(self, address: Address) -> tuple[ChannelPermit, Channel] | None:
        """As `acquire_idle`, without a lease object: the caller calls `release`, or makes a lease with `lent`."""
        with self._lock:
            permit, channel = self._state.acquire(address, opens=False)
        return (permit, channel) if permit is not None and channel is not None else None

    def lent(self, permit: ChannelPermit, channel: Channel) -> ConnectionLease[Channel]:
        """Return a lease of a borrowed channel, after a failed call."""
        return ConnectionLease(channel, partial(self.release, permit), reused=True)

    def _next(self, address: Address, deadline: Deadline) -> tuple[ChannelPermit, Channel | None]:
        with self._lock:
            permit, channel = self._state.acquire(address)
        if permit is not None:
            return permit, channel
        waiter = _ThreadWaiter()
        try:
            while True:
                with self._lock:
                    permit, channel = self._state.acquire_or_queue(address, waiter)
                if permit is not None:
                    return permit, channel
                waiter.wait(deadline.left_s())
        finally:
            with self._lock:
                self._state.leave(address, waiter, self._clock_ns())

    def _open(self, address: Address, deadline: Deadline, hello: Hello) -> Channel:
        try:
            attempt = connect_deadline(deadline, self._settings.connect_timeout_s)
            return Channel.open(
                address, hello, attempt, peer_timeout_s=self._settings.peer_timeout_s, busy_poll=self._busy_poll, tls=self._tls
            )
        except DeadlineExceeded as error:
            raise connect_failed(error, address, deadline) from None

    def release(self, permit: ChannelPermit, channel: Channel) -> None:
        """Return a channel that is between calls, or closed."""
        with self._lock:
            self._state.release(channel, permit, self._clock_ns())

    def counts(self, address: Address) -> tuple[int, int]:
        """Return the number of leased and of idle channels to `address`."""
        with self._lock:
            return self._state.counts(address)

    def close(self) -> None:
        """Close idle channels now and leased ones on release; `take` then raises Closed. A second close is a no-op."""
        with self._lock:
            self._state.close()


class _ThreadWaiter(Waiter[Channel]):
    """A waiting thread. Uses a lock, because a Condition's wait, interrupted twice, returns without its lock."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._lock.acquire()

    def wake(self) -> None:
        if self._lock.locked():
            self._lock.release()

    def wait(self, timeout_s: float) -> None:
        """Wait for `wake`, at most `timeout_s`."""
        self._lock.acquire(timeout=timeout_s)
