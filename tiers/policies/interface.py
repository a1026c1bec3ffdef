"""Which block leaves first: the interface of eviction policies. The policies themselves are a file each, by name in by_name.py.

A policy orders keys; it owns no bytes. The block table keeps one policy for each tier and slot group (so a victim always frees
a slot that the newcomer can use), inserts a key when it becomes readable, touches it when it is read, and removes it when it
leaves. A key that leaves and comes back is the same key: policies may remember those that left. Not thread-safe: the node's loop is
the only caller.

Room is made before it is known who comes: `victim`, `remove` of it, then `insert` of the newcomer, and for a batch all of its victims
first. An insert may come without them, when there is room. Nobody tells a policy the capacity: see ObservedCapacity.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from itertools import islice, repeat
from typing import Any, ClassVar, Generic, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MAX_SCAN = 4096
"""Keys a policy looks at for one victim. Leased and pinned keys are few beside the rest; without a limit a tier whose every block
is pinned would make each put scan all of it."""


class States(Protocol[K, V]):
    """A mapping of the policy's keys to what it knows of each, which is never None."""

    def __len__(self) -> int: ...

    def __contains__(self, key: K) -> bool: ...

    def __getitem__(self, key: K) -> V: ...

    def __setitem__(self, key: K, state: V) -> None: ...

    def __delitem__(self, key: K) -> None: ...

    def get(self, key: K) -> V | None: ...

    def items(self) -> Iterable[tuple[K, V]]:
        """All of them; nothing may change meanwhile."""

    def scan(self, max_passed: int) -> Iterable[tuple[K, V]]:
        """As `items`, as far as they are found by looking at so many keys, these or others."""

    def found(self, keys: Sequence[K]) -> Iterator[V | None]:
        """As `get` of each."""

    def set_all(self, keys: Sequence[K], state: V) -> None:
        """These keys, which are new, have this state in common."""

    def are_new(self, keys: Collection[K]) -> bool:
        """None of the keys is there."""


class DictStates(dict[K, V]):
    """States in a dict of their own."""

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

    What a policy remembers of keys that left is bounded by the number of keys there were, times a constant that it names.
    """

    name: ClassVar[str]
    max_scan: int = MAX_SCAN
    """Keys that `victim` looks at, at most."""
    _keys: Collection[K]
    """The keys that are there."""

    def use_states(self, states: States[K, Any]) -> None:  # noqa: B027 - most have no use for it
        """Keep what is known of each key here, instead of in a dict: to be called before anything else. Most policies leave it empty."""

    @abstractmethod
    def insert(self, key: K, parent: K | None = None) -> None:
        """A new key. One already present is a touch. `parent` is the key of the block before it in its prompt, None for a first one; it
        need not be present."""

    def insert_all(self, keys: Sequence[K], parents: Sequence[K | None] | None = None) -> None:
        """As `insert`, one after the other; without `parents` none has one."""
        above: Iterable[K | None] = repeat(None) if parents is None else parents
        for key, parent in zip(keys, above, strict=False):
            self.insert(key, parent)

    @abstractmethod
    def touch(self, key: K) -> None:
        """The key was read. One not present is ignored: reads race with evictions."""

    @abstractmethod
    def remove(self, key: K) -> None:
        """The key left, evicted or for another reason. One not present is ignored."""

    @abstractmethod
    def victim(self, evictable: Callable[[K], bool] = lambda key: True) -> K | None:
        """The key to evict next, skipping those that `evictable` refuses (leased, pinned, moving); None when none is left.

        The key stays until `remove`: the caller may yet decide otherwise. Looks at no more than MAX_SCAN keys.
        """

    def take_victims(self, count: int, evictable: Callable[[K], bool], may_evict: Callable[[K], bool]) -> list[K]:
        """Up to `count` keys as `victim` and `remove` give them one after the other, removed; no more from the first on that may not go,
        which stays."""
        found: list[K] = []
        while len(found) < count:
            key = self.victim(evictable)
            if key is None or not may_evict(key):
                break
            self.remove(key)
            found.append(key)
        return found

    @property
    def remembered(self) -> int:
        """Keys that left, of which it remembers what `forget` can forget."""
        return 0

    def forget(self, count: int) -> None:
        """Forget up to so many of the `remembered` keys, those that left first: what all policies together may remember is limited."""

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: K) -> bool:
        return key in self._keys

    @abstractmethod
    def check_integrity(self) -> None:
        """Assert the policy's invariants. For tests; O(keys)."""


class ObservedCapacity:
    """The most keys there were at recent calls for a victim: one is asked for when the tier is full.

    It rises at once. It falls to what was seen lately after as many calls as it is large, all of them below it: until then a low count
    is a batch that makes its room before it comes.
    """

    __slots__ = ("_calls", "_recent", "keys")

    def __init__(self) -> None:
        self.keys = 0
        """0 until a victim was asked for."""
        self._recent = 0
        self._calls = 0

    def observe(self, count: int) -> int:
        """A victim is asked for, with `count` keys there; the capacity. O(1)."""
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
