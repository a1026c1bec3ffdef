"""Bookkeeping of a connection pool: idle and leased channels and waiting callers, by address. Sans-I/O.

The channel released last is leased first: its buffers are warm, and the others age and are closed. A caller may
overtake waiting ones ("barging"), because a hand-over to a waiting thread costs a wake-up and a GIL switch; strict FIFO
order costs 90 % of the throughput. Against starvation, a released channel goes to the longest waiting caller once per
HANDOVER_INTERVAL_NS and address ("eventual fairness", as in WebKit's and Rust's parking lots).
"""

import os
import weakref
from abc import ABC, abstractmethod
from collections import deque
from itertools import islice
from typing import Any, Final, Generic, Protocol, TypeVar

from kvstore.protocol.errors import Closed, KVStoreError
from kvstore.protocol.session_messages import Welcome
from kvstore.rpc.address import Address

HANDOVER_INTERVAL_NS: Final = 1_000_000
"""Time between two hand-overs. The longest wait is about this times the number of waiting callers."""
MIN_CHANNELS: Final = 4
"""Channels always allowed to one address: an operation that holds one may need another to continue.
"""
RETRY_NS: Final = 1_000_000_000
"""Pause before another channel is opened to an address that had no descriptor for one."""

_pools: "weakref.WeakSet[PoolState[Any]]" = weakref.WeakSet()
"""All pools of this process, for a forked child."""


class Closable(Protocol):
    """Part of a channel that the bookkeeping uses."""

    address: Address
    is_open: bool
    welcome: Welcome

    @property
    def is_settled(self) -> bool:
        """True if no call is in progress and no payload is unread."""

    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)


class ChannelPermit:
    """Right to one channel of an address, until it is released or garbage-collected.

    A caller interrupted by a signal may never release it, but drops the reference, and with it the channel.
    """

    __slots__ = ("__weakref__",)


class Waiter(ABC, Generic[C]):
    """A caller that waits for a channel.

    Only the caller refers to it, so that an interrupted caller leaves the queue.
    """

    __slots__ = ("__weakref__", "channel", "error", "permit")

    def __init__(self) -> None:
        self.permit: ChannelPermit | None = None
        """With `channel`: handed over, not taken yet."""
        self.channel: C | None = None
        self.error: KVStoreError | None = None
        """Failure of another caller's connect, while no channel to the address is open."""

    @abstractmethod
    def wake(self) -> None:
        """Have the caller retry. A second call before it retries is a no-op."""


class _Endpoint(Generic[C]):
    """Channels to one address: idle ones with their time of release, leased ones by permit (None: being opened),
    waiting callers.
    """

    __slots__ = ("handover_ns", "idle", "lent", "max_channels", "retry_ns", "waiting")

    def __init__(self, max_channels: int) -> None:
        self.idle: deque[tuple[int, C]] = deque()
        self.lent: dict[weakref.ref[ChannelPermit], C | None] = {}
        self.waiting: dict[weakref.ref[Waiter[C]], None] = {}
        """Longest waiting first."""
        self.max_channels = max_channels
        """Less than the pool's for a while after the process or the peer ran out of descriptors."""
        self.retry_ns = 0
        """Time when `max_channels` grows; 0: it is the pool's."""
        self.handover_ns = 0
        """Time of the last hand-over."""


