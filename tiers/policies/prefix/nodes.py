"""Prefix tree of the eviction policies: cycle checks, compact child collections, and the nodes of PrefixPolicy.

Parents named by callers need not form a tree. Policies that evict only leaves refuse a link that would close a cycle,
as no key of a cycle would ever be a leaf. Hash chains make no cycles, but a faulty caller can.
"""

from collections.abc import Callable
from typing import Any, Final, Generic

from kvstore.tiers.policies.interface import K
from kvstore.tiers.policies.prefix.visits import Cohort, Visit

FEW_CHILDREN: Final = 4
"""Up to this many children are a tuple, more are a set."""

Children = tuple[K, ...] | set[K]

BELOW_BITS: Final = 20
ONE_BELOW: Final = (1 << 2 * BELOW_BITS, 1, 1 << BELOW_BITS)
"""One child, by tier. Counts of children in DRAM, the usual ones, are small integers, which take no memory."""
_MASK: Final = (1 << BELOW_BITS) - 1


def closes_cycle(key: K, parent: K, parent_of: Callable[[K], K | None], max_steps: int) -> bool:
    """Return whether `key`, which is absent, would be its own ancestor below `parent`.

    `parent_of` returns the parent of a present key, else None. Also True after `max_steps` ancestors: without the link
    the key is evicted like the first block of a prompt, which is safe.
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
    """Return the children with `key` added; a set is changed in place, as shared prefixes have thousands of children."""
    if isinstance(children, set):
        children.add(key)
        return children
    return (*children, key) if len(children) < FEW_CHILDREN else {*children, key}


def without_child(children: Children[K], key: K) -> Children[K]:
    """Return the children without `key`; a set is changed in place."""
    if isinstance(children, set):
        children.discard(key)
        return children or ()
    return tuple(child for child in children if child != key)


class PrefixNode(Generic[K]):
    """A present block in the prefix tree."""

    __slots__ = ("below", "birth_turn", "child", "filed", "forks", "home", "kind", "parent", "places", "siblings", "visit")

    def __init__(self, parent: K | None, visit: Visit[K], birth_turn: int, forks: int, places: tuple[Any, ...]) -> None:
        self.places = places
        """The policies that it is in (places.Place), fastest tier first."""
        self.filed = 0
        """It is filed in so many of `places`, the first ones: where it is a leaf."""
        self.below = 0
        """Number of present children by their fastest tier: a sum of ONE_BELOW."""
        self.parent = parent
        self.visit = visit
        """The last visit that passed through it."""
        self.birth_turn = birth_turn
        """The turn of the visit that first stored it."""
        self.forks = forks
        """Children it ever had; without present children, the maximum of that over its former children."""
        self.child: K | None = None
        """One present child, or None for a leaf. Most blocks have one; a tuple would take 48 bytes each."""
        self.siblings: Children[K] = ()
        """The other present children."""
        self.home: Cohort[K] | None = None
        """Cohort in which a leaf is filed, None for others. The tip of the visit under way is not filed."""
        self.kind = 0
        """Its kind among the leaves of its cohort; see CohortOrder."""

    @property
    def children(self) -> Children[K]:
        """The present children of a block that is no leaf, in order of arrival while they are few."""
        assert self.child is not None
        return {self.child, *self.siblings} if isinstance(self.siblings, set) else (self.child, *self.siblings)

    def leaf_places(self) -> int:
        """Return in how many of `places`, the first ones, it is a leaf: no child is in that tier or a faster one."""
        below, count = self.below, 0
        if not below:
            return len(self.places)
        lowest = 0 if below >> 2 * BELOW_BITS else 1 if below & _MASK else 2
        for place in self.places:
            if place.tier >= lowest:
                break
            count += 1
        return count

    def children_down_to(self, tier: int) -> int:
        """Return the number of present children with a copy in that tier or a faster one."""
        return sum(self.below // one & _MASK for one in ONE_BELOW[: tier + 1])

    def gain_child(self, key: K, tier: int) -> None:
        """Add a child whose fastest copy is in `tier`."""
        self.below += ONE_BELOW[tier]
        if self.child is None:
            self.child = key
        else:
            self.siblings = with_child(self.siblings, key)

    def adopt(self, children: Children[K]) -> None:
        """Take over at least one child. A set is changed in place. `move_child` for each must follow."""
        self.child = next(iter(children))
        self.siblings = without_child(children, self.child)

    def lose_child(self, key: K, tier: int) -> None:
        """Remove a child whose fastest copy was in `tier`."""
        self.below -= ONE_BELOW[tier]
        if key != self.child:
            self.siblings = without_child(self.siblings, key)
        elif self.siblings:
            self.adopt(self.siblings)
        else:
            self.child = None

    def move_child(self, former_tier: int | None, tier: int) -> None:
        """Record a child's new fastest tier; the former one is None for an adopted child."""
        if former_tier is not None:
            self.below -= ONE_BELOW[former_tier]
        self.below += ONE_BELOW[tier]


def is_alone(node: PrefixNode[K]) -> bool:
    """Return True if `alone` would recreate this leaf.

    Such a leaf has no parent, and is the only block of the visit that first stored it and has just ended.
    """
    visit = node.visit
    is_first = visit.blocks == visit.new_blocks == visit.turn == node.birth_turn == 1
    return is_first and node.parent is None and node.child is None and not node.forks and not visit.forks


def alone(key: K, cohort: Cohort[K], places: tuple[Any, ...]) -> PrefixNode[K]:
    """Return the node, not filed, of a block without parent and children that was stored alone in a visit that ended in
    `cohort`, and not read since.
    """
    visit: Visit[K] = Visit()
    visit.blocks = visit.new_blocks = 1
    visit.tip = key
    visit.cohort = cohort
    return PrefixNode(None, visit, visit.turn, 0, places)
