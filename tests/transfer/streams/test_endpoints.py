"""Promises of the endpoint pool, one a test; then any schedule of users, and any calls against a plain model."""

import random
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.transfer.streams.endpoints import EndpointPool, OpenEndpoint, ReadyEndpoint, WaitForEndpoint
from tests.transfer.streams.naive_sieve import NaiveSieve

SECOND_NS = 1_000_000_000
KEYS = st.integers(0, 6)


@dataclass(eq=False)
class Endpoint:
    """A connection that exists only on paper."""

    key: int | str
    is_open: bool = True


Pool = EndpointPool[str, Endpoint]


def pool_of(max_endpoints: int) -> Pool:
    return EndpointPool(max_endpoints=max_endpoints, idle_ttl_s=60)


def opened(pool: Pool, key: str) -> Endpoint:
    """A new endpoint with one user; a slot is free without eviction."""
    assert pool.take(key) == OpenEndpoint(None)
    endpoint = Endpoint(key)
    pool.opened(key, endpoint)
    return endpoint


def idle(pool: Pool, key: str, now_ns: int = 0) -> Endpoint:
    """A new endpoint without users."""
    endpoint = opened(pool, key)
    assert pool.release(key, endpoint, now_ns) is None
    return endpoint


def test_is_draining_tells_a_long_user() -> None:
    pool = pool_of(2)
    first, second = opened(pool, "a"), opened(pool, "b")
    assert not pool.is_draining(first)
    assert pool.take("c") == WaitForEndpoint()
    assert (pool.is_draining(first), pool.is_draining(second)) == (True, False)
    pool.release("a", first, 0)
    assert not pool.is_draining(first)


def test_a_busy_endpoint_does_not_starve_waiters() -> None:
    pool = pool_of(1)
    endpoint = opened(pool, "hot")
    for _ in range(100):
        assert pool.take("hot") == ReadyEndpoint(endpoint)
        assert pool.release("hot", endpoint, 0) is None
    assert (pool.take("cold"), pool.take("hot")) == (WaitForEndpoint(), WaitForEndpoint())
    assert pool.release("hot", endpoint, 0) is endpoint
    assert (pool.take("hot"), pool.take("cold")) == (WaitForEndpoint(), OpenEndpoint(None))


def test_hit_rate_equals_the_reference_sieve() -> None:
    """Zipf access (s = 1), 50,000 times: the reference's hits, at most 64 open at any time, none left open."""
    weights = 1 / np.arange(1, 1001)
    keys = np.random.default_rng(3).choice(1000, size=50_000, p=weights / weights.sum()).tolist()
    pool: EndpointPool[int, Endpoint] = EndpointPool(max_endpoints=64, idle_ttl_s=60)
    reference, reference_hits, hits, open_now, most_open = NaiveSieve(), 0, 0, 0, 0
    for now_ns, key in enumerate(keys):
        reference_hits += reference.access(key, 64)
        taken = pool.take(key)
        assert not isinstance(taken, WaitForEndpoint)
        if isinstance(taken, ReadyEndpoint):
            endpoint = taken.endpoint
            hits += 1
        else:
            if taken.evicted is not None:
                taken.evicted.is_open = False
                open_now -= 1
            endpoint = Endpoint(key)
            open_now += 1
            most_open = max(most_open, open_now)
            pool.opened(key, endpoint)
        assert endpoint.is_open
        assert pool.release(key, endpoint, now_ns) is None
    pool.check_integrity()
    assert hits == reference_hits
    assert 0.5 < hits / 50_000 < 0.9, "the trace neither fits nor misses always"
    assert most_open == 64
    assert len(pool.close()) == open_now
    assert pool.open_count == 0


