"""Open channels of one process, shared out by address: the only place that opens them, says Hello and drops broken ones.

The last one given back is the first one taken (its buffers are warm, and the rest can grow old and be closed). `Shelf` is the
bookkeeping, without locks or sockets; `Pool` lends blocking channels to threads; `async_pool.py` lends to tasks.
"""

import os
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from kvstore.protocol.errors import Closed, DeadlineExceeded, KVStoreError, Unavailable
from kvstore.protocol.session_messages import Hello, Welcome
from kvstore.rpc.address import Address
from kvstore.rpc.busy_poll import BusyPoll
from kvstore.rpc.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.vanishing import PEER_TIMEOUT_S
from kvstore.security.tls.certificates import Certificates

_shelves: "weakref.WeakSet[Shelf[Any]]" = weakref.WeakSet()
"""All of this process, for a child that is forked from it."""


class Closable(Protocol):
    """What the bookkeeping needs of a channel."""

    address: Address
    is_open: bool
    welcome: Welcome

    @property
    def is_settled(self) -> bool:
        """Between calls: all that was begun has been sent, answered and read to its end."""

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

    def __enter__(self) -> "Loan[Lent]":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.give_back(error)


class Turn:
    """The right to one channel of an address. It ends when it is given back, or with the object: an interrupted caller, whom a signal
    can keep from giving back anything, drops it all the same, and the channel with it."""

    __slots__ = ("__weakref__",)


class _Endpoint(Generic[C]):
    """Of one address: channels idle, each with the time it was given back, and those lent (None: still to be opened), by turn."""

    __slots__ = ("idle", "lent")

    def __init__(self) -> None:
        self.idle: deque[tuple[int, C]] = deque()
        self.lent: dict[weakref.ref[Turn], C | None] = {}


class Shelf(Generic[C]):
    """Idle channels and those lent, by address. Not thread-safe; time is passed in."""

    def __init__(self, *, max_channels: int, idle_ttl_s: float) -> None:
        self._max_channels = max_channels
        self._idle_ttl_ns = int(idle_ttl_s * 1e9)
        self._endpoints: dict[Address, _Endpoint[C]] = {}
        self._next_sweep_ns = 0
        self.is_closed = False
        _shelves.add(self)

    def lend(self, address: Address, *, opens: bool = True) -> tuple[Turn | None, C | None]:
        """(None, None) when as many as allowed are lent, or none is idle and the caller `opens` none; else a turn, and the channel, None if
        the caller must open it.

        Raises Closed.
        """
        if self.is_closed:
            raise Closed("the client is closed")
        endpoint = self._endpoints.get(address)
        if endpoint is None:
            endpoint = self._endpoints[address] = _Endpoint()
        if len(endpoint.lent) >= self._max_channels or not (opens or endpoint.idle):
            return None, None
        turn, channel = Turn(), endpoint.idle.pop()[1] if endpoint.idle else None
        # The callback is the dictionary's own: no bytecode runs in it, so no signal handler does.
        endpoint.lent[weakref.ref(turn, endpoint.lent.pop)] = channel
        return turn, channel

    def opened(self, channel: C, turn: Turn) -> None:
        """The channel that `turn` lacked."""
        self._endpoints[channel.address].lent[weakref.ref(turn)] = channel

    def not_opened(self, address: Address, turn: Turn) -> None:
        """The channel of `turn` could not be opened."""
        self._endpoints[address].lent.pop(weakref.ref(turn), None)

    def give_back(self, channel: C, turn: Turn, now_ns: int) -> None:
        """Keep `channel` for the next, unless it broke."""
        endpoint = self._endpoints[channel.address]
        endpoint.lent.pop(weakref.ref(turn), None)
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

    def free(self, address: Address) -> int:
        """How many more channels to `address` may be lent now."""
        endpoint = self._endpoints.get(address)
        return self._max_channels - (0 if endpoint is None else len(endpoint.lent))

    def counts(self, address: Address) -> tuple[int, int]:
        """(lent, idle) channels to `address`."""
        endpoint = self._endpoints.get(address)
        return (0, 0) if endpoint is None else (len(endpoint.lent), len(endpoint.idle))

    def close(self) -> None:
        """Close the idle ones now and the lent ones when they come back."""
        self.is_closed = True
        for endpoint in self._endpoints.values():
            while endpoint.idle:
                endpoint.idle.pop()[1].close()

    def leave_to_parent(self) -> None:
        """In a forked child: close its copies of all connections. They are the parent's, and end with it alone."""
        self.is_closed = True
        for endpoint in self._endpoints.values():
            for channel in [*(channel for _, channel in endpoint.idle), *endpoint.lent.values()]:
                if channel is not None:
                    channel.close()


def _forked() -> None:
    # Without locks: a thread that is not here may have them.
    for shelf in list(_shelves):
        shelf.leave_to_parent()


