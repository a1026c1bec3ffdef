"""Interface of eviction policies. Each policy has a file of its own; by_name.py lists them.

A policy orders keys and owns no bytes. The block table keeps one policy per tier and slot group, so that a victim
always frees a slot that the new block can use. It inserts a key when the block becomes readable, touches it on reads,
and removes it when the block is removed from the tier. Policies may remember removed keys (ghosts). Not thread-safe:
only the node's event loop calls it.

Order of calls: `victim` and `remove`, then `insert` of the new key; for a batch, all victims first. With free space,
`insert` comes alone. A policy does not know the capacity: see ObservedCapacity.

Two questions about the next victims:

- `victim` is called to evict. A refused key is in use: the policy may pass over it for a round. The returned key is
  evicted next, or refused from then on because it moves to another tier. Until then the policy returns it again.
- `next_victims` is called to look at several keys, or at one that may stay. The policy then decides as if it had not
  been called: the caller may evict all of these keys, some or none.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from itertools import islice, repeat
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from kvstore.tiers.policies.reuse_statistics import ReuseStatistics

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MAX_SCAN = 4096
"""Keys that a policy examines per victim. Leased and pinned keys are few; the limit keeps a put fast in a tier whose
blocks are all pinned.
"""

MAX_POPULAR = 64
"""Keys with another round due that `next_victims` passes per key that it returns: a few us. `victim` passes all of them,
once per use; `next_victims` would pass them at each call.
"""


class States(Protocol[K, V]):
    """Mapping of the policy's keys to their states, which are never None."""

    def __len__(self) -> int: ...

    def __contains__(self, key: K) -> bool: ...

    def __getitem__(self, key: K) -> V: ...

    def __setitem__(self, key: K, state: V) -> None: ...

    def __delitem__(self, key: K) -> None: ...

    def get(self, key: K) -> V | None: ...

    def items(self) -> Iterable[tuple[K, V]]:
        """Iterate over all entries; the mapping must not change meanwhile."""

    def scan(self, max_passed: int) -> Iterable[tuple[K, V]]:
        """As `items`, but examines at most `max_passed` keys of the underlying table, these or others."""

    def found(self, keys: Sequence[K]) -> Iterator[V | None]:
        """As `get`, for each key."""

    def set_all(self, keys: Sequence[K], state: V) -> None:
        """Set one state for several new keys."""

    def are_new(self, keys: Collection[K]) -> bool:
        """Return True if none of the keys is present."""


class DictStates(dict[K, V]):
    """States in a dict."""

    def scan(self, max_passed: int) -> Iterator[tuple[K, V]]:
        return islice(self.items(), max_passed)

    def found(self, keys: Sequence[K]) -> Iterator[V | None]:
        return map(self.get, keys)

    def set_all(self, keys: Sequence[K], state: V) -> None:
        self.update(dict.fromkeys(keys, state))

    def are_new(self, keys: Collection[K]) -> bool:
        return self.keys().isdisjoint(keys)


