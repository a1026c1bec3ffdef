"""Where a policy keeps what it knows of each key: a dict of its own, or, given by its caller, a column of what the keys are keys of.

A dict takes 40 to 80 bytes a key, beside the table in which the caller finds its keys anyway.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol, TypeVar

from kvstore.tiers.policies.interface import K

V = TypeVar("V")


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
