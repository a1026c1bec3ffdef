"""Blocks that were stored alone, one after the other, in the order in which they came: as leaves that have nothing but their place.

A list of them takes 8 bytes a block, where a leaf by itself takes 84. The policy says of each whether it is still there: what it knows of
a block that is, is the run.
"""

from collections.abc import Iterator, Sequence
from itertools import compress, repeat
from operator import is_
from typing import Any, Final, Generic, TypeVar

from kvstore.tiers.policies.states import States

K = TypeVar("K")
H = TypeVar("H")

PART_KEYS: Final = 256
"""Keys that are looked for at a time."""


class Run(Generic[K, H]):
    """`left` of `keys` are there: those of which `nodes`, which is the policy's, gives this very run. They are filed in `home`."""

    __slots__ = ("_begin", "_keys", "_nodes", "home", "left")

    def __init__(self, keys: list[K], home: H, nodes: States[K, Any]) -> None:
        self._keys = keys
        self._nodes = nodes
        self._begin = 0
        """Before this none is there."""
        self.home = home
        self.left = len(keys)

    def first(self) -> K:
        """The one that came first of those that are there; there is one."""
        keys, nodes = self._keys, self._nodes
        while nodes.get(key := keys[self._begin]) is not self:
            self._begin += 1
        return key

    def __iter__(self) -> Iterator[K]:
        """Those that are there, in order; none may go meanwhile."""
        begin = self._begin
        while begin < len(self._keys):
            keys = self._keys[begin : begin + PART_KEYS]
            yield from compress(keys, map(is_, self._nodes.found(keys), repeat(self)))
            begin += len(keys)

    @property
    def is_whole(self) -> bool:
        """Whether all that came are there: what is gone may come again, and must not be here twice."""
        return self.left == len(self._keys)

    def extend(self, keys: Sequence[K]) -> None:
        """These came after the others, which are all there."""
        self._keys.extend(keys)
        self.left += len(keys)

    def has_lost(self, count: int) -> None:
        """So many of them have gone."""
        self.left -= count
        if 2 * self.left < len(self._keys):  # nobody else keeps the keys of what has gone
            self._keys, self._begin = list(self), 0
