"""Filing of blocks in the eviction orders of a tenant's `prefix` policies.

A block is filed in each policy in which it is a leaf. It is a leaf in a tier if no child is in that tier or a faster
one: a prompt is demoted from its end, and dropped from its end. Leaves are filed in the cohort of their last visit; with
a hint, in that of their expected read.
"""

from collections.abc import Callable, Sequence
from typing import Generic

from kvstore.tiers.policies.interface import K, States
from kvstore.tiers.policies.prefix.nodes import PrefixNode, is_alone
from kvstore.tiers.policies.prefix.places import Place
from kvstore.tiers.policies.prefix.reuse_estimate import ReuseEstimate
from kvstore.tiers.policies.prefix.visits import CLASSES, Cohort, VisitRun

Nodes = States[K, PrefixNode[K] | VisitRun[K, Cohort[K]]]
"""State of each present block. A block that was stored alone has only its run until more is known of it."""


class LeafFiler(Generic[K]):
    """Files blocks by their node. `PrefixNode.home`, `kind` and `filed` state where a block is filed."""

    def __init__(self, nodes: Nodes[K], estimate: ReuseEstimate[K], clock: Callable[[], float]) -> None:
        self.orphans: Cohort[K] = Cohort(CLASSES, 0.0)
        """Blocks whose parent was evicted: they cannot be hit."""
        self._nodes = nodes
        self._estimate = estimate
        self._clock = clock

    def file_by_visit(self, key: K, node: PrefixNode[K], *, in_front: bool = False) -> None:
        """File a leaf in the cohort of its last visit; during that visit, in the cohort in which it would end now. The
        tip of the visit under way is not filed: it is about to have a child."""
        visit = node.visit
        is_tip = visit.tip == key
        home = visit.cohort
        if home is None:
            if is_tip:
                return
            home = self._estimate.log.cohort(visit.classify(), self._clock())
        self.file(key, node, home, is_tip=is_tip and not visit.forks, in_front=in_front)

    def file(self, key: K, node: PrefixNode[K], home: Cohort[K], *, is_tip: bool = False, in_front: bool = False) -> None:
        """File a leaf in a cohort, or in that of its expected read."""
        kind = 1 if is_tip else 0
        hints = self._estimate.hints
        if hints is not None and home is not self.orphans:
            home = hints.home(key) or home
            kind += 2 * hints.level(key)
        node.home = home
        node.kind = kind
        node.filed = node.leaf_places()
        for place in node.places[: node.filed]:
            place.order.file(key, home, kind, in_front=in_front)

    def unfile(self, key: K, node: PrefixNode[K]) -> None:
        self.withdraw(key, node)
        node.home = None

    def refile(self, key: K, node: PrefixNode[K]) -> None:
        """File a leaf, whose hints have changed, where it belongs now."""
        home = node.home
        if home is not None:
            self.unfile(key, node)
        if home is self.orphans:
            self.file(key, node, home)
        else:
            self.file_by_visit(key, node)

    def adjust(self, key: K, node: PrefixNode[K], *, in_front: bool = False) -> None:
        """File a block in those policies where it is a leaf, after its children changed.

        `in_front`: where it became one, because a child left. A prompt that has begun to shrink is evicted on, and
        others stay whole.
        """
        count = node.leaf_places()
        if node.home is None:
            if count:
                self.file_by_visit(key, node, in_front=in_front)
            return
        for place in node.places[count : node.filed]:
            place.order.unfile(key, node.home, node.kind)
        for place in node.places[node.filed : count]:
            place.order.file(key, node.home, node.kind, in_front=in_front)
        node.filed = count
        if not count:
            node.home = None

    def withdraw(self, key: K, node: PrefixNode[K]) -> None:
        """Take a block out of all orders; `restore` must follow. Its home is kept."""
        for place in node.places[: node.filed]:
            place.order.unfile(key, node.home, node.kind)
        node.filed = 0

    def restore(self, key: K, node: PrefixNode[K]) -> None:
        """File a block as before, in the policies where it is a leaf now."""
        if node.home is None:
            self.adjust(key, node)
            return
        node.filed = node.leaf_places()
        for place in node.places[: node.filed]:
            place.order.file(key, node.home, node.kind)
        if not node.filed:
            node.home = None

    # --- blocks stored alone ---

    def may_be_alone(self, key: K, node: PrefixNode[K]) -> bool:
        """Return True if a run may stand for the node: it takes less memory."""
        hints = self._estimate.hints
        return node.parent is None and len(node.places) == 1 and is_alone(node) and (hints is None or key not in hints)

    def file_alone(self, keys: Sequence[K], home: Cohort[K], places: tuple[Place[K], ...]) -> VisitRun[K, Cohort[K]]:
        """File blocks stored alone: in the cohort's last run if that is complete, else in a new run. The caller sets
        their state to the run, which is returned."""
        order = places[0].order
        last = order.last(home, 1)
        if isinstance(last, VisitRun) and last.is_whole:
            last.extend(keys)
            return last
        run = VisitRun(list(keys), home, self._nodes, places)
        order.file(run, home, 1)
        return run

    def remove_from_run(self, run: VisitRun[K, Cohort[K]], count: int) -> None:
        """Count `count` blocks as removed from the run."""
        run.remove_keys(count)
        if not run.left:
            run.places[0].order.unfile(run, run.home, 1)