class EvictionPolicy(ABC, Generic[K]):
    """An order over keys. Every operation is O(1) or O(log keys), amortised.

    Ghosts are bounded by the number of keys present times a constant that the policy states.
    """

    name: ClassVar[str]
    max_scan: int = MAX_SCAN
    """Largest number of keys that `victim` examines."""
    has_pure_victim: bool = False
    """`victim` changes no state, so that it may be called to look."""
    _keys: Collection[K]
    """The keys present."""

    @abstractmethod
    def insert(self, key: K, parent: K | None = None) -> None:
        """Insert a key; a present key is touched. `parent` is the key of the preceding block of the prompt, None for a
        first block. It need not be present.
        """

    def insert_all(self, keys: Sequence[K], parents: Sequence[K | None] | None = None) -> None:
        """As `insert`, for each key in order. Without `parents` none has a parent."""
        above: Iterable[K | None] = repeat(None) if parents is None else parents
        for key, parent in zip(keys, above, strict=False):
            self.insert(key, parent)

    @abstractmethod
    def touch(self, key: K) -> None:
        """Record a read of the key. Absent keys are ignored: reads race with evictions."""

    @abstractmethod
    def remove(self, key: K) -> None:
        """Remove a key that was evicted or deleted. Absent keys are ignored."""

    def release(self, key: K) -> None:
        """Remove a key whose block another node keeps. It is no ghost, and its children can still be hit. Absent keys
        are ignored."""
        self.remove(key)

    def set_priority(self, key: K, priority: int) -> None:  # noqa: B027 - most ignore hints
        """Scale the worth of a present key: 0 to 100; 50: as without a hint; 0: evicted first. Absent keys are ignored.

        A key that is removed loses it. The caller sets 50 when a hint ends.
        """

    def expect_reuse(self, key: K, after_s: float) -> None:  # noqa: B027 - most ignore hints
        """Expect that a present key is read again after this many seconds. Absent keys are ignored."""

    @abstractmethod
    def victim(self, evictable: Callable[[K], bool] = lambda key: True) -> K | None:
        """Return the key to evict next, skipping those that `evictable` refuses (leased, pinned, moving), or None.

        The key stays until `remove`, and is returned again unless it is refused or used. `evictable` must refuse only keys
        that cannot be evicted now; see `next_victims` otherwise. Examines at most MAX_SCAN keys.
        """

    def next_victims(self, count: int, evictable: Callable[[K], bool] = lambda key: True) -> list[K]:
        """Return up to `count` keys that `evictable` accepts, in the approximate order of their eviction. The first is
        the one that `victim` would return, unless more than MAX_POPULAR keys before it have another round due. Changes
        no state. Examines at most MAX_SCAN refused keys.

        Policies whose `victim` is not pure override it.
        """
        found: dict[K, None] = {}

        def is_last(key: K) -> bool:
            if evictable(key):
                found[key] = None
            return len(found) == count

        self.victim(is_last)
        return list(found)

    def take_victims(self, count: int, evictable: Callable[[K], bool], may_evict: Callable[[K], bool]) -> list[K]:
        """Remove and return up to `count` victims, stopping before the first that `may_evict` refuses."""
        found: list[K] = []
        while len(found) < count:
            key = self.victim(evictable)
            if key is None or not may_evict(key):
                break
            self.remove(key)
            found.append(key)
        return found

    def next_after(self, key: K) -> K | None:
        """Return the key that becomes a victim of the same worth once `key` is removed; None if none does.

        A victim that is copied before its removal stays in the order meanwhile; the demotion continues with this one.
        """
        return None

    def worth(self, key: K) -> float | None:
        """Return the value of a key that may be evicted next, comparable between the policies of a family; None if the
        policy knows no values, or for another key."""
        return None

    @property
    def remembered(self) -> int:
        """Number of ghosts that `forget` can drop. Policies of a family may share them."""
        return 0

    def forget(self, count: int) -> None:
        """Drop up to `count` ghosts, oldest first. The node bounds the ghosts of all policies together."""

    def close(self) -> int:
        """End the use of an empty policy. Returns the number of ghosts that are gone with it."""
        return self.remembered

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: K) -> bool:
        return key in self._keys

    @abstractmethod
    def check_integrity(self) -> None:
        """Assert the policy's invariants. For tests; O(keys)."""


def in_two_rounds(keys: Iterable[tuple[K, bool]], count: int, evictable: Callable[[K], bool], max_scan: int) -> list[K]:
    """Return the first `count` keys that `evictable` accepts, for `next_victims`. Keys marked True have another round due:
    they follow the others.

    Examines MAX_POPULAR such keys per returned key. If that ends the search, they are returned only if no other was found.
    """
    found: list[K] = []
    popular: list[K] = []
    refusals, max_popular = 0, min(MAX_POPULAR * count, max_scan)
    for key, is_popular in keys:
        if is_popular:
            popular.append(key)
        elif evictable(key):
            found.append(key)
        else:
            refusals += 1
        if len(found) == count or (found and len(popular) == max_popular):
            return found
        if refusals == max_scan or len(popular) == max_popular:
            break
    return [*found, *islice(filter(evictable, popular), count - len(found))]


class PolicyFamily(ABC, Generic[K]):
    """Policies of one tenant: one for each tier and slot group."""

    def use_states(self, states: States[K, Any]) -> None:  # noqa: B027 - most have no use for it
        """Keep per-key state in `states` instead of a dict. Call before anything else. Most policies ignore it."""

    @abstractmethod
    def policy(self, tier: int) -> EvictionPolicy[K]:
        """Return a new, empty policy of a tier; 0 is the fastest."""

    def reuse_statistics(self) -> ReuseStatistics | None:
        """Return what the policies have learned from their own keys, for those of other nodes; None: nothing that they
        could use."""
        return None

    def use_statistics_of_others(self, statistics: ReuseStatistics) -> None:  # noqa: B027 - most learn nothing
        """Use what other nodes' policies have learned, in place of what was passed before."""


class SeparatePolicies(PolicyFamily[K]):
    """Policies that know nothing of each other."""

    def __init__(self, make: Callable[[], EvictionPolicy[K]]) -> None:
        self._make = make

    def policy(self, tier: int) -> EvictionPolicy[K]:
        return self._make()


class ObservedCapacity:
    """Capacity in keys, estimated as the largest number of keys at recent calls for a victim: a victim is requested
    when the tier is full.

    It rises at once. It falls to the recent maximum after as many consecutive lower calls as its own value; until then
    a low count may be a batch that makes space before its inserts.
    """

    __slots__ = ("_calls", "_recent", "keys")

    def __init__(self) -> None:
        self.keys = 0
        """0 until the first victim is requested."""
        self._recent = 0
        self._calls = 0

    def observe(self, count: int) -> int:
        """Record a victim request with `count` keys present and return the capacity. O(1)."""
        if count >= self.keys:
            self.keys = count
        else:
            self._recent = max(self._recent, count)
            self._calls += 1
            if self._calls <= self.keys:
                return self.keys
            self.keys = self._recent
        self._recent = self._calls = 0
        return self.keys
