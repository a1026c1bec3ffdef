"""Model that a tenant's `prefix` policies share: the prefix tree, visits, learned reuse, hints, and ghosts.

A block keeps its visits when it is demoted, promoted or copied between tiers, and one ranking orders all tiers. The
model consists of

- `ReuseEstimate`: what was seen of the reuse of blocks, and their worth by class and age;
- `Places`, `LeafFiler`: the policies, and where each leaf is filed in their orders;
- `BlockTree`: the links between blocks;
- `CurrentVisit`: the prompt that is read or stored now;
- `PrefixGhosts`: evicted blocks.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Generic

from kvstore.tiers.policies.interface import DictStates, K
from kvstore.tiers.policies.prefix.block_tree import BlockTree
from kvstore.tiers.policies.prefix.current_visit import CurrentVisit
from kvstore.tiers.policies.prefix.ghosts import Ghost, PrefixGhosts
from kvstore.tiers.policies.prefix.leaf_filer import LeafFiler, Nodes
from kvstore.tiers.policies.prefix.nodes import ONE_BELOW, PrefixNode, alone
from kvstore.tiers.policies.prefix.places import Place, Places
from kvstore.tiers.policies.prefix.priority_levels import DEFAULT_LEVEL, level_of
from kvstore.tiers.policies.prefix.reuse_estimate import ReuseEstimate
from kvstore.tiers.policies.prefix.visits import SHARED_FORKS, Cohort, Visit, VisitRun

MAX_PASSED: Final = 1 << 16
"""Keys examined, in some 20 ms, for blocks that are no leaves; only when every leaf is in use."""
PASSED_PER_BLOCK: Final = 16
"""Keys of the tenant examined for each block that is searched. Of a policy that has fewer than one block of 16, they
are hardly worth the search, and other policies have more memory to give."""
FIRST_SHARED: Final = SHARED_FORKS[0]


class PrefixModel(Generic[K]):
    """Blocks of a tenant in all tiers. `clock` gives monotonic seconds; only differences matter.

    Operations are O(1) amortised, except searches for blocks that are no leaves. Not thread-safe.
    """

    def __init__(self, *, nodes: Nodes[K] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`nodes`, empty, keeps the state of each present block; by default, a dict."""
        self.nodes: Nodes[K] = nodes if nodes is not None else DictStates()
        self.places: Places[K] = Places()
        self.estimate: ReuseEstimate[K] = ReuseEstimate(self.places, clock)
        self.filer: LeafFiler[K] = LeafFiler(self.nodes, self.estimate, clock)
        self.tree: BlockTree[K] = BlockTree(self.nodes, self.places, self.estimate, self.filer)
        self.current: CurrentVisit[K] = CurrentVisit(self.nodes, self.estimate, self.filer)
        self.ghosts: PrefixGhosts[K] = PrefixGhosts(self.estimate)
        self._clock = clock
        self._log = self.estimate.log

    def open(self, tier: int) -> tuple[Place[K], ...]:
        """Add a policy. Returns the places of blocks that are in it alone."""
        return self.places.open(tier, self.estimate.ranking)

    # --- operations on blocks ---

    def insert(self, key: K, parent: K | None, places: tuple[Place[K], ...]) -> None:
        """Add a block to a policy, whose `places` are given; it may be in others."""
        nodes, tree, place = self.nodes, self.tree, places[0]
        if (node := nodes.get(key)) is not None:
            if place in node.places:
                self.touch(key, place)
            else:
                tree.enter(key, place)
            return
        has_children = key in tree.parentless
        above = None
        if parent is not None:
            if parent == key or (has_children and tree.closes_cycle(key, parent)):
                parent = None
            else:
                found = nodes.get(parent)
                above = tree.find(parent) if isinstance(found, VisitRun) else found
        ghost = self.ghosts.by_key.pop(key, None)
        visit = self.current.visit
        if visit is None or parent is None or visit.tip != parent:
            visit = self.current.begin(self._clock())
            if ghost is None and above is not None:
                visit.follow(above.visit, parent, above.birth_turn, above.forks)
        if ghost is None:
            visit.new_blocks += 1
            node = PrefixNode(parent, visit, visit.turn, 0, places)
        else:
            node = self._readmitted(key, ghost, parent, visit, places)
        nodes[key] = node
        place.count += 1
        if has_children:
            tree.adopt_all(key, node)
        visit.tip = key
        visit.blocks += 1
        if above is not None:
            if above.child is None:  # usual
                above.child, above.below = key, ONE_BELOW[place.tier]
            else:
                above.gain_child(key, place.tier)
            if ghost is None:
                above.forks += 1
            if above.home is not None or self.places.are_several:
                self.filer.adjust(parent, above)  # type: ignore[arg-type]
        elif parent is not None:
            tree.add_parentless(key, parent)
            if parent in self.ghosts.by_key and node.leaf_places():
                self.filer.file(key, node, self.filer.orphans)
        if node.forks >= FIRST_SHARED:
            self.current.end_shared(visit, node, self._clock())

    def _readmitted(self, key: K, ghost: Ghost[K], parent: K | None, visit: Visit[K], places: tuple[Place[K], ...]) -> PrefixNode[K]:
        """Return the node of a block that is stored again in `visit`, and count it as read."""
        if isinstance(ghost, Cohort):
            former = alone(key, ghost, places)
            ghost = former.visit, former.birth_turn, former.forks
        last, birth_turn, forks = ghost
        now_s = self._clock()
        self._log.read(last, key, now_s)
        if self.estimate.hints is not None:
            self.estimate.hints.remove(key, last, now_s, was_read=True)
        visit.turn = birth_turn + 1
        return PrefixNode(parent, visit, birth_turn, forks, places)

    def insert_alone(self, keys: Sequence[K], places: tuple[Place[K], ...]) -> bool:
        """Add blocks without parents to a policy, if they are distinct and unknown and have no known children. Returns
        False if not."""
        distinct = set(keys)
        is_unknown = self.nodes.are_new(distinct) and self.ghosts.by_key.keys().isdisjoint(distinct)
        if not (is_unknown and len(distinct) == len(keys) and self.tree.parentless.keys().isdisjoint(distinct)):
            return False
        inner = keys[1:-1]
        self.insert(keys[0], None, places)
        now_s = self._clock()
        assert self.current.visit is not None
        self.current.end(self.current.visit, now_s)
        cohort = self._log.end_alone(len(inner), now_s)
        self.nodes.set_all(inner, self.filer.file_alone(inner, cohort, places))
        places[0].count += len(inner)
        self.current.count_seen(len(inner), len(inner), now_s)
        self.insert(keys[-1], None, places)
        return True

    def touch(self, key: K, place: Place[K]) -> None:
        """Record a read. Of a block with several copies, reads count in the fastest tier only."""
        node = self.nodes.get(key)
        if node is None or node.places[0] is not place:
            return
        now_s = self._clock()
        visit = self.current.visit
        if visit is None or isinstance(node, VisitRun) or node.parent is None or visit.tip != node.parent:
            visit = self.current.begin(now_s)
            node = self.tree.find(key)  # the end of the former visit may have filed it
            assert node is not None
        elif self.places.are_several:
            self.current.pass_by(node.parent)
        self._log.read(node.visit, key, now_s)
        if self.estimate.hints is not None:
            self.estimate.hints.touch(key, node.visit, visit, now_s)
        visit.turn = node.birth_turn + 1
        node.visit = visit
        if node.home is not None:
            self.filer.unfile(key, node)
        visit.tip = key
        visit.blocks += 1
        if node.forks >= FIRST_SHARED:
            self.current.end_shared(visit, node, now_s)

    def remove(self, key: K, place: Place[K]) -> None:
        """Remove a block from a policy. With its last copy it becomes a ghost."""
        nodes, tree = self.nodes, self.tree
        node = nodes.get(key)
        if isinstance(node, PrefixNode) and len(node.places) == 1 and node.places[0] is place:  # usual; saves a call
            del nodes[key]
            place.count -= 1
        elif (node := tree.take_out(key, place)) is None:
            return
        self.ghosts.remember(key, node, len(nodes))
        if node.parent is not None and tree.shrink(key, node, node.parent, place):
            return
        if node.home is not None:
            place.order.unfile(key, node.home, node.kind)
        if node.child is not None:
            tree.orphan(key, node.children)
        tree.leave_parent(key, node)

    def release(self, key: K, place: Place[K]) -> None:
        """As `remove`, for a block that another node keeps: no ghost, and its children are no orphans."""
        node = self.tree.take_out(key, place)
        if node is None:
            return
        now_s = self._clock()
        self._log.unwatch(node.visit, now_s)
        if self.estimate.hints is not None:
            self.estimate.hints.remove(key, node.visit, now_s, was_read=False)
        if node.home is not None:
            place.order.unfile(key, node.home, node.kind)
        if node.child is not None:
            self.tree.parentless[key] = node.children
        self.tree.leave_parent(key, node)

    def remove_alone(self, keys: Sequence[K], run: VisitRun[K, Cohort[K]]) -> None:
        """Remove blocks of a run; ghosts remain."""
        for key in keys:
            del self.nodes[key]
            self.ghosts.remember_alone(key, run.home, len(self.nodes))
        run.places[0].count -= len(keys)
        self.filer.remove_from_run(run, len(keys))

    # --- hints ---

    def set_priority(self, key: K, priority: int) -> None:
        """See EvictionPolicy."""
        level, hints = level_of(priority), self.estimate.hints
        if key not in self.nodes or level == (hints.level(key) if hints is not None else DEFAULT_LEVEL):
            return
        now_s = self._clock()
        hints = self.estimate.use_hints(now_s)
        levels_in_use = hints.levels_in_use
        node, is_leaf = self._hinted(key)
        hints.set_level(key, level, node.visit, now_s)
        if hints.levels_in_use > levels_in_use:
            self.estimate.learn(now_s)
        if is_leaf:
            self.filer.refile(key, node)

    def expect_reuse(self, key: K, after_s: float, place: Place[K]) -> None:
        """See EvictionPolicy. Of a block with several copies, the fastest tier's hint counts."""
        state = self.nodes.get(key)
        if state is None or state.places[0] is not place:
            return
        now_s = self._clock()
        node, is_leaf = self._hinted(key)
        self.estimate.use_hints(now_s).expect(key, after_s, now_s)
        if is_leaf:
            self.filer.refile(key, node)

    def _hinted(self, key: K) -> tuple[PrefixNode[K], bool]:
        """Return the node of a present block that gets a hint, and True if the block is a leaf, to be filed again."""
        state = self.nodes.get(key)
        is_leaf = isinstance(state, VisitRun) or (state is not None and state.home is not None)
        node = self.tree.find(key)
        assert node is not None
        return node, is_leaf

    # --- order of eviction ---

    def worth(self, key: K, place: Place[K]) -> float | None:
        """Return a leaf's hits per second of its slot, or what a block will be worth once its only child, which is in the
        same policy, has left. None for another block. Comparable between the model's policies."""
        node = self.nodes.get(key)
        if isinstance(node, VisitRun):
            return self.estimate.worth(node.home, 1)
        if node is None:
            return None
        if node.home is None and node.child is not None and not node.siblings and self.estimate.hints is None:
            child, cohort = self.nodes.get(node.child), node.visit.cohort
            if cohort is None or child is None or child.places[0] is not place:
                return None
            return self.estimate.worth(cohort, 0)
        if node.home is None or place not in node.places[: node.filed]:
            return None
        return self.estimate.worth(node.home, node.kind)

    def next_after(self, key: K, place: Place[K]) -> K | None:
        """Return the parent of a leaf if it becomes a leaf of the same worth once this one has left the place."""
        node = self.nodes.get(key)
        if node is None or isinstance(node, VisitRun) or node.parent is None:
            return None
        parent = self.nodes.get(node.parent)
        if not isinstance(parent, PrefixNode) or place not in parent.places or parent.visit.cohort is not node.visit.cohort:
            return None
        return node.parent if parent.children_down_to(place.tier) == 1 else None

    def eviction_order(self, place: Place[K]) -> Iterator[K]:
        """Yield every key of a policy: leaves by ascending worth; then the tip of the visit under way, whose next block
        would be an orphan; then the other blocks, for when every leaf is leased or pinned.
        """
        yield from place.order
        left = place.count - sum(1 for _ in place.order)  # counted here: most searches end before, and count nothing
        tip = self.current.tip
        node = self.nodes.get(tip) if tip is not None else None
        if tip is not None and isinstance(node, PrefixNode) and node.home is None and place in node.places[: node.leaf_places()]:
            left -= 1
            yield tip
        else:
            tip = None
        if not left:  # usual in a small group, whose few leaves may all be in use at every search
            return
        for key, node in self.nodes.scan(min(MAX_PASSED, PASSED_PER_BLOCK * left)):  # skips the leaves, which are few in this case
            if isinstance(node, PrefixNode) and place in node.places[node.filed :] and key != tip:
                yield key
