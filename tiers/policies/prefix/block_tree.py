"""Tree of a tenant's present blocks: links between blocks and their children, also across tiers, and their copies."""

from typing import Generic

from kvstore.tiers.policies.interface import MAX_SCAN, K
from kvstore.tiers.policies.prefix.leaf_filer import LeafFiler, Nodes
from kvstore.tiers.policies.prefix.nodes import Children, PrefixNode, alone, closes_cycle, with_child, without_child
from kvstore.tiers.policies.prefix.places import Place, Places
from kvstore.tiers.policies.prefix.reuse_estimate import ReuseEstimate
from kvstore.tiers.policies.prefix.visits import VisitRun


class BlockTree(Generic[K]):
    """Links of the blocks in `nodes`. Each change files the blocks that became leaves, and unfiles those that are none
    any more."""

    def __init__(self, nodes: Nodes[K], places: Places[K], estimate: ReuseEstimate[K], filer: LeafFiler[K]) -> None:
        self.parentless: dict[K, Children[K]] = {}
        """Absent parent -> its present children."""
        self._nodes = nodes
        self._places = places
        self._estimate = estimate
        self._filer = filer

    def find(self, key: K) -> PrefixNode[K] | None:
        """Return the block's node. A block stored alone is taken out of its run and gets a node."""
        node = self._nodes.get(key)
        if isinstance(node, VisitRun):
            run, node = node, alone(key, node.home, node.places)
            self._nodes[key] = node
            self._filer.remove_from_run(run, 1)
        return node

    def closes_cycle(self, key: K, parent: K) -> bool:
        """Return True if the link of a key with present children would close a cycle; others have no descendants."""
        return closes_cycle(key, parent, self.parent_of, MAX_SCAN)

    def parent_of(self, key: K) -> K | None:
        node = self._nodes.get(key)
        return node.parent if isinstance(node, PrefixNode) else None

    # --- blocks that arrive ---

    def add_parentless(self, key: K, parent: K) -> None:
        """Add a block below an absent parent."""
        self.parentless[parent] = with_child(self.parentless.get(parent, ()), key)

    def adopt_all(self, key: K, node: PrefixNode[K]) -> None:
        """Attach the children that arrived before this block; they are orphans no longer."""
        children = self.parentless.pop(key)
        node.adopt(children)
        for child_key in node.children:
            child = self._child(child_key)
            node.move_child(None, child.places[0].tier)
            if child.home is not None:
                self._filer.unfile(child_key, child)
                self._filer.file_by_visit(child_key, child)

    def enter(self, key: K, place: Place[K]) -> None:
        """Add a block to one more policy. No visit: its value was copied."""
        node = self.find(key)
        assert node is not None
        fastest = node.places[0].tier
        self._filer.withdraw(key, node)
        node.places = self._places.together((*node.places, place))
        place.count += 1
        self._filer.restore(key, node)
        self._move_below(key, node, fastest)

    # --- blocks that leave ---

    def take_out(self, key: K, place: Place[K]) -> PrefixNode[K] | None:
        """Remove a block from a policy. Returns its node if this was its last copy, else None. The caller unfiles that,
        and calls `leave_parent`."""
        node = self._nodes.get(key)
        if node is None or place not in node.places:
            return None
        if isinstance(node, VisitRun):  # rare; a call for every key would cost a tenth
            node = self.find(key)
            assert node is not None
        if len(node.places) > 1:
            self._leave(key, node, place)
            return None
        del self._nodes[key]
        place.count -= 1
        return node

    def shrink(self, key: K, node: PrefixNode[K], parent: K, place: Place[K]) -> bool:
        """Unfile an evicted leaf and file its parent in its place, which is the usual case: a prompt shrinks. Returns
        False, and changes nothing, in other cases. Saves a third of an eviction."""
        home, above = node.home, self._nodes.get(parent)
        if home is None or node.child is not None or not isinstance(above, PrefixNode) or above.child != key or above.siblings:
            return False
        visit = above.visit
        kind = 1 if visit.tip == parent and not visit.forks else 0
        if visit.cohort is not home or kind != node.kind or above.places is not node.places or above.home is not None:
            return False
        if self._estimate.hints is not None:
            return False
        place.order.replace(key, parent, home, kind)
        above.home, above.kind, above.filed = home, kind, 1
        above.child, above.below = None, 0
        if node.forks > above.forks:
            above.forks = node.forks
        return True

    def leave_parent(self, key: K, node: PrefixNode[K]) -> None:
        """Remove an absent block from its parent's children."""
        parent = node.parent
        if parent is None:
            return
        parent_node = self._nodes.get(parent)
        assert not isinstance(parent_node, VisitRun), "a block that has had a child is not alone"
        if parent_node is None:
            self._forget_parentless(parent, key)
            return
        if node.forks > parent_node.forks:
            # All blocks of a shared prefix are shared, though only the last one has many children.
            parent_node.forks = node.forks
        parent_node.lose_child(key, node.places[0].tier)
        self._filer.adjust(parent, parent_node, in_front=True)

    def orphan(self, key: K, children: Children[K]) -> None:
        """File the children of an evicted block as orphans."""
        self.parentless[key] = children
        for child_key in children:
            child = self._child(child_key)
            if child.home is not None:
                self._filer.unfile(child_key, child)
                self._filer.file(child_key, child, self._filer.orphans)

    def _leave(self, key: K, node: PrefixNode[K], place: Place[K]) -> None:
        """Remove a block with other copies from a policy."""
        filer, fastest = self._filer, node.places[0].tier
        filer.withdraw(key, node)
        node.places = self._places.together(tuple(other for other in node.places if other is not place))
        place.count -= 1
        filer.restore(key, node)
        self._move_below(key, node, fastest)
        if node.home is not None and filer.may_be_alone(key, node):  # a demoted block
            home = node.home
            filer.unfile(key, node)
            self._nodes[key] = filer.file_alone((key,), home, node.places)

    def _move_below(self, key: K, node: PrefixNode[K], former_tier: int) -> None:
        """Account for a new fastest tier of a block in its parent."""
        tier = node.places[0].tier
        if tier == former_tier or node.parent is None:
            return
        parent_node = self._nodes.get(node.parent)
        if isinstance(parent_node, PrefixNode):
            parent_node.move_child(former_tier, tier)
            self._filer.adjust(node.parent, parent_node, in_front=tier > former_tier)

    def _child(self, key: K) -> PrefixNode[K]:
        """Return the node of a block that is in no run: it has a parent."""
        node = self._nodes[key]
        assert isinstance(node, PrefixNode)
        return node

    def _forget_parentless(self, parent: K, key: K) -> None:
        siblings = without_child(self.parentless[parent], key)
        if siblings:
            self.parentless[parent] = siblings
        else:
            del self.parentless[parent]
