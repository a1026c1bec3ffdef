"""Which block leaves first: the interface of eviction policies. The policies themselves are a file each, by name in by_name.py.

A policy orders keys; it owns no bytes. The block table keeps one policy for each tier and slot group (so a victim always frees
a slot that the newcomer can use), inserts a key when it becomes readable, touches it when it is read, and removes it when it
leaves. A key that leaves and comes back is the same key: policies may remember those that left. Not thread-safe: the node's loop is
the only caller.

Room is made before it is known who comes: `victim`, `remove` of it, then `insert` of the newcomer, and for a batch all of its victims
first. An insert may come without them, when there is room. Nobody tells a policy the capacity: see observed_capacity.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

if TYPE_CHECKING:
    from kvstore.tiers.policies.states import States

K = TypeVar("K", bound=Hashable)


class EvictionPolicy(ABC, Generic[K]):
    """An order over keys. Every operation is O(1) or O(log keys), amortised.

    What a policy remembers of keys that left is bounded by the number of keys there were, times a constant that it names.
    """

    name: ClassVar[str]

    def keep_in(self, states: "States[K, Any]") -> None:  # noqa: B027 - most have no use for it
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

    def take_victims(self, count: int, evictable: Callable[[K], bool], may_go: Callable[[K], bool]) -> list[K]:
        """Up to `count` keys as `victim` and `remove` give them one after the other, removed; no more from the first on that may not go,
        which stays."""
        found: list[K] = []
        while len(found) < count:
            key = self.victim(evictable)
            if key is None or not may_go(key):
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

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, key: K) -> bool: ...

    @abstractmethod
    def check_integrity(self) -> None:
        """Assert the policy's invariants. For tests; O(keys)."""


MAX_SCAN = 4096
"""Keys a policy looks at for one victim. Leased and pinned keys are few beside the rest; without a limit a tier whose every block
is pinned would make each put scan all of it."""