class Schedule:
    """Users of a pool, one step of one of them at a time: each takes its keys one after the other, holding one endpoint at most.

    A waiting user sleeps until a call other than `take`, as if its owner then woke all.
    """

    def __init__(self, keys: list[list[int]], max_endpoints: int, rng: random.Random) -> None:
        self.pool: EndpointPool[int, Endpoint] = EndpointPool(max_endpoints=max_endpoints, idle_ttl_s=1)
        self.keys = keys
        self.rng = rng
        self.held: dict[int, Endpoint] = {}
        self.connecting: set[int] = set()
        self.asleep: set[int] = set()

    def run(self) -> None:
        while unfinished := {user for user, keys in enumerate(self.keys) if keys}:
            awake = sorted(unfinished - self.asleep)
            assert awake, "everybody waits for somebody"
            self.step(self.rng.choice(awake))
            self.pool.check_integrity()

    def step(self, user: int) -> None:
        key = self.keys[user][-1]
        if user in self.connecting:
            self.connect(user, key)
        elif user in self.held:
            self.pool.release(key, self.held.pop(user), 0, broken=self.rng.random() < 0.1)
            self.keys[user].pop()
        elif not self.take(user, key):
            return
        self.asleep.clear()

    def take(self, user: int, key: int) -> bool:
        """Take an endpoint, wait for one or withdraw. Return True if waiters must be woken."""
        taken = self.pool.take(key)
        if isinstance(taken, ReadyEndpoint):
            self.held[user] = taken.endpoint
        elif isinstance(taken, OpenEndpoint):
            self.connecting.add(user)
        elif self.rng.random() < 0.1:
            self.pool.withdraw(key)
            self.keys[user].pop()
            return True
        else:
            self.asleep.add(user)
        return False

    def connect(self, user: int, key: int) -> None:
        self.connecting.remove(user)
        if self.rng.random() < 0.2:
            self.pool.failed(key)
        else:
            self.held[user] = Endpoint(key)
            self.pool.opened(key, self.held[user])


@given(st.lists(st.lists(st.integers(0, 5), max_size=12), max_size=10), st.integers(1, 4), st.integers(0, 1 << 32))
@settings(max_examples=300)
def test_under_any_schedule_every_user_gets_on(keys: list[list[int]], max_endpoints: int, seed: int) -> None:
    """No wake-up is missing, and no two wait for each other: someone is awake until all are done."""
    schedule = Schedule(keys, max_endpoints, random.Random(seed))
    schedule.run()
    assert not schedule.held


