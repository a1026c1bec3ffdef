"""Ghosts of the `prefix` policies: evicted blocks that are remembered, so that a block that is stored again teaches how
long it was unread.
"""

from collections import OrderedDict
from typing import Final, Generic

from kvstore.tiers.policies.interface import K
from kvstore.tiers.policies.prefix.nodes import PrefixNode
from kvstore.tiers.policies.prefix.reuse_estimate import ReuseEstimate
from kvstore.tiers.policies.prefix.visits import Cohort, Visit

GHOSTS_PER_BLOCK: Final = 4
MIN_GHOSTS: Final = 32_768
"""Ghosts kept at least, and per present block: a small cache learns of ages at which it has nothing left."""

NodeGhost = tuple[Visit[K], int, int]
"""Last visit, turn in which the block was first stored, and forks."""
Ghost = NodeGhost[K] | Cohort[K]
"""For a block stored alone, its cohort."""


class PrefixGhosts(Generic[K]):
    """Ghosts of a tenant, of all policies together. The hints of a block are forgotten with its ghost."""

    def __init__(self, estimate: ReuseEstimate[K]) -> None:
        self.by_key: OrderedDict[K, Ghost[K]] = OrderedDict()
        """Oldest first."""
        self._estimate = estimate
        self._last: NodeGhost[K] = (Visit(), 0, 0)
        """Blocks of one prompt, evicted one after the other, share a ghost: 80 bytes less each."""

    def remember(self, key: K, node: PrefixNode[K], blocks: int) -> None:
        """Record a ghost of an evicted block. `blocks` are present; they bound the number of ghosts."""
        ghosts, ghost = self.by_key, self._last
        if ghost[0] is not node.visit or ghost[2] != node.forks or ghost[1] != node.birth_turn:
            ghost = self._last = node.visit, node.birth_turn, node.forks
        ghosts[key] = ghost
        if len(ghosts) > MIN_GHOSTS and len(ghosts) > GHOSTS_PER_BLOCK * blocks:
            self.forget(1)

    def remember_alone(self, key: K, cohort: Cohort[K], blocks: int) -> None:
        """As `remember`, for a block stored alone."""
        self.by_key[key] = cohort
        if len(self.by_key) > MIN_GHOSTS and len(self.by_key) > GHOSTS_PER_BLOCK * blocks:
            self.forget(1)

    def forget(self, count: int) -> None:
        """Drop up to `count` ghosts, oldest first."""
        hints = self._estimate.hints
        for _ in range(min(count, len(self.by_key))):
            key, _ = self.by_key.popitem(last=False)
            if hints is not None:
                hints.forget(key)

    def __len__(self) -> int:
        return len(self.by_key)
