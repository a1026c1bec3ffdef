"""Blocks that were stored alone, many at a time, in the order in which they came: as leaves that have nothing but their place.

A list of them takes 8 bytes a block, where a leaf by itself takes 84. The policy says of each whether it is still there: what it knows of
a block that is, is the run.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Generic, TypeVar

K = TypeVar("K")
H = TypeVar("H")


class Run(Generic[K, H]):
    """`left` of `keys` are there: those of which `nodes`, which is the policy's, gives this very run. They are filed in `home`."""

    __slots__ = ("_begin", "_keys", "_nodes", "home", "left")

    def __init__(self, keys: Sequence[K], home: H, nodes: Mapping[K, object]) -> None:
        self._keys = keys
        self._nodes = nodes
        self._begin = 0
        """Before this none is there."""
        self.home = home
        self.left = len(keys)

    def first(self) -> K:
        """The one that came first of those that are there; there is one."""
        keys, nodes = self._keys, self._nodes
        while nodes.get(keys[self._begin]) is not self:
            self._begin += 1
        return keys[self._begin]

    def __iter__(self) -> Iterator[K]:
        """Those that are there, in order; none may go meanwhile."""
        nodes = self._nodes
        return (key for key in islice(self._keys, self._begin, None) if nodes.get(key) is self)

    def has_lost(self, count: int) -> None:
        """So many of them have gone."""
        self.left -= count
        if 2 * self.left < len(self._keys):  # nobody else keeps the keys of what has gone
            self._keys, self._begin = list(self), 0