class PoolState(Generic[C]):
    """State of a pool. Not thread-safe; time is passed in."""

    def __init__(self, *, max_channels: int, max_open: int, idle_ttl_s: float, max_opening: int | None = None) -> None:
        """At most `max_channels` to one address, and `max_open` to all, but always MIN_CHANNELS to each. At most
        `max_opening` of an address are being opened at a time (None: no limit)."""
        self._max_channels = max_channels
        self._max_open = max_open
        self._max_opening = max_opening
        self._idle_ttl_ns = int(idle_ttl_s * 1e9)
        self._endpoints: dict[Address, _Endpoint[C]] = {}
        self._next_sweep_ns = 0
        self.is_closed = False
        _pools.add(self)

    # --- leasing ---

    def acquire(self, address: Address, *, opens: bool = True) -> tuple[ChannelPermit | None, C | None]:
        """Return a permit and its channel, None if the caller must open it.

        (None, None): the limit is reached, or no channel is idle and `opens` is False. Raises Closed.
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

    def acquire_or_queue(self, address: Address, waiter: Waiter[C]) -> tuple[ChannelPermit | None, C | None]:
        """As `acquire`. (None, None): `waiter` is queued, or keeps its position; call again once woken, and `leave` at
        the end. Raises the error of `not_opened` that the waiter shares.
        """
        if waiter.error is not None:
            raise type(waiter.error)(*waiter.error.args)
        if waiter.permit is not None:
            handed, waiter.permit = (waiter.permit, waiter.channel), None
            waiter.channel = None
            return handed
        permit, channel = self.acquire(address)
        if permit is None:
            waiting = self._endpoint(address).waiting
            # The callback is the dictionary's method: no bytecode runs in it, so no signal handler can.
            waiting.setdefault(weakref.ref(waiter, waiting.pop))
        return permit, channel

    def leave(self, address: Address, waiter: Waiter[C], now_ns: int) -> None:
        """Remove `waiter` from the queue. A channel that was handed to it and not taken goes to the next caller."""
        endpoint = self._endpoint(address)
        endpoint.waiting.pop(weakref.ref(waiter), None)
        permit, channel, waiter.permit, waiter.channel = waiter.permit, waiter.channel, None, None
        if permit is not None and channel is not None:
            self.release(channel, permit, now_ns)
        self._wake(endpoint)

    def opened(self, channel: C, permit: ChannelPermit) -> None:
        """Record the channel that the caller opened for `permit`."""
        endpoint = self._endpoints[channel.address]
        endpoint.lent[weakref.ref(permit)] = channel
        if self._max_opening is not None:
            self._wake(endpoint)

    def not_opened(self, address: Address, permit: ChannelPermit, error: KVStoreError | None = None) -> None:
        """Record that the channel of `permit` could not be opened.

        With `error` the peer did not answer: unless a channel to it is open, waiting callers fail likewise. In turn,
        each would wait for a timeout of its own.
        """
        endpoint = self._endpoints[address]
        endpoint.lent.pop(weakref.ref(permit), None)
        if error is None or endpoint.idle or len(endpoint.lent) > _opening(endpoint):
            self._wake(endpoint)
            return
        for waiter in _callers(endpoint.waiting, len(endpoint.waiting)):
            waiter.error = error
            waiter.wake()

    def open_refused(self, address: Address, permit: ChannelPermit, now_ns: int) -> bool:
        """As `not_opened`, for lack of descriptors at either end.

        True: the caller may wait for another channel to this address, and no more are opened for RETRY_NS. False: there
        is none.
        """
        endpoint = self._endpoints[address]
        endpoint.lent.pop(weakref.ref(permit), None)
        count = len(endpoint.idle) + len(endpoint.lent)
        if count:
            endpoint.max_channels, endpoint.retry_ns = count, now_ns + RETRY_NS
        self._wake(endpoint)
        return count > 0

    def release(self, channel: C, permit: ChannelPermit, now_ns: int) -> None:
        """Return a channel: hand it over to the longest waiting caller if one is due, else keep it idle; drop a closed
        one.
        """
        endpoint = self._endpoints[channel.address]
        endpoint.lent.pop(weakref.ref(permit), None)
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

    # --- limits and hand-overs ---

    def _endpoint(self, address: Address) -> _Endpoint[C]:
        endpoint = self._endpoints.get(address)
        if endpoint is None:
            endpoint = self._endpoints[address] = _Endpoint(self._max_channels)
        return endpoint

    def _lent(self, endpoint: _Endpoint[C], channel: C | None) -> ChannelPermit:
        permit = ChannelPermit()
        endpoint.lent[weakref.ref(permit, endpoint.lent.pop)] = channel  # as the callback of `acquire_or_queue`
        return permit

    def _limit(self, endpoint: _Endpoint[C]) -> int:
        """Return how many channels may be open to this address: idle ones to others can be closed, leased ones cannot."""
        elsewhere = sum(len(each.lent) for each in self._endpoints.values()) - len(endpoint.lent)
        limit = min(endpoint.max_channels, max(MIN_CHANNELS, self._max_open - elsewhere))
        if self._max_opening is None:
            return limit
        return min(limit, len(endpoint.lent) - _opening(endpoint) + self._max_opening)

    def _keep_within_max_open(self, endpoint: _Endpoint[C]) -> None:
        """Close the oldest idle channels to other addresses, for one that is about to be opened."""
        endpoints = self._endpoints.values()
        excess = 1 + sum(len(each.lent) + len(each.idle) for each in endpoints) - self._max_open
        while excess > 0 and (others := [each for each in endpoints if each is not endpoint and each.idle]):
            min(others, key=lambda each: each.idle[0][0]).idle.popleft()[1].close()
            excess -= 1

    def _retry(self, endpoint: _Endpoint[C], now_ns: int) -> None:
        """Double the limit of an address that ran out of descriptors: the full limit at once would fail again."""
        endpoint.max_channels = min(2 * endpoint.max_channels, self._max_channels)
        endpoint.retry_ns = now_ns + RETRY_NS if endpoint.max_channels < self._max_channels else 0

    def _hand_over(self, endpoint: _Endpoint[C], channel: C, now_ns: int) -> bool:
        """Hand the channel over to the longest waiting caller, once per HANDOVER_INTERVAL_NS. Return whether it was."""
        if now_ns - endpoint.handover_ns < HANDOVER_INTERVAL_NS:
            return False
        is_owed = False
        for waiter in _callers(endpoint.waiting, 1):
            is_owed = waiter.permit is None
            if is_owed:
                endpoint.handover_ns = now_ns
                waiter.channel = channel
                waiter.permit = self._lent(endpoint, channel)
            # Woken before it leaves the queue: if a signal handler raises in between, the next return finds it there.
            waiter.wake()
            endpoint.waiting.pop(weakref.ref(waiter), None)
        return is_owed

    def _wake(self, endpoint: _Endpoint[C]) -> None:
        """Wake as many waiting callers as channels are free: waking all at every release would cost the throughput."""
        for waiter in _callers(endpoint.waiting, self._free(endpoint)):
            waiter.wake()

    def _free(self, endpoint: _Endpoint[C]) -> int:
        """Return how many channels can be leased now, idle or to be opened."""
        idle = len(endpoint.idle)
        return idle + max(0, self._limit(endpoint) - idle - len(endpoint.lent))

    # --- the rest ---

    def _sweep(self, now_ns: int) -> None:
        """Close channels that were idle for the time to live; runs at half of it."""
        self._next_sweep_ns = now_ns + self._idle_ttl_ns // 2
        for endpoint in self._endpoints.values():
            while endpoint.idle and endpoint.idle[0][0] <= now_ns - self._idle_ttl_ns:
                endpoint.idle.popleft()[1].close()

    def counts(self, address: Address) -> tuple[int, int]:
        """Return the number of leased and of idle channels to `address`."""
        endpoint = self._endpoints.get(address)
        return (0, 0) if endpoint is None else (len(endpoint.lent), len(endpoint.idle))

    def waiting(self, address: Address) -> int:
        """Return the number of callers that wait for a channel to `address`."""
        endpoint = self._endpoints.get(address)
        return 0 if endpoint is None else len(endpoint.waiting)

    def close(self) -> None:
        """Close idle channels now and leased ones on release; wake waiting callers."""
        self.is_closed = True
        for endpoint in self._endpoints.values():
            while endpoint.idle:
                endpoint.idle.pop()[1].close()
            for waiter in _callers(endpoint.waiting, len(endpoint.waiting)):
                waiter.wake()

    def close_in_child(self) -> None:
        """Close the forked child's copies of all connections, which belong to the parent."""
        self.is_closed = True
        for endpoint in self._endpoints.values():
            for channel in [*(channel for _, channel in endpoint.idle), *filter(None, endpoint.lent.values())]:
                channel.close()


def _opening(endpoint: _Endpoint[Any]) -> int:
    """Return how many channels are being opened."""
    return list(endpoint.lent.values()).count(None)


def _callers(waiting: dict[weakref.ref[Waiter[C]], None], count: int) -> list[Waiter[C]]:
    """Return the first waiting callers, which may leave the queue meanwhile."""
    return [waiter for reference in list(islice(waiting, count)) if (waiter := reference()) is not None]


def close_all_in_child() -> None:
    """Close all pools in a forked child. Without locks: a thread of the parent may hold them."""
    for pool in list(_pools):
        pool.close_in_child()


os.register_at_fork(after_in_child=close_all_in_child)
