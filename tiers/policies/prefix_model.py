"""Model that a tenant's `prefix` policies share: the prefix tree, visits, learned reuse, hints, and ghosts.

A block keeps its visits when it is demoted, promoted or copied between tiers, and one ranking orders all tiers. Each
policy has the order of its own leaves (cohort_order.py). A block is a leaf in a tier if no child is in that tier or a
faster one: a prompt is demoted from its end, and dropped from its end.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Generic

import numpy as np

from kvstore.tiers.policies.block_hints import BlockHints
from kvstore.tiers.policies.cohort_order import ORPHANS_WORTH, CohortOrder, Ranking, ranking_of, ring_of
from kvstore.tiers.policies.expected_reads import ExpectedRead
from kvstore.tiers.policies.interface import MAX_SCAN, DictStates, K, States
from kvstore.tiers.policies.prefix_tree import (
    Children,
    PrefixNode,
    alone,
    closes_cycle,
    has_cycle,
    is_alone,
    with_child,
    without_child,
)
from kvstore.tiers.policies.priority_levels import DEFAULT_LEVEL, level_of
from kvstore.tiers.policies.reuse_statistics import ReuseStatistics
from kvstore.tiers.policies.visits import CLASSES, SHARED_FORKS, Cohort, Visit, VisitLog, VisitRun

MAX_PASSED: Final = 1 << 16
"""Keys examined, in some 5 ms, for blocks that are no leaves; only when every leaf is in use."""
LEARN_BLOCKS: Final = 2048
"""Blocks seen between two computations of worths: 0.4 ms, 0.2 us per block. A batch counts at once."""
ADVANCE_S: Final = 0.125
"""Interval of ageing; the width of the youngest age bucket."""
GHOSTS_PER_BLOCK: Final = 4
MIN_GHOSTS: Final = 32_768
"""Ghosts kept at least, and per present block: a small cache learns of ages at which it has nothing left."""

Ghost = tuple[Visit[K], int, int] | Cohort[K]
"""Last visit, turn in which the block was first stored, and forks; for a block stored alone, its cohort."""


class Place(Generic[K]):
    """One policy as the model sees it: a slot group of a tier."""

    __slots__ = ("count", "order", "tier")

    def __init__(self, tier: int, ranking: Ranking) -> None:
        self.tier = tier
        """0 is the fastest."""
        self.order: CohortOrder[K] = CohortOrder(ranking)
        self.count = 0
        """Blocks in it."""


class PrefixModel(Generic[K]):
    """Tree and visits of a tenant's blocks in all tiers. `clock` gives monotonic seconds; only differences matter.

    Operations are O(1) amortised, except searches for blocks that are no leaves. Not thread-safe.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.nodes: States[K, PrefixNode[K] | VisitRun[K, Cohort[K]]] = DictStates()
        """A block that was stored alone has only its run until more is known of it."""
        self.ghosts: OrderedDict[K, Ghost[K]] = OrderedDict()
        self._parentless: dict[K, Children[K]] = {}
        """Absent parent -> its present children."""
        self._places: list[Place[K]] = []
        self._together: dict[tuple[Place[K], ...], tuple[Place[K], ...]] = {}
        """Places of blocks with several copies, so that such blocks share one tuple."""
        self._orphans: Cohort[K] = Cohort(CLASSES, 0.0)
        """Blocks whose parent was evicted: they cannot be hit."""
        self.log: VisitLog[K] = VisitLog(self._grow_older)
        self._of_others = ReuseStatistics.none(CLASSES)
        self.hints: BlockHints[K] | None = None
        """None until the first hint."""
        self._visit: Visit[K] | None = None
        self._passed: list[K] = []
        """Blocks of the visit under way that are leaves in some tier, and were followed by others."""
        self._seen_blocks = self._seen_visits = 0
        """In visits that ended since worths were computed."""
        self._advanced_s = clock()
        self._learn(self._advanced_s)

    # --- policies ---

    def open(self, tier: int) -> tuple[Place[K], ...]:
        """Add a policy. Returns the places of blocks that are in it alone."""
        place: Place[K] = Place(tier, self._ranking)
        self._places.append(place)
        return (place,)

    def close(self, place: Place[K]) -> bool:
        """Remove an empty policy. Returns True if it was the last one."""
        self._places.remove(place)
        self._together = {places: places for places in self._together if place not in places}
        return not self._places

    # --- operations on blocks ---

    def insert(self, key: K, parent: K | None, places: tuple[Place[K], ...]) -> None:
        """Add a block to a policy, whose `places` are given; it may be in others."""
        if (node := self.nodes.get(key)) is not None:
            if places[0] in node.places:
                self.touch(key, places[0])
            else:
                self._enter(key, places[0])
            return
        if parent is not None and (parent == key or self._closes_cycle(key, parent)):
            parent = None
        now_s = self._clock()
        parent_node = self._find(parent) if parent is not None else None
        ghost = self.ghosts.pop(key, None)
        visit = self._visit
        if visit is None or parent is None or visit.tip != parent:
            visit = self._begin_visit(now_s)
            if ghost is None and parent_node is not None:
                visit.follow(parent_node.visit, parent, parent_node.birth_turn, parent_node.forks)
        if ghost is None:
            visit.new_blocks += 1
            node = PrefixNode(parent, visit, visit.turn, 0, places)
        else:
            if isinstance(ghost, Cohort):
                former = alone(key, ghost, places)
                ghost = former.visit, former.birth_turn, former.forks
            last, birth_turn, forks = ghost
            node = PrefixNode(parent, visit, birth_turn, forks, places)
            self.log.read(last, key, now_s)
            if self.hints is not None:
                self.hints.remove(key, last, now_s, was_read=True)
            visit.turn = birth_turn + 1
        self.nodes[key] = node
        places[0].count += 1
        if self._parentless and key in self._parentless:
            self._adopt_all(key, node)
        visit.tip = key
        visit.blocks += 1
        if parent_node is not None:
            parent_node.gain_child(key, places[0].tier)
            parent_node.forks += ghost is None
            if parent_node.home is not None or len(self._places) > 1:
                self._adjust(parent, parent_node)  # type: ignore[arg-type]
        elif parent is not None:
            self._parentless[parent] = with_child(self._parentless.get(parent, ()), key)
            if parent in self.ghosts and node.leaf_places():
                self._file(key, node, self._orphans)
        if node.forks >= SHARED_FORKS[0]:
            self._end_shared(visit, node, now_s)

    def insert_alone(self, keys: Sequence[K], places: tuple[Place[K], ...]) -> bool:
        """Add blocks without parents to a policy, if they are distinct and unknown and have no known children. Returns
        False if not."""
        distinct = set(keys)
        is_unknown = self.nodes.are_new(distinct) and self.ghosts.keys().isdisjoint(distinct)
        if not (is_unknown and len(distinct) == len(keys) and self._parentless.keys().isdisjoint(distinct)):
            return False
        inner = keys[1:-1]
        self.insert(keys[0], None, places)
        now_s = self._clock()
        assert self._visit is not None
        self._end_visit(self._visit, now_s)
        cohort = self.log.end_alone(len(inner), now_s)
        self.nodes.set_all(inner, self._file_alone(inner, cohort, places))
        places[0].count += len(inner)
        self._count_seen(len(inner), len(inner), now_s)
        self.insert(keys[-1], None, places)
        return True

    def touch(self, key: K, place: Place[K]) -> None:
        """Record a read. Of a block with several copies, reads count in the fastest tier only."""
        node = self.nodes.get(key)
        if node is None or node.places[0] is not place:
            return
        now_s = self._clock()
        visit = self._visit
        if visit is None or isinstance(node, VisitRun) or node.parent is None or visit.tip != node.parent:
            visit = self._begin_visit(now_s)
            node = self._find(key)  # the end of the former visit may have filed it
            assert node is not None
        elif len(self._places) > 1:
            self._pass(node.parent)
        self.log.read(node.visit, key, now_s)
        if self.hints is not None:
            self.hints.touch(key, node.visit, visit, now_s)
        visit.turn = node.birth_turn + 1
        node.visit = visit
        if node.home is not None:
            self._unfile(key, node)
        visit.tip = key
        visit.blocks += 1
        if node.forks >= SHARED_FORKS[0]:
            self._end_shared(visit, node, now_s)

    def remove(self, key: K, place: Place[K]) -> None:
        """Remove a block from a policy. With its last copy it becomes a ghost."""
        node = self._take_out(key, place)
        if node is None:
            return
        self.remember(key, (node.visit, node.birth_turn, node.forks))
        if node.child is not None:
            self._orphan(key, node.children)
        self._leave_parent(key, node)

    def release(self, key: K, place: Place[K]) -> None:
        """As `remove`, for a block that another node keeps: no ghost, and its children are no orphans."""
        node = self._take_out(key, place)
        if node is None:
            return
        now_s = self._clock()
        self.log.unwatch(node.visit, now_s)
        if self.hints is not None:
            self.hints.remove(key, node.visit, now_s, was_read=False)
        if node.child is not None:
            self._parentless[key] = node.children
        self._leave_parent(key, node)

    def remove_alone(self, keys: Sequence[K], run: VisitRun[K, Cohort[K]]) -> None:
        """Remove blocks of a run; ghosts remain."""
        for key in keys:
            del self.nodes[key]
            self.remember(key, run.home)
        run.places[0].count -= len(keys)
        self._remove_from_run(run, len(keys))

    def set_priority(self, key: K, priority: int) -> None:
        """See EvictionPolicy."""
        level = level_of(priority)
        node = self.nodes.get(key)
        if node is None or level == (self.hints.level(key) if self.hints is not None else DEFAULT_LEVEL):
            return
        now_s = self._clock()
        hints = self._use_hints(now_s)
        levels_in_use = hints.levels_in_use
        is_leaf = isinstance(node, VisitRun) or node.home is not None
        node = self._find(key)
        assert node is not None
        hints.set_level(key, level, node.visit, now_s)
        if hints.levels_in_use > levels_in_use:
            self._learn(now_s)
        if is_leaf:
            self._refile(key, node)

    def expect_reuse(self, key: K, after_s: float, place: Place[K]) -> None:
        """See EvictionPolicy. Of a block with several copies, the fastest tier's hint counts."""
        node = self.nodes.get(key)
        if node is None or node.places[0] is not place:
            return
        now_s = self._clock()
        is_leaf = isinstance(node, VisitRun) or node.home is not None
        node = self._find(key)
        assert node is not None
        self._use_hints(now_s).expect(key, after_s, now_s)
        if is_leaf:
            self._refile(key, node)

    def _use_hints(self, now_s: float) -> BlockHints[K]:
        if self.hints is None:
            self.hints = BlockHints(self._grow_older)
            self.log.use_level_watcher(self.hints)
            self._learn(now_s)
        return self.hints

    def worth(self, key: K, place: Place[K]) -> float | None:
        """Return a leaf's hits per second of its slot; None for another block. Comparable between the model's
        policies."""
        node = self.nodes.get(key)
        if isinstance(node, VisitRun):
            return float(self._worths[ring_of(node.home, node.home.bucket, 1)])
        if node is None or node.home is None or place not in node.places[: node.filed]:
            return None
        return float(self._worths[ring_of(node.home, node.home.bucket, node.kind)])

    def eviction_order(self, place: Place[K]) -> Iterator[K]:
        """Yield every key of a policy: leaves by ascending worth; then the tip of the visit under way, whose next block
        would be an orphan; then the other blocks, for when every leaf is leased or pinned.
        """
        yield from place.order
        tip = self._visit.tip if self._visit is not None else None
        node = self.nodes.get(tip) if tip is not None else None
        if tip is not None and isinstance(node, PrefixNode) and node.home is None and place in node.places[: node.leaf_places()]:
            yield tip
        else:
            tip = None
        for key, node in self.nodes.scan(MAX_PASSED):  # skips the leaves, which are few in this case
            if isinstance(node, PrefixNode) and place in node.places[node.filed :] and key != tip:
                yield key

    # --- ghosts ---

    def remember(self, key: K, ghost: Ghost[K]) -> None:
        """Record a ghost of an evicted key."""
        ghosts = self.ghosts
        ghosts[key] = ghost
        if len(ghosts) > MIN_GHOSTS and len(ghosts) > GHOSTS_PER_BLOCK * len(self.nodes):
            self._forget_oldest()

    def forget(self, count: int) -> None:
        """Drop up to `count` ghosts, oldest first."""
        for _ in range(min(count, len(self.ghosts))):
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        key, _ = self.ghosts.popitem(last=False)
        if self.hints is not None:
            self.hints.forget(key)

    # --- the tree ---

    def _take_out(self, key: K, place: Place[K]) -> PrefixNode[K] | None:
        """Remove a block from a policy. Returns its node if this was its last copy, else None."""
        node = self.nodes.get(key)
        if node is None or place not in node.places:
            return None
        if isinstance(node, VisitRun):  # rare; a call for every key would cost a tenth
            node = self._find(key)
            assert node is not None
        if len(node.places) > 1:
            self._leave(key, node, place)
            return None
        del self.nodes[key]
        place.count -= 1
        if node.home is not None:
            place.order.unfile(key, node.home, node.kind)
            node.filed, node.home = 0, None
        return node

    def _closes_cycle(self, key: K, parent: K) -> bool:
        """Return True if the link would close a cycle. A key without present children has no descendants."""
        return key in self._parentless and closes_cycle(key, parent, self._parent_of, MAX_SCAN)

    def _parent_of(self, key: K) -> K | None:
        node = self.nodes.get(key)
        return node.parent if isinstance(node, PrefixNode) else None

    def _find(self, key: K) -> PrefixNode[K] | None:
        """Return the block's node. A block stored alone is taken out of its run and gets a node."""
        node = self.nodes.get(key)
        if isinstance(node, VisitRun):
            run, node = node, alone(key, node.home, node.places)
            self.nodes[key] = node
            self._remove_from_run(run, 1)
        return node

    def _remove_from_run(self, run: VisitRun[K, Cohort[K]], count: int) -> None:
        """Count `count` blocks as removed from the run."""
        run.remove_keys(count)
        if not run.left:
            run.places[0].order.unfile(run, run.home, 1)

    def _enter(self, key: K, place: Place[K]) -> None:
        """Add a block to one more policy. No visit: its value was copied."""
        node = self._find(key)
        assert node is not None
        fastest = node.places[0].tier
        self._withdraw(key, node)
        node.places = self._interned((*node.places, place))
        place.count += 1
        self._restore(key, node)
        self._move_below(key, node, fastest)

    def _leave(self, key: K, node: PrefixNode[K], place: Place[K]) -> None:
        """Remove a block with other copies from a policy."""
        fastest = node.places[0].tier
        self._withdraw(key, node)
        node.places = self._interned(tuple(other for other in node.places if other is not place))
        place.count -= 1
        self._restore(key, node)
        self._move_below(key, node, fastest)
        if len(node.places) == 1 and node.home is not None and self._may_be_alone(key, node):
            home = node.home  # a demoted block: a run takes less memory
            self._unfile(key, node)
            self.nodes[key] = self._file_alone((key,), home, node.places)

    def _may_be_alone(self, key: K, node: PrefixNode[K]) -> bool:
        """Return True if a run may stand for the node."""
        return is_alone(node) and (self.hints is None or key not in self.hints)

    def _interned(self, places: tuple[Place[K], ...]) -> tuple[Place[K], ...]:
        """Return the one tuple of these places, fastest first."""
        places = tuple(sorted(places, key=lambda place: place.tier))
        return self._together.setdefault(places, places)

    def _withdraw(self, key: K, node: PrefixNode[K]) -> None:
        """Take a block out of all orders; `_restore` must follow. Its home is kept."""
        for place in node.places[: node.filed]:
            place.order.unfile(key, node.home, node.kind)
        node.filed = 0

    def _restore(self, key: K, node: PrefixNode[K]) -> None:
        """File a block as before, in the policies where it is a leaf now."""
        if node.home is None:
            self._adjust(key, node)
            return
        node.filed = node.leaf_places()
        for place in node.places[: node.filed]:
            place.order.file(key, node.home, node.kind)
        if not node.filed:
            node.home = None

    def _move_below(self, key: K, node: PrefixNode[K], former_tier: int) -> None:
        """Account for a new fastest tier of a block in its parent."""
        tier = node.places[0].tier
        if tier == former_tier or node.parent is None:
            return
        parent_node = self.nodes.get(node.parent)
        if isinstance(parent_node, PrefixNode):
            parent_node.move_child(former_tier, tier)
            self._adjust(node.parent, parent_node, in_front=tier > former_tier)

    def _adjust(self, key: K, node: PrefixNode[K], *, in_front: bool = False) -> None:
        """File a block in those policies where it is a leaf, after its children changed.

        `in_front`: where it became one, because a child left. A prompt that has begun to shrink is evicted on, and
        others stay whole.
        """
        count = node.leaf_places()
        if node.home is None:
            if count:
                self._file_by_visit(key, node, in_front=in_front)
            return
        for place in node.places[count : node.filed]:
            place.order.unfile(key, node.home, node.kind)
        for place in node.places[node.filed : count]:
            place.order.file(key, node.home, node.kind, in_front=in_front)
        node.filed = count
        if not count:
            node.home = None

    def _leave_parent(self, key: K, node: PrefixNode[K]) -> None:
        """Remove an absent block from its parent's children."""
        parent = node.parent
        if parent is None:
            return
        parent_node = self.nodes.get(parent)
        assert not isinstance(parent_node, VisitRun), "a block that has had a child is not alone"
        if parent_node is None:
            self._forget_parentless(parent, key)
            return
        if node.forks > parent_node.forks:
            # All blocks of a shared prefix are shared, though only the last one has many children.
            parent_node.forks = node.forks
        parent_node.lose_child(key, node.places[0].tier)
        if parent_node.home is None and parent_node.child is None:  # usual
            self._file_by_visit(parent, parent_node, in_front=True)
        elif len(self._places) > 1:
            self._adjust(parent, parent_node, in_front=True)

    def _adopt_all(self, key: K, node: PrefixNode[K]) -> None:
        """Attach the children that arrived before this block; they are orphans no longer."""
        children = self._parentless.pop(key)
        node.adopt(children)
        for child_key in node.children:
            child = self._child(child_key)
            node.move_child(None, child.places[0].tier)
            if child.home is not None:
                self._unfile(child_key, child)
                self._file_by_visit(child_key, child)

    def _orphan(self, key: K, children: Children[K]) -> None:
        """File the children of an evicted block as orphans."""
        self._parentless[key] = children
        for child_key in children:
            child = self._child(child_key)
            if child.home is not None:
                self._unfile(child_key, child)
                self._file(child_key, child, self._orphans)

    def _child(self, key: K) -> PrefixNode[K]:
        """Return the node of a block that is in no run: it has a parent or hints."""
        node = self.nodes[key]
        assert isinstance(node, PrefixNode)
        return node

    def _forget_parentless(self, parent: K, key: K) -> None:
        siblings = without_child(self._parentless[parent], key)
        if siblings:
            self._parentless[parent] = siblings
        else:
            del self._parentless[parent]

    # --- visits ---

    def _begin_visit(self, now_s: float) -> Visit[K]:
        """End the visit under way and begin another."""
        if self._visit is not None:
            self._end_visit(self._visit, now_s)
        visit: Visit[K] = Visit()
        self._visit = visit
        return visit

    def _end_shared(self, visit: Visit[K], node: PrefixNode[K], now_s: float) -> None:
        """End the visit at the end of a shared prefix."""
        visit.forks = node.forks
        self._end_visit(visit, now_s)

    def _end_visit(self, visit: Visit[K], now_s: float) -> None:
        """End the visit; its leaves are filed like others from now on."""
        cohort = self.log.end(visit, now_s)
        if self.hints is not None:
            self.hints.end_visit(visit)
        self._visit = None
        passed, self._passed = self._passed, []
        for key in passed:
            node = self.nodes.get(key)
            if isinstance(node, PrefixNode) and node.home is None and node.leaf_places():
                self._file_by_visit(key, node)
        tip = visit.tip
        assert tip is not None
        node = self.nodes.get(tip)
        if isinstance(node, PrefixNode) and node.home is None and node.leaf_places():
            if len(node.places) == 1 and self._may_be_alone(tip, node):
                self.nodes[tip] = self._file_alone((tip,), cohort, node.places)
            else:
                self._file(tip, node, cohort, is_tip=not visit.forks)
        self._count_seen(visit.blocks, 1, now_s)

    def _pass(self, key: K) -> None:
        """The visit under way goes on behind this block, which may be a leaf in its tier: its child may be in a slower
        one."""
        node = self.nodes.get(key)
        if isinstance(node, PrefixNode) and node.home is None and node.leaf_places():
            self._passed.append(key)

    def _count_seen(self, blocks: int, visits: int, now_s: float) -> None:
        """Count blocks of visits that ended, and age and learn when due."""
        self._seen_blocks += blocks
        self._seen_visits += visits
        if now_s - self._advanced_s >= ADVANCE_S:
            self._advanced_s = now_s
            self.log.advance(now_s)
            if self.hints is not None:
                for key in self.hints.advance(now_s, self._leaves_of):
                    self._refile(key, self._child(key))
        if self._seen_blocks >= LEARN_BLOCKS:
            self.log.hazard.age(self._seen_visits)
            if self.hints is not None:
                self.hints.age(self._seen_visits)
            self._learn(now_s)
            self._seen_blocks = self._seen_visits = 0

    def _learn(self, now_s: float) -> None:
        """Order the cohorts by the current worth of their blocks."""
        tips_read, tips = self._of_others.tips.tolist()
        tip_share = (self.log.tips_read + tips_read) / (self.log.tips + tips)
        worths = np.repeat(self.log.hazard.worth(now_s).ravel(), 2)
        worths[1::2] *= tip_share
        worths = np.append(worths, ORPHANS_WORTH)
        self._worths = worths if self.hints is None else self.hints.worths(worths, tip_share, self.log.hazard, now_s)
        self._ranking = ranking_of(self._worths)
        for place in self._places:
            place.order.rank(self._ranking)

    def reuse_statistics(self) -> ReuseStatistics:
        """See PolicyFamily."""
        readings, risk_s = self.log.hazard.statistics(self._clock())
        return ReuseStatistics(readings, risk_s, np.array([self.log.tips_read - 1, self.log.tips - 1]))

    def use_statistics_of_others(self, statistics: ReuseStatistics) -> None:
        """See PolicyFamily."""
        self._of_others = statistics.limited().as_evidence_for(self.reuse_statistics())
        self.log.hazard.use_others(self._of_others.readings, self._of_others.risk_s)
        self._seen_blocks = max(self._seen_blocks, LEARN_BLOCKS)  # compute worths at the end of the next visit

    def _grow_older(self, cohort: Cohort[K], bucket: int) -> None:
        for place in self._places:
            place.order.grow_older(cohort, bucket)

    def _leaves_of(self, cohort: Cohort[K]) -> set[K]:
        """Return the blocks filed in the cohort, in any policy."""
        return {key for place in self._places for key in place.order.leaves_of(cohort)}

    # --- cohorts of leaves ---

    def _file_by_visit(self, key: K, node: PrefixNode[K], *, in_front: bool = False) -> None:
        """File the leaf in the cohort of its last visit; during that visit, in the cohort in which it would end now."""
        visit = node.visit
        if visit is self._visit and visit.tip == key:
            return
        home = visit.cohort or self.log.cohort(visit.classify(), self._clock())
        self._file(key, node, home, is_tip=visit.tip == key and not visit.forks, in_front=in_front)

    def _refile(self, key: K, node: PrefixNode[K]) -> None:
        """File a leaf, whose hints have changed, where it belongs now."""
        home = node.home
        if home is not None:
            self._unfile(key, node)
        if home is self._orphans:
            self._file(key, node, home)
        else:
            self._file_by_visit(key, node)

    def _file(self, key: K, node: PrefixNode[K], home: Cohort[K], *, is_tip: bool = False, in_front: bool = False) -> None:
        kind = int(is_tip)
        if self.hints is not None and home is not self._orphans:
            home = self.hints.home(key) or home
            kind += 2 * self.hints.level(key)
        node.home = home
        node.kind = kind
        node.filed = node.leaf_places()
        for place in node.places[: node.filed]:
            place.order.file(key, home, kind, in_front=in_front)

    def _file_alone(self, keys: Sequence[K], home: Cohort[K], places: tuple[Place[K], ...]) -> VisitRun[K, Cohort[K]]:
        """File blocks stored alone: in the cohort's last run if that is complete, else in a new run."""
        order = places[0].order
        last = order.last(home, 1)
        if isinstance(last, VisitRun) and last.is_whole:
            last.extend(keys)
            return last
        run = VisitRun(list(keys), home, self.nodes, places)
        order.file(run, home, 1)
        return run

    def _unfile(self, key: K, node: PrefixNode[K]) -> None:
        self._withdraw(key, node)
        node.home = None

    # --- for tests ---

    def check_integrity(self) -> None:
        """Assert the model's invariants; O(blocks)."""
        nodes = {key: node for key, node in self.nodes.items() if isinstance(node, PrefixNode)}
        runs = {key: run for key, run in self.nodes.items() if isinstance(run, VisitRun)}
        for place in self._places:
            filed = place.order.check_integrity()
            in_runs = {key: (run.home, 1) for key, run in runs.items() if run.places[0] is place}
            leaves = {key: (node.home, node.kind) for key, node in nodes.items() if place in node.places[: node.filed]}
            assert filed == in_runs | leaves
            assert place.count == len(in_runs) + sum(place in node.places for node in nodes.values())
        assert all(run.left == count for run, count in Counter(runs.values()).items())
        current_tip = self._visit.tip if self._visit is not None else None
        for key, node in nodes.items():
            self._check_node(key, node, nodes, is_waiting=key == current_tip or key in self._passed)
        for parent, children in self._parentless.items():
            assert children
            assert parent not in self.nodes
        assert not any(has_cycle(key, self._parent_of) for key in nodes)
        assert not any(key in self.nodes for key in self.ghosts)
        assert len(self.nodes) == len(nodes) + len(runs)
        if self.hints is not None:
            self.hints.check_integrity(lambda key: key in self.nodes or key in self.ghosts)
            filed_nodes = {key: node for key, node in nodes.items() if node.home not in (None, self._orphans)}
            assert all(node.kind >> 1 == self.hints.level(key) for key, node in filed_nodes.items())
            expected = {key: node.home for key, node in filed_nodes.items() if isinstance(node.home, ExpectedRead)}
            assert all(not home.is_over and self.hints.expected(key) is home for key, home in expected.items())

    def _check_node(self, key: K, node: PrefixNode[K], nodes: dict[K, PrefixNode[K]], *, is_waiting: bool) -> None:
        assert list(node.places) == sorted(set(node.places), key=lambda place: place.tier)
        tiers = [nodes[child].places[0].tier for child in node.children] if node.child is not None else []
        count = sum(place.tier < min(tiers, default=place.tier + 1) for place in node.places)
        assert node.leaf_places() == count
        assert node.filed == (count if node.home is not None else 0)
        assert (node.home is not None) == bool(count) or is_waiting, f"{key}: leaves are filed, others are not"
        assert all(nodes[child].parent == key for child in (node.children if node.child is not None else ()))
        if node.parent is not None:
            parent_node = nodes.get(node.parent)
            siblings = parent_node.children if parent_node is not None else self._parentless[node.parent]
            assert siblings is not None
            assert key in siblings
