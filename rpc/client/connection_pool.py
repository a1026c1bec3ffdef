"""Connection pool of a blocking client: the only place that opens its channels, says Hello and drops broken ones.

`pool_state.py` is the bookkeeping, without locks or sockets; `ConnectionPool` lends blocking channels to threads;
`async_connection_pool.py` lends
to tasks.
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
from kvstore.rpc.client.pool_state import ChannelTurn, Closable, PoolState, Waiter
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.descriptors import max_open_files
from kvstore.rpc.gil_contention import GilContention

if TYPE_CHECKING:
    from kvstore.security.tls.certificates import Certificates

Lent = TypeVar("Lent", bound=Closable, covariant=True)


class PoolSettings(Protocol):
    """Settings of a client that its pools are held to."""

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


class ConnectionLease(Generic[Lent]):
    """A channel in one caller's hands until `give_back`, or the end of a `with` block."""

    __slots__ = ("_give_back", "channel", "reused")

    def __init__(self, channel: Lent, give_back: Callable[[Lent], None], *, reused: bool) -> None:
        self.channel = channel
        self.reused = reused
        """It was open before: the peer may have gone since."""
        self._give_back: Callable[[Lent], None] | None = give_back

    def give_back(self, error: BaseException | None = None) -> None:
        """The channel is closed first when its stream may be anywhere: within a call, or after an `error` that is not kvstore's own (an
        interrupt, a cancelled task). A second call is a no-op."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            if not self.channel.is_settled or (error is not None and not isinstance(error, KVStoreError)):
                self.channel.close()
            give_back(self.channel)

    def discard(self) -> None:
        """Hang up and give back: the peer then frees what it held for this connection."""
        self.channel.close()
        self.give_back()

    def __enter__(self) -> "ConnectionLease[Lent]":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.give_back(error)


def connect_deadline(deadline: Deadline, connect_timeout_s: float) -> Deadline:
    """For one attempt to connect: a dead address must leave time for another one."""
    return deadline.part(min(deadline.left_s(), connect_timeout_s))


def connect_failed(error: DeadlineExceeded, address: Address, deadline: Deadline) -> KVStoreError:
    """What an attempt that ran out of time means: the operation's end, or an address that does not answer."""
    try:
        deadline.left_s()
    except DeadlineExceeded:
        return error
    return Unavailable(f"{address} does not answer")


class ConnectionPool:
    """Blocking channels for threads. Thread-safe. A connection introduces itself with `hello`, or as `take` says."""

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
        # The other half of the descriptors are the program's.
        self._shelf: PoolState[Channel] = PoolState(
            max_channels=settings.max_channels, max_open=max_open_files() // 2, idle_ttl_s=settings.idle_ttl_s
        )
        self._settings = settings
        self._busy_poll = BusyPoll(settings.busy_poll_us, gil=gil)
        self._clock_ns = clock_ns
        self._lock = threading.Lock()

    def take(self, address: Address, deadline: Deadline, hello: Hello | None = None) -> ConnectionLease[Channel]:
        """Lend a channel to `address`, opening one if none is idle; waits in turn while no more may be open. A new one says `hello`, where
        that is given.

        Raises Unavailable, DeadlineExceeded, Closed, or the peer's refusal.
        """
        while True:
            turn, channel = self._next(address, deadline)
            if channel is not None:
                return ConnectionLease(channel, partial(self.give_back, turn), reused=True)
            try:
                opened = self._open(address, deadline, hello or self._hello)
                self._shelf.opened(opened, turn)
            except TooManyConnections:
                with self._lock:
                    may_wait = self._shelf.exhausted(address, turn, self._clock_ns())
                if not may_wait:
                    raise
            except BaseException:
                with self._lock:
                    self._shelf.not_opened(address, turn)
                raise
            else:
                return ConnectionLease(opened, partial(self.give_back, turn), reused=False)

    def take_idle(self, address: Address) -> ConnectionLease[Channel] | None:
        """Lend a channel that is open already; None: there is none. Raises Closed."""
        borrowed = self.borrow(address)
        return self.lent(*borrowed) if borrowed is not None else None

    def borrow(self, address: Address) -> tuple[ChannelTurn, Channel] | None:
        """As `take_idle`, without the loan: the caller gives it back with `give_back`, or by a loan that `lent` makes of it."""
        with self._lock:
            turn, channel = self._shelf.lend(address, opens=False)
        return (turn, channel) if turn is not None and channel is not None else None

    def lent(self, turn: ChannelTurn, channel: Channel) -> ConnectionLease[Channel]:
        """What `borrow` gave, as a loan: of a call that came to no good end."""
        return ConnectionLease(channel, partial(self.give_back, turn), reused=True)

    def _next(self, address: Address, deadline: Deadline) -> tuple[ChannelTurn, Channel | None]:
        with self._lock:
            turn, channel = self._shelf.lend(address)
        if turn is not None:
            return turn, channel
        waiter = _ThreadWaiter()
        try:
            while True:
                with self._lock:
                    turn, channel = self._shelf.lend_or_queue(address, waiter)
                if turn is not None:
                    return turn, channel
                waiter.wait(deadline.left_s())
        finally:
            with self._lock:
                self._shelf.leave(address, waiter, self._clock_ns())

    def _open(self, address: Address, deadline: Deadline, hello: Hello) -> Channel:
        try:
            attempt = connect_deadline(deadline, self._settings.connect_timeout_s)
            return Channel.open(
                address, hello, attempt, peer_timeout_s=self._settings.peer_timeout_s, busy_poll=self._busy_poll, tls=self._tls
            )
        except DeadlineExceeded as error:
            raise connect_failed(error, address, deadline) from None

    def give_back(self, turn: ChannelTurn, channel: Channel) -> None:
        """The channel is between calls, or closed."""
        with self._lock:
            self._shelf.give_back(channel, turn, self._clock_ns())

    def counts(self, address: Address) -> tuple[int, int]:
        """(lent, idle) channels to `address`."""
        with self._lock:
            return self._shelf.counts(address)

    def close(self) -> None:
        """Hang up on everyone; lent channels close when they come back, and `take` raises Closed. A second close is a no-op."""
        with self._lock:
            self._shelf.close()


class _ThreadWaiter(Waiter[Channel]):
    """A thread that waits. By a lock, not a Condition, whose wait, interrupted twice, would leave without the lock."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._lock.acquire()

    def wake(self) -> None:
        if self._lock.locked():
            self._lock.release()

    def wait(self, timeout_s: float) -> None:
        """Until it is woken, `timeout_s` at most."""
        self._lock.acquire(timeout=timeout_s)
