"""What the prefix policy (prefix.py) knows of a block: its place in the tree of prefixes, and the visit that came to it last."""

from typing import Generic

from kvstore.tiers.policies.children import Children, without_child
from kvstore.tiers.policies.interface import K
from kvstore.tiers.policies.visits import Cohort, Visit


class Node(Generic[K]):
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


def is_alone(node: Node[K]) -> bool:
    """Whether `alone` would make the same of a leaf whose visit has just ended: a block without parent, stored by that visit and not known
    before, and nothing else was."""
    visit = node.visit
    is_first = visit.blocks == visit.new_blocks == visit.turn == node.birth_turn == 1
    return is_first and node.parent is None and not node.forks and not visit.forks


def alone(key: K, cohort: Cohort[K]) -> Node[K]:
    """The node of a block without parent and children that was stored by itself, in a visit that ended in `cohort`, and not read since."""
    visit: Visit[K] = Visit()
    visit.blocks = visit.new_blocks = 1
    visit.tip = key
    visit.cohort = cohort
    return Node(None, visit, visit.turn, 0)