class AgainstModel(RuleBasedStateMachine):
    """Any calls return as plain lists and the naive SIEVE do. Every endpoint is closed once, without users; never are too many open."""

    max_endpoints = 3

    def __init__(self) -> None:
        super().__init__()
        self.pool: EndpointPool[int, Endpoint] = EndpointPool(max_endpoints=self.max_endpoints, idle_ttl_s=1)
        self.now_ns = 0
        self.order = NaiveSieve()
        self.usable: dict[int, Endpoint] = {}
        self.idle_since_ns: dict[int, int] = {}
        self.draining: list[Endpoint] = []
        self.opening: dict[int, bool] = {}
        self.waiting: list[int] = []
        self.users: list[tuple[int, Endpoint]] = []
        self.made: list[Endpoint] = []

    def is_used(self, endpoint: Endpoint) -> bool:
        return any(used is endpoint for _, used in self.users)

    def unreserved(self) -> int:
        return self.max_endpoints - len(self.usable) - len(self.draining) - len(self.opening)

    def close_endpoint(self, endpoint: Endpoint | None) -> None:
        if endpoint is not None:
            assert endpoint.is_open, "closed twice"
            assert not self.is_used(endpoint), "closed under a user"
            endpoint.is_open = False

    def remove(self, key: int) -> Endpoint:
        self.order.remove(key)
        self.idle_since_ns.pop(key, None)
        return self.usable.pop(key)

    @rule(key=KEYS)
    def take(self, key: int) -> None:
        taken = self.pool.take(key)
        rank = self.waiting.index(key) if key in self.waiting else len(self.waiting)
        if key in self.usable:
            assert taken == ReadyEndpoint(self.usable[key])
            self.order.visited.add(key)
            self.idle_since_ns.pop(key, None)
            self.users.append((key, self.usable[key]))
        elif key in self.opening:
            assert taken == WaitForEndpoint()
        elif rank < self.unreserved() + len(self.idle_since_ns):
            assert isinstance(taken, OpenEndpoint)
            self.reserve(key, taken)
        else:
            assert taken == WaitForEndpoint()
            self.queue(key)

    def reserve(self, key: int, taken: OpenEndpoint[Endpoint]) -> None:
        evicted = None
        if not self.unreserved():
            victim = self.order.victim(frozenset(self.usable.keys() - self.idle_since_ns.keys()))
            assert victim is not None
            evicted = self.remove(victim)
        assert taken == OpenEndpoint(evicted)
        self.close_endpoint(taken.evicted)
        self.opening[key] = True
        self.waiting = [waiting for waiting in self.waiting if waiting != key]

    def queue(self, key: int) -> None:
        if key not in self.waiting:
            self.waiting.append(key)
        while len(self.waiting) > self.unreserved() + len(self.idle_since_ns) + len(self.draining):
            victim = self.order.victim(frozenset(self.idle_since_ns))
            if victim is None:
                break
            self.draining.append(self.remove(victim))

    @precondition(lambda self: self.opening)
    @rule(data=st.data(), succeeds=st.booleans())
    def end_attempt(self, data: st.DataObject, succeeds: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.opening)))
        stays = self.opening.pop(key)
        if not succeeds:
            self.pool.failed(key)
            return
        endpoint = Endpoint(key)
        self.made.append(endpoint)
        self.users.append((key, endpoint))
        self.pool.opened(key, endpoint)
        if stays:
            self.usable[key] = endpoint
            self.order.insert(key)
        else:
            self.draining.append(endpoint)

    @precondition(lambda self: self.users)
    @rule(data=st.data(), broken=st.booleans())
    def release(self, data: st.DataObject, broken: bool) -> None:
        key, endpoint = self.users.pop(data.draw(st.integers(0, len(self.users) - 1)))
        if broken and self.usable.get(key) is endpoint:
            self.draining.append(self.remove(key))
        is_last, is_draining = not self.is_used(endpoint), endpoint in self.draining
        returned = self.pool.release(key, endpoint, self.now_ns, broken=broken)
        assert returned is (endpoint if is_last and is_draining else None)
        self.close_endpoint(returned)
        if is_last and is_draining:
            self.draining.remove(endpoint)
        elif is_last:
            self.idle_since_ns[key] = self.now_ns

    @rule(step_ns=st.sampled_from([0, 1, SECOND_NS // 2, SECOND_NS]))
    def expire(self, step_ns: int) -> None:
        self.now_ns += step_ns
        expired = [key for key, since_ns in self.idle_since_ns.items() if self.now_ns - since_ns >= SECOND_NS]
        returned = self.pool.expire(self.now_ns)
        assert returned == [self.remove(key) for key in expired]
        for endpoint in returned:
            self.close_endpoint(endpoint)

    @rule(key=KEYS)
    def drop(self, key: int) -> None:
        if key in self.opening:
            self.opening[key] = False
        is_idle = key in self.idle_since_ns
        endpoint = self.remove(key) if key in self.usable else None
        returned = self.pool.drop(key)
        assert returned is (endpoint if is_idle else None)
        self.close_endpoint(returned)
        if endpoint is not None and not is_idle:
            self.draining.append(endpoint)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.waiting))
        self.pool.withdraw(key)
        self.waiting.remove(key)

    @invariant()
    def never_too_many_are_open(self) -> None:
        self.pool.check_integrity()
        open_count = sum(endpoint.is_open for endpoint in self.made)
        assert open_count + len(self.opening) <= self.max_endpoints
        assert self.pool.open_count == open_count

    def teardown(self) -> None:
        """However a schedule ends, after close and the last give_back nothing is open."""
        for endpoint in self.pool.close():
            self.close_endpoint(endpoint)
        for key in self.opening:
            self.pool.failed(key)
        while self.users:
            key, endpoint = self.users.pop()
            self.close_endpoint(self.pool.release(key, endpoint, self.now_ns))
        assert not any(endpoint.is_open for endpoint in self.made)
        assert self.pool.open_count == 0
        self.pool.check_integrity()


TestAgainstModel = AgainstModel.TestCase
TestAgainstModel.settings = settings(max_examples=200, stateful_step_count=50)
