"""The tree of prefixes as policies see it: links that close no cycle, children in little memory, the nodes of the prefix policy.

Parents as callers name them need not form a tree. Policies that evict leaves only refuse the link that would close a cycle: the keys of a
cycle would each wait for the next one to be evicted, so none would ever leave. Hash chains make no cycle, a caller can.
"""

from collections.abc import Callable
from typing import Final, Generic

from kvstore.tiers.policies.interface import K
from kvstore.tiers.policies.visits import Cohort, Visit

FEW_CHILDREN: Final = 4
"""Up to so many are a tuple, more of them a set."""

Children = tuple[K, ...] | set[K]


def closes_cycle(key: K, parent: K, parent_of: Callable[[K], K | None], max_steps: int) -> bool:
    """Return whether `key`, which is absent, would be its own ancestor below `parent`.

    `parent_of` gives the parent of a present key, and None for an absent one or one without a parent. True after `max_steps` ancestors,
    too: without the link the key is evicted like the first block of a prompt, which is safe.
    """
    above: K | None = parent
    for _ in range(max_steps):
        if above is None:
            return False
        if above == key:
            return True
        above = parent_of(above)
    return above is not None


def has_cycle(key: K, parent_of: Callable[[K], K | None]) -> bool:
    """Return whether `key` is its own ancestor. For tests."""
    seen: set[K] = set()
    above = parent_of(key)
    while above is not None and above not in seen:
        if above == key:
            return True
        seen.add(above)
        above = parent_of(above)
    return False


def with_child(children: Children[K], key: K) -> Children[K]:
    """The children and one more: a prefix that many share has thousands."""
    if isinstance(children, set):
        children.add(key)
        return children
    return (*children, key) if len(children) < FEW_CHILDREN else {*children, key}


def without_child(children: Children[K], key: K) -> Children[K]:
    """The others; a set is changed."""
    if isinstance(children, set):
        children.discard(key)
        return children or ()
    return tuple(child for child in children if child != key)


class PrefixNode(Generic[K]):
    __slots__ = ("birth_turn", "child", "forks", "home", "is_tip", "parent", "siblings", "visit")

    def __init__(self, parent: K | None, visit: Visit[K], birth_turn: int, forks: int) -> None:
        self.parent = parent
        self.visit = visit
        """The last one that passed through it."""
        self.birth_turn = birth_turn
        """The turn of the visit that stored it first."""
        self.forks = forks
        """Children it ever had; of a block whose children are gone, the most that any of them had."""
        self.child: K | None = None
        """One that is present; None for a leaf. Most blocks have one: a tuple of it would take 48 bytes of each."""
        self.siblings: Children[K] = ()
        """The other ones."""
        self.home: Cohort[K] | None = None
        """Where it is filed: leaves are, but for the one that the visit under way has come to."""
        self.is_tip = False
        """In which part of its home."""

    @property
    def children(self) -> Children[K]:
        """Those present, of a block that is no leaf: in the order in which they came, while they are few."""
        assert self.child is not None
        return {self.child, *self.siblings} if isinstance(self.siblings, set) else (self.child, *self.siblings)

    def adopt(self, children: Children[K]) -> None:
        """These are its children from now on; there is at least one. A set is changed."""
        self.child = next(iter(children))
        self.siblings = without_child(children, self.child)

    def lose_child(self, key: K) -> None:
        """One of several goes."""
        if key == self.child:
            self.adopt(self.siblings)
        else:
            self.siblings = without_child(self.siblings, key)


def is_alone(node: PrefixNode[K]) -> bool:
    """Whether `alone` would make the same of a leaf whose visit has just ended: a block without parent, stored by that visit and not known
    before, and nothing else was."""
    visit = node.visit
    is_first = visit.blocks == visit.new_blocks == visit.turn == node.birth_turn == 1
    return is_first and node.parent is None and not node.forks and not visit.forks


def alone(key: K, cohort: Cohort[K]) -> PrefixNode[K]:
    """The node of a block without parent and children that was stored by itself, in a visit that ended in `cohort`, and not read since."""
    visit: Visit[K] = Visit()
    visit.blocks = visit.new_blocks = 1
    visit.tip = key
    visit.cohort = cohort
    return PrefixNode(None, visit, visit.turn, 0)
