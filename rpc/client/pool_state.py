"""Bookkeeping of a pool of channels: which are idle, which are lent, and which callers wait, by address. Sans-I/O.

The channel given back last is lent first: its buffers are warm, and the others grow old and are closed. A caller may take a channel past
those that wait ("barging"): a hand-over to a waiting thread costs a wake-up and a GIL switch, and strict first-in, first-out order costs
nine tenths of the throughput. So that no caller starves, a channel given back goes straight to the caller that has waited longest, once per
HANDOVER_INTERVAL_NS and address (as the "eventual fairness" of WebKit's and Rust's parking lots).
"""

import os
import weakref
from abc import ABC, abstractmethod
from collections import deque
from itertools import islice
from typing import Any, Final, Generic, Protocol, TypeVar

from kvstore.protocol.errors import Closed
from kvstore.protocol.session_messages import Welcome
from kvstore.rpc.address import Address

HANDOVER_INTERVAL_NS: Final = 1_000_000
"""Between two hand-overs. The longest wait is about this long times the number of callers that wait."""
MIN_CHANNELS: Final = 4
"""To one address, however many are open to others: an operation that holds one channel may need another to go on."""
RETRY_NS: Final = 1_000_000_000
"""No further channel is opened for so long to an address where one could not be."""

_shelves: "weakref.WeakSet[PoolState[Any]]" = weakref.WeakSet()
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


class ChannelTurn:
    """The right to one channel of an address. It ends when it is given back, or with the object: an interrupted caller, whom a signal
    can keep from giving back anything, drops it all the same, and the channel with it."""

    __slots__ = ("__weakref__",)


class Waiter(ABC, Generic[C]):
    """A caller that waits for a channel. The caller alone owns it: an interrupted caller leaves the queue with the object."""

    __slots__ = ("__weakref__", "channel", "turn")

    def __init__(self) -> None:
        self.turn: ChannelTurn | None = None
        """With `channel`: handed over, and not taken yet."""
        self.channel: C | None = None

    @abstractmethod
    def wake(self) -> None:
        """Have the caller look again. A second call before it has looked is a no-op."""


class _Endpoint(Generic[C]):
    """Channels to one address: idle ones with the time they were given back, lent ones by turn (None: being opened), and who waits."""

    __slots__ = ("handover_ns", "idle", "lent", "max_channels", "retry_ns", "waiting")

    def __init__(self, max_channels: int) -> None:
        self.idle: deque[tuple[int, C]] = deque()
        self.lent: dict[weakref.ref[ChannelTurn], C | None] = {}
        self.waiting: dict[weakref.ref[Waiter[C]], None] = {}
        """Longest first."""
        self.max_channels = max_channels
        """Fewer than the pool's for a while after the process or the peer had no descriptor for another."""
        self.retry_ns = 0
        """When `max_channels` grows again; 0: it is the pool's."""
        self.handover_ns = 0
        """The last hand-over."""


