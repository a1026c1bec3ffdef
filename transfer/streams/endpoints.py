"""Connection pool with a limit: which endpoints stay open, and which is evicted for another. No sockets, locks or
clocks.

The owner connects, closes and waits as the pool directs. Users of a key share its endpoint. A full pool evicts, by
SIEVE, an endpoint without work in flight; if all have work, one drains and is closed by its last user.

SIEVE is FIFO in which an endpoint that was taken since the hand last passed gets another round. Source: Zhang, Yang,
Yue, Vigfusson, Rashmi, SIEVE is Simpler than LRU, NSDI 2024.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import islice
from typing import Final, Generic, TypeAlias, TypeVar

from kvstore.protocol.errors import Closed

K = TypeVar("K", bound=Hashable)
E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class ReadyEndpoint(Generic[E]):
    """Use this endpoint, then release it."""

    endpoint: E


@dataclass(frozen=True, slots=True)
class OpenEndpoint(Generic[E]):
    """A slot is reserved for this key, and no other caller connects to it: close `evicted`, if any, connect, and report
    the result.
    """

    evicted: E | None


@dataclass(frozen=True, slots=True)
class WaitForEndpoint:
    """Take again after the next change, or withdraw."""


Taken: TypeAlias = ReadyEndpoint[E] | OpenEndpoint[E] | WaitForEndpoint
_WAIT: Final = WaitForEndpoint()


@dataclass(slots=True)
class _EndpointEntry(Generic[E]):
    endpoint: E
    in_flight: int
    idle_since_ns: int = 0
    is_visited: bool = False
    """Taken since the hand last passed."""


class EndpointPool(Generic[K, E]):
    """At most `max_endpoints` endpoints that are open, being opened or draining; at most one usable per key. Not
    thread-safe: the owner locks.

    - **Draining.** An endpoint that broke, was dropped or must be evicted while in use drains: it takes no new work,
      counts as open, and is
      returned by the `release` of its last user.
    - **Ownership.** Every endpoint passed to `opened` is returned exactly once: in `OpenEndpoint.evicted`, or by
      `release`, `expire`, `drop` or
      `close`. Its slot is then free, so the owner closes it before it unlocks; otherwise a descriptor too many could be
      open.
    - **Waiting.** Any call but `take` may unblock waiters; the owner then wakes all. Waiting keys get slots in order of
      arrival. Each has an
      endpoint draining for it unless one is idle, so no load can starve it. A caller that stops waiting calls
      `withdraw`. A caller must not
      wait for an endpoint while it holds another, nor begin work on one that `is_draining`.

    Endpoints are compared by identity. Operations are O(1), except that an eviction examines each endpoint at most
    twice.
    """

    def __init__(self, *, max_endpoints: int, idle_ttl_s: float) -> None:
        self._max_endpoints = max_endpoints
        self._idle_ttl_ns = int(idle_ttl_s * 1e9)
        self._usable: dict[K, _EndpointEntry[E]] = {}  # in order of opening
        self._hand: K | None = None  # where the next eviction begins; None: at the oldest
        self._idle: OrderedDict[K, _EndpointEntry[E]] = OrderedDict()  # usable, without users, longest idle first
        self._draining: dict[int, _EndpointEntry[E]] = {}  # by id() of the endpoint, which lives as long as its entry
        self._opening: dict[K, bool] = {}  # False: the endpoint drains once opened
        self._waiting: OrderedDict[K, None] = OrderedDict()
        self._is_closed = False

    def take(self, key: K) -> Taken[E]:
        """Take the endpoint of `key`: Ready (one more in flight), Open (report `opened` or `failed`), or Wait (another
        caller is connecting to it, or the pool is full). Raises Closed.
        """
        if self._is_closed:
            raise Closed("the endpoint pool is closed")
        entry = self._usable.get(key)
        if entry is not None:
            entry.is_visited = True
            if not entry.in_flight:
                del self._idle[key]
            entry.in_flight += 1
            return ReadyEndpoint(entry.endpoint)
        if key in self._opening:
            return _WAIT
        if self._has_capacity_for(key):
            return self._reserve(key)
        self._waiting.setdefault(key)
        self._drain_for_waiting()
        return _WAIT

    def withdraw(self, key: K) -> None:
        """Stop waiting for `key`. Other waiters for the key queue again with their next `take`."""
        self._waiting.pop(key, None)

    def opened(self, key: K, endpoint: E) -> None:
        """Report a successful attempt; the caller is the first user. After a `drop` or `close` meanwhile, the endpoint
        drains.
        """
        entry = _EndpointEntry(endpoint, in_flight=1)
        if self._opening.pop(key):
            self._usable[key] = entry
        else:
            self._draining[id(endpoint)] = entry

    def failed(self, key: K) -> None:
        """Report a failed attempt: its slot is free."""
        del self._opening[key]

    def release(self, key: K, endpoint: E, now_ns: int, *, broken: bool = False) -> E | None:
        """Release an endpoint after use. A `broken` one takes no more work. Returns the endpoint if it is to be closed
        now.
        """
        entry = self._usable.get(key)
        if entry is None or entry.endpoint is not endpoint:
            return self._release_draining(endpoint)
        if broken:
            self._drain(key, entry)
            return self._release_draining(endpoint)
        entry.in_flight -= 1
        if not entry.in_flight:
            entry.idle_since_ns = now_ns
            self._idle[key] = entry
        return None

    def is_draining(self, endpoint: E) -> bool:
        """Return True if users must finish their work on it, release it and take again. Another key may wait for its slot."""
        return id(endpoint) in self._draining

    def expire(self, now_ns: int) -> list[E]:
        """Return endpoints idle for `idle_ttl_s`, to be closed now."""
        expired = []
        while self._idle:
            key, entry = next(iter(self._idle.items()))
            if now_ns - entry.idle_since_ns < self._idle_ttl_ns:
                break
            expired.append(self._forget_idle(key))
        return expired

    def drop(self, key: K) -> E | None:
        """Drop a peer. Returns its endpoint if it is to be closed now; one in use or being opened drains."""
        if key in self._opening:
            self._opening[key] = False
        entry = self._usable.get(key)
        if entry is None:
            return None
        if entry.in_flight:
            self._drain(key, entry)
            return None
        return self._forget_idle(key)

    def close(self) -> list[E]:
        """Return the idle endpoints, to be closed now; the others drain, and `take` raises Closed. A second close
        returns nothing.
        """
        self._is_closed = True
        self._waiting.clear()
        keys = [*self._usable, *self._opening]
        return [endpoint for key in keys if (endpoint := self.drop(key)) is not None]

    @property
    def open_count(self) -> int:
        """Endpoints reported by `opened` and not yet returned."""
        return len(self._usable) + len(self._draining)

    def check_integrity(self) -> None:
        """Assert the pool's invariants. For tests; O(endpoints)."""
        usable, draining = self._usable, self._draining.values()
        assert self._hand is None or self._hand in usable, "the hand is at an endpoint that was removed"
        assert self.open_count + len(self._opening) <= self._max_endpoints
        assert not usable.keys() & self._opening.keys(), "a key with an endpoint is being connected to"
        assert not self._waiting.keys() & (usable.keys() | self._opening.keys()), "a key that has a slot waits for one"
        assert dict(self._idle) == {key: entry for key, entry in usable.items() if not entry.in_flight}
        assert all(entry.in_flight for entry in draining), "an endpoint without users was not returned"
        assert not self._is_closed or not (usable or self._waiting or any(self._opening.values()))

    def _free_count(self) -> int:
        """Slots available to a key now: free ones and those of idle endpoints."""
        return self._max_endpoints - self.open_count - len(self._opening) + len(self._idle)

    def _has_capacity_for(self, key: K) -> bool:
        """Return True if enough slots are free for the key and all earlier waiters. Counts all instead of testing the queue's
        first: any of several unblocked waiters may take first, and is not woken again.
        """
        free_count = self._free_count()
        return free_count > len(self._waiting) or key in islice(self._waiting, free_count)

    def _reserve(self, key: K) -> OpenEndpoint[E]:
        self._waiting.pop(key, None)
        evicted = None
        if self.open_count + len(self._opening) == self._max_endpoints:
            victim = self._victim(is_idle=True)
            assert victim is not None, "a slot counted as free has no idle endpoint"
            evicted = self._forget_idle(victim)
        self._opening[key] = True
        return OpenEndpoint(evicted)

    def _drain_for_waiting(self) -> None:
        """Drain as many endpoints as keys wait for that have no free or draining slot."""
        while len(self._waiting) > self._free_count() + len(self._draining):
            victim = self._victim(is_idle=False)
            if victim is None:  # the other slots are being connected: one will be free or in use
                return
            self._drain(victim, self._usable[victim])

    def _victim(self, *, is_idle: bool) -> K | None:
        """Return the key to evict next, among those without users or those with some; None if there is none. The hand
        stays at it.
        """
        keys = list(self._usable)
        at = keys.index(self._hand) if self._hand is not None else 0
        for key in (keys[at:] + keys[:at]) * 2:  # one round clears every mark, so the second finds any victim
            entry = self._usable[key]
            if entry.is_visited:
                entry.is_visited = False
            elif bool(entry.in_flight) != is_idle:
                self._hand = key
                return key
        return None

    def _remove(self, key: K) -> _EndpointEntry[E]:
        """Remove a usable endpoint. A hand at it moves to the next newer one."""
        if self._hand == key:
            keys = list(self._usable)
            self._hand = next(iter(keys[keys.index(key) + 1 :]), None)
        return self._usable.pop(key)

    def _drain(self, key: K, entry: _EndpointEntry[E]) -> None:
        self._remove(key)
        self._draining[id(entry.endpoint)] = entry

    def _forget_idle(self, key: K) -> E:
        del self._idle[key]
        return self._remove(key).endpoint

    def _release_draining(self, endpoint: E) -> E | None:
        entry = self._draining[id(endpoint)]
        entry.in_flight -= 1
        if entry.in_flight:
            return None
        del self._draining[id(endpoint)]
        return endpoint
