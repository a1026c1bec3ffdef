"""Visit under way: the blocks read or stored last, until another prompt begins or a shared prefix ends.

Its last block, the tip, is about to have a child, so it is filed only when the visit has ended.
"""

from typing import Generic

from kvstore.tiers.policies.interface import K
from kvstore.tiers.policies.prefix.leaf_filer import LeafFiler, Nodes
from kvstore.tiers.policies.prefix.nodes import PrefixNode
from kvstore.tiers.policies.prefix.reuse_estimate import ReuseEstimate
from kvstore.tiers.policies.prefix.visits import Visit


class CurrentVisit(Generic[K]):
    """The visit under way of a tenant, over all its policies."""

    def __init__(self, nodes: Nodes[K], estimate: ReuseEstimate[K], filer: LeafFiler[K]) -> None:
        self.visit: Visit[K] | None = None
        self._nodes = nodes
        self._estimate = estimate
        self._filer = filer
        self._passed: list[K] = []
        """Blocks of the visit that are leaves in some tier, and were followed by others."""

    @property
    def tip(self) -> K | None:
        """The visit's last block, present or not."""
        return self.visit.tip if self.visit is not None else None

    def begin(self, now_s: float) -> Visit[K]:
        """End the visit under way and begin another."""
        if self.visit is not None:
            self.end(self.visit, now_s)
        self.visit = Visit()
        return self.visit

    def end_shared(self, visit: Visit[K], node: PrefixNode[K], now_s: float) -> None:
        """End the visit at the end of a shared prefix, whose last block is given."""
        visit.forks = node.forks
        self.end(visit, now_s)

    def end(self, visit: Visit[K], now_s: float) -> None:
        """End the visit; its leaves are filed like others from now on."""
        nodes, filer, hints = self._nodes, self._filer, self._estimate.hints
        cohort = self._estimate.log.end(visit, now_s)
        if hints is not None:
            hints.end_visit(visit)
        self.visit = None
        if self._passed:
            self._file_passed()
        tip = visit.tip
        assert tip is not None
        node = nodes.get(tip)
        if isinstance(node, PrefixNode) and node.home is None and node.leaf_places():
            if filer.may_be_alone(tip, node):
                nodes[tip] = filer.file_alone((tip,), cohort, node.places)
            else:
                filer.file(tip, node, cohort, is_tip=not visit.forks)
        self.count_seen(visit.blocks, 1, now_s)

    def pass_by(self, key: K) -> None:
        """The visit goes on behind this block, which may be a leaf in its tier: its child may be in a slower one."""
        node = self._nodes.get(key)
        if isinstance(node, PrefixNode) and node.home is None and node.leaf_places():
            self._passed.append(key)

    def count_seen(self, blocks: int, visits: int, now_s: float) -> None:
        """Count blocks of visits that ended, and age and learn when due."""
        for key in self._estimate.advance(now_s):
            node = self._nodes[key]
            assert isinstance(node, PrefixNode), "a block with hints is in no run"
            self._filer.refile(key, node)
        self._estimate.count_seen(blocks, visits, now_s)

    def is_waiting(self, key: K) -> bool:
        """Return True if a leaf may be unfiled until the visit ends."""
        return key == self.tip or key in self._passed

    def _file_passed(self) -> None:
        passed, self._passed = self._passed, []
        for key in passed:
            node = self._nodes.get(key)
            if isinstance(node, PrefixNode) and node.home is None and node.leaf_places():
                self._filer.file_by_visit(key, node)