class PoolState(Generic[C]):
    """See the module. Not thread-safe; time is passed in."""

    def __init__(self, *, max_channels: int, max_open: int, idle_ttl_s: float) -> None:
        """At most `max_channels` to one address; `max_open` to all, but for MIN_CHANNELS to each."""
        self._max_channels = max_channels
        self._max_open = max_open
        self._idle_ttl_ns = int(idle_ttl_s * 1e9)
        self._endpoints: dict[Address, _Endpoint[C]] = {}
        self._next_sweep_ns = 0
        self.is_closed = False
        _shelves.add(self)

    # --- lending ---

    def lend(self, address: Address, *, opens: bool = True) -> tuple[ChannelTurn | None, C | None]:
        """A turn and its channel, None if the caller must open it. (None, None): the limit is reached, or no channel is idle and the caller
        `opens` none.

        Raises Closed.
        """
        if self.is_closed:
            raise Closed("the client is closed")
        endpoint = self._endpoints.get(address) or self._endpoint(address)
        if endpoint.idle:
            channel: C | None = endpoint.idle.pop()[1]
        elif opens and len(endpoint.lent) < self._limit(endpoint):
            self._keep_within_max_open(endpoint)
            channel = None
        else:
            return None, None
        return self._lent(endpoint, channel), channel

    def lend_or_queue(self, address: Address, waiter: Waiter[C]) -> tuple[ChannelTurn | None, C | None]:
        """As `lend`. (None, None): `waiter` waits at the place that it has, and looks again once it is woken; `leave` has to follow."""
        if waiter.turn is not None:
            handed, waiter.turn = (waiter.turn, waiter.channel), None
            waiter.channel = None
            return handed
        turn, channel = self.lend(address)
        if turn is None:
            waiting = self._endpoint(address).waiting
            # The callback is the dictionary's own: no bytecode runs in it, so no signal handler does.
            waiting.setdefault(weakref.ref(waiter, waiting.pop))
        return turn, channel

    def leave(self, address: Address, waiter: Waiter[C], now_ns: int) -> None:
        """It waits no more, with a channel or without: whichever it was handed and has not taken is the next one's."""
        endpoint = self._endpoint(address)
        endpoint.waiting.pop(weakref.ref(waiter), None)
        turn, channel, waiter.turn, waiter.channel = waiter.turn, waiter.channel, None, None
        if turn is not None and channel is not None:
            self.give_back(channel, turn, now_ns)
        self._wake(endpoint)

    def opened(self, channel: C, turn: ChannelTurn) -> None:
        """The channel that `turn` lacked."""
        self._endpoints[channel.address].lent[weakref.ref(turn)] = channel

    def not_opened(self, address: Address, turn: ChannelTurn) -> None:
        """The channel of `turn` could not be opened."""
        endpoint = self._endpoints[address]
        endpoint.lent.pop(weakref.ref(turn), None)
        self._wake(endpoint)

    def exhausted(self, address: Address, turn: ChannelTurn, now_ns: int) -> bool:
        """As `not_opened`, for want of a descriptor at either end. True: others have channels to this address, for one of which the caller
        may wait; no more are opened for RETRY_NS. False: there is none to wait for."""
        endpoint = self._endpoints[address]
        endpoint.lent.pop(weakref.ref(turn), None)
        count = len(endpoint.idle) + len(endpoint.lent)
        if count:
            endpoint.max_channels, endpoint.retry_ns = count, now_ns + RETRY_NS
        self._wake(endpoint)
        return count > 0

    def give_back(self, channel: C, turn: ChannelTurn, now_ns: int) -> None:
        """Hand `channel` over if the longest wait is due its turn, else keep it for the next caller; drop it if it broke."""
        endpoint = self._endpoints[channel.address]
        endpoint.lent.pop(weakref.ref(turn), None)
        if self.is_closed:
            channel.close()
        elif channel.is_open and not (endpoint.waiting and self._hand_over(endpoint, channel, now_ns)):
            endpoint.idle.append((now_ns, channel))
        if endpoint.retry_ns and now_ns >= endpoint.retry_ns:
            self._retry(endpoint, now_ns)
        if now_ns >= self._next_sweep_ns:
            self._sweep(now_ns)
        if endpoint.waiting:
            self._wake(endpoint)

    # --- limits and turns ---

    def _endpoint(self, address: Address) -> _Endpoint[C]:
        endpoint = self._endpoints.get(address)
        if endpoint is None:
            endpoint = self._endpoints[address] = _Endpoint(self._max_channels)
        return endpoint

    def _lent(self, endpoint: _Endpoint[C], channel: C | None) -> ChannelTurn:
        turn = ChannelTurn()
        endpoint.lent[weakref.ref(turn, endpoint.lent.pop)] = channel  # as the callback of `lend_or_queue`
        return turn

    def _limit(self, endpoint: _Endpoint[C]) -> int:
        """Channels that may be open to this address: the idle ones to others can be closed, the lent ones cannot."""
        elsewhere = sum(len(each.lent) for each in self._endpoints.values()) - len(endpoint.lent)
        return min(endpoint.max_channels, max(MIN_CHANNELS, self._max_open - elsewhere))

    def _keep_within_max_open(self, endpoint: _Endpoint[C]) -> None:
        """Close idle channels to other addresses, the oldest first, for one that is about to be opened."""
        endpoints = self._endpoints.values()
        excess = 1 + sum(len(each.lent) + len(each.idle) for each in endpoints) - self._max_open
        while excess > 0 and (others := [each for each in endpoints if each is not endpoint and each.idle]):
            min(others, key=lambda each: each.idle[0][0]).idle.popleft()[1].close()
            excess -= 1

    def _retry(self, endpoint: _Endpoint[C], now_ns: int) -> None:
        """Let twice as many channels be opened as there were when no further one could be: all at once would be refused at once."""
        endpoint.max_channels = min(2 * endpoint.max_channels, self._max_channels)
        endpoint.retry_ns = now_ns + RETRY_NS if endpoint.max_channels < self._max_channels else 0

    def _hand_over(self, endpoint: _Endpoint[C], channel: C, now_ns: int) -> bool:
        """Whether the channel is now that of the caller which has waited longest, once per HANDOVER_INTERVAL_NS."""
        if now_ns - endpoint.handover_ns < HANDOVER_INTERVAL_NS:
            return False
        is_owed = False
        for waiter in _callers(endpoint.waiting, 1):
            is_owed = waiter.turn is None
            if is_owed:
                endpoint.handover_ns = now_ns
                waiter.channel = channel
                waiter.turn = self._lent(endpoint, channel)
            # Woken before it leaves the queue: if a signal handler raises in between, the next return finds it there.
            waiter.wake()
            endpoint.waiting.pop(weakref.ref(waiter), None)
        return is_owed

    def _wake(self, endpoint: _Endpoint[C]) -> None:
        """Wake as many of those that wait as may have a channel. A thousand callers, all woken at every return, would do nothing else."""
        for waiter in _callers(endpoint.waiting, self._free(endpoint)):
            waiter.wake()

    def _free(self, endpoint: _Endpoint[C]) -> int:
        """Channels that may be lent now, idle or to be opened."""
        idle = len(endpoint.idle)
        return idle + max(0, self._limit(endpoint) - idle - len(endpoint.lent))

    # --- the rest ---

    def _sweep(self, now_ns: int) -> None:
        """Close what nobody needed for the time to live; the next sweep is half of it away."""
        self._next_sweep_ns = now_ns + self._idle_ttl_ns // 2
        for endpoint in self._endpoints.values():
            while endpoint.idle and endpoint.idle[0][0] <= now_ns - self._idle_ttl_ns:
                endpoint.idle.popleft()[1].close()

    def counts(self, address: Address) -> tuple[int, int]:
        """(lent, idle) channels to `address`."""
        endpoint = self._endpoints.get(address)
        return (0, 0) if endpoint is None else (len(endpoint.lent), len(endpoint.idle))

    def waiting(self, address: Address) -> int:
        """Callers that wait for a channel to `address`."""
        endpoint = self._endpoints.get(address)
        return 0 if endpoint is None else len(endpoint.waiting)

    def close(self) -> None:
        """Close the idle channels now and the lent ones when they come back; callers that wait are woken."""
        self.is_closed = True
        for endpoint in self._endpoints.values():
            while endpoint.idle:
                endpoint.idle.pop()[1].close()
            for waiter in _callers(endpoint.waiting, len(endpoint.waiting)):
                waiter.wake()

    def leave_to_parent(self) -> None:
        """In a forked child: close its copies of all connections. They are the parent's, and end with it alone."""
        self.is_closed = True
        for endpoint in self._endpoints.values():
            for channel in [*(channel for _, channel in endpoint.idle), *filter(None, endpoint.lent.values())]:
                channel.close()


def _callers(waiting: dict[weakref.ref[Waiter[C]], None], count: int) -> list[Waiter[C]]:
    """The first that wait. They may drop themselves from the queue meanwhile."""
    return [waiter for reference in list(islice(waiting, count)) if (waiter := reference()) is not None]


def leave_all_to_parent() -> None:
    """In a forked child. Without locks: a thread that is not here may have them."""
    for shelf in list(_shelves):
        shelf.leave_to_parent()


os.register_at_fork(after_in_child=leave_all_to_parent)