os.register_at_fork(after_in_child=_forked)


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
    """Blocking channels for threads. Thread-safe. A connection introduces itself with `hello`, or as `take` says."""

    def __init__(
        self,
        hello: Hello,
        *,
        max_channels: int,
        idle_ttl_s: float,
        connect_timeout_s: float,
        peer_timeout_s: float = PEER_TIMEOUT_S,
        busy_poll_us: int = 0,
        tls: Certificates | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._hello = hello
        self._tls = tls
        self._shelf: Shelf[Channel] = Shelf(max_channels=max_channels, idle_ttl_s=idle_ttl_s)
        self._connect_timeout_s = connect_timeout_s
        self._peer_timeout_s = peer_timeout_s
        self._busy_poll = BusyPoll(busy_poll_us)
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._waiting: defaultdict[Address, dict[weakref.ref[threading.Lock], None]] = defaultdict(dict)
        """A lock for each taker that waits, first come first, released when its turn may have come. It leaves with its taker, however often
        that is interrupted. No Condition: its wait, interrupted twice, would leave without the lock."""

    def take(self, address: Address, deadline: Deadline, hello: Hello | None = None) -> Loan[Channel]:
        """Lend a channel to `address`, opening one if none is idle; waits while `max_channels` are lent. A new one says `hello`, where
        that is given.

        Raises Unavailable, DeadlineExceeded, Closed, or the peer's refusal.
        """
        turn, channel = self._next(address, deadline)
        if channel is not None:
            return Loan(channel, partial(self.give_back, turn), reused=True)
        try:
            opened = self._open(address, deadline, hello or self._hello)
            self._shelf.opened(opened, turn)
        except BaseException:
            with self._lock:
                self._shelf.not_opened(address, turn)
                self._wake(address)
            raise
        return Loan(opened, partial(self.give_back, turn), reused=False)

    def take_idle(self, address: Address) -> Loan[Channel] | None:
        """Lend a channel that is open already; None: there is none. Raises Closed."""
        borrowed = self.borrow(address)
        return self.lent(*borrowed) if borrowed is not None else None

    def borrow(self, address: Address) -> tuple[Turn, Channel] | None:
        """As `take_idle`, without the loan: the caller gives it back with `give_back`, or by a loan that `lent` makes of it."""
        with self._lock:
            turn, channel = self._shelf.lend(address, opens=False)
        return (turn, channel) if turn is not None and channel is not None else None

    def lent(self, turn: Turn, channel: Channel) -> Loan[Channel]:
        """What `borrow` gave, as a loan: of a call that came to no good end."""
        return Loan(channel, partial(self.give_back, turn), reused=True)

    def _next(self, address: Address, deadline: Deadline) -> tuple[Turn, Channel | None]:
        with self._lock:
            turn, channel = self._shelf.lend(address)
            if turn is not None:
                return turn, channel
            queue = self._waiting[address]
        given_back = threading.Lock()
        given_back.acquire()
        try:
            while True:
                with self._lock:
                    turn, channel = self._shelf.lend(address)
                    if turn is not None:
                        return turn, channel
                    # Who was overtaken keeps its place. The callback is the dictionary's own, as the shelf's is.
                    queue.setdefault(weakref.ref(given_back, queue.pop))
                given_back.acquire(timeout=deadline.left_s())
        finally:
            with self._lock:
                queue.pop(weakref.ref(given_back), None)
                self._wake(address)  # whose turn it is if this one was woken and does not go on

    def _wake(self, address: Address) -> None:
        """As many of those who wait for `address` as have a place there, and no others: a thousand of them, each woken at every return,
        would do nothing else. The caller has the lock."""
        queue = self._waiting.get(address)
        if queue:
            _release(list(islice(queue, self._shelf.free(address))))

    def _open(self, address: Address, deadline: Deadline, hello: Hello) -> Channel:
        try:
            attempt = connect_deadline(deadline, self._connect_timeout_s)
            return Channel.open(address, hello, attempt, peer_timeout_s=self._peer_timeout_s, busy_poll=self._busy_poll, tls=self._tls)
        except DeadlineExceeded as error:
            raise connect_failed(error, address, deadline) from None

    def give_back(self, turn: Turn, channel: Channel) -> None:
        """The channel is between calls, or closed."""
        with self._lock:
            self._shelf.give_back(channel, turn, self._clock_ns())
            self._wake(channel.address)

    def counts(self, address: Address) -> tuple[int, int]:
        """(lent, idle) channels to `address`."""
        with self._lock:
            return self._shelf.counts(address)

    def close(self) -> None:
        """Hang up on everyone; lent channels close when they come back, and `take` raises Closed. A second close is a no-op."""
        with self._lock:
            self._shelf.close()
            for queue in self._waiting.values():
                _release(list(queue))


def _release(waiting: "list[weakref.ref[threading.Lock]]") -> None:
    for reference in waiting:
        given_back = reference()
        if given_back is not None and given_back.locked():
            given_back.release()
