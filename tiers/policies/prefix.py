"""Eviction policy for KV blocks in prefix trees: evicts the block whose slot is expected to earn the fewest hits per
second.

It knows the tree of prefixes by the parents passed to `insert`.

- Only leaves are evicted: a block without its parent cannot be used. A prompt shrinks from its end.
- A block's worth depends on the class of its visit (visits.py): a shared prefix, a first prompt, or a later turn of a
  conversation, and its length.
- The policy learns the reuse of each class by age online, from evicted blocks too (reuse_hazard.py).
- Leaves are evicted in the order of their worth (cohort_order.py).
- The last block of a prompt is discounted by the measured reuse of such blocks. If a prompt's unfinished block has a
  key of its own, it is never read again.
- Hints of a caller scale the worth of its blocks, or replace it by the expected time of the next read, as far as
  earlier hints came true (block_hints.py).
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Final

import numpy as np

from kvstore.tiers.policies.block_hints import BlockHints
from kvstore.tiers.policies.cohort_order import ORPHANS_WORTH, CohortOrder
from kvstore.tiers.policies.expected_reads import ExpectedRead
from kvstore.tiers.policies.interface import DictStates, EvictionPolicy, K, States
from kvstore.tiers.policies.prefix_tree import Children, PrefixNode, alone, closes_cycle, has_cycle, is_alone, with_child, without_child
from kvstore.tiers.policies.priority_levels import DEFAULT_LEVEL, level_of
from kvstore.tiers.policies.visits import SHARED_FORKS, Cohort, Visit, VisitLog, VisitRun

MAX_PASSED: Final = 1 << 16
"""Keys examined, in some 5 ms, for blocks that are no leaves; only when every leaf is in use."""
LEARN_BLOCKS: Final = 2048
"""Blocks seen between two computations of worths: 0.4 ms, 0.2 us per block. A batch counts at once."""
ADVANCE_S: Final = 0.125
"""Interval of ageing; the width of the youngest age bucket."""
GHOSTS_PER_BLOCK: Final = 4
MIN_GHOSTS: Final = 32_768
"""Ghosts kept at least, and per present block: a small cache learns of ages at which it has nothing left."""


class PrefixPolicy(EvictionPolicy[K]):
    """Prefix-tree policy. `clock` gives monotonic seconds; only differences matter.

    Operations are O(1) amortised, except a search through at most `max_scan` keys when leaves are refused.
    """

    name = "prefix"

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._nodes: States[K, PrefixNode[K] | VisitRun[K, Cohort[K]]] = DictStates()
        """A block that was stored alone has only its run until more is known of it."""
        self._ghosts: OrderedDict[K, tuple[Visit[K], int, int] | Cohort[K]] = OrderedDict()
        """Evicted key -> its last visit, the turn it was first stored in, and its forks; for a block stored alone, its
        cohort.
        """
        self._parentless: dict[K, Children[K]] = {}
        """Absent parent -> its present children."""
        self._order: CohortOrder[K] = CohortOrder()
        self._log: VisitLog[K] = VisitLog(self._order.grow_older)
        self._hints: BlockHints[K] | None = None
        """None until the first hint."""
        self._visit: Visit[K] | None = None
        self._seen_blocks = self._seen_visits = 0
        """In visits that ended since worths were computed."""
        self._advanced_s = clock()
        self._learn(self._advanced_s)

    def use_states(self, states: States[K, Any]) -> None:
        self._nodes = states

    # --- operations on blocks ---

    def insert(self, key: K, parent: K | None = None) -> None:
        if self._nodes.get(key) is not None:
            self.touch(key)
            return
        if parent is not None and (parent == key or self._closes_cycle(key, parent)):
            parent = None
        now_s = self._clock()
        parent_node = self._find(parent) if parent is not None else None
        ghost = self._ghosts.pop(key, None)
        visit = self._visit
        if visit is None or parent is None or visit.tip != parent:
            visit = self._begin_visit(now_s)
            if ghost is None and parent_node is not None:
                visit.follow(parent_node.visit, parent, parent_node.birth_turn, parent_node.forks)
        if ghost is None:
            visit.new_blocks += 1
            node = PrefixNode(parent, visit, visit.turn, 0)
        else:
            if isinstance(ghost, Cohort):
                former = alone(key, ghost)
                ghost = former.visit, former.birth_turn, former.forks
            last, birth_turn, forks = ghost
            node = PrefixNode(parent, visit, birth_turn, forks)
            self._log.read(last, key, now_s)
            if self._hints is not None:
                self._hints.remove(key, last, now_s, was_read=True)
            visit.turn = birth_turn + 1
        self._nodes[key] = node
        if self._parentless and key in self._parentless:
            self._adopt_all(key, node)
        visit.tip = key
        visit.blocks += 1
        if parent_node is not None:
            if parent_node.home is not None:
                self._unfile(parent, parent_node)  # type: ignore[arg-type]
            if parent_node.child is None:
                parent_node.child = key
            else:
                parent_node.siblings = with_child(parent_node.siblings, key)
            parent_node.forks += ghost is None
        elif parent is not None:
            self._parentless[parent] = with_child(self._parentless.get(parent, ()), key)
            if parent in self._ghosts and node.child is None:
                self._file(key, node, self._order.orphans)
        if node.forks >= SHARED_FORKS[0]:
            self._end_shared(visit, node, now_s)

    def _closes_cycle(self, key: K, parent: K) -> bool:
        """Return True if the link would close a cycle. A key without present children has no descendants."""
        return key in self._parentless and closes_cycle(key, parent, self._parent_of, self.max_scan)

    def _parent_of(self, key: K) -> K | None:
        node = self._nodes.get(key)
        return node.parent if isinstance(node, PrefixNode) else None

    def insert_all(self, keys: Sequence[K], parents: Sequence[K | None] | None = None) -> None:
        inner = keys[1:-1]
        if parents is not None or not inner or not self._are_new_and_alone(keys):
            super().insert_all(keys, parents)
            return
        self.insert(keys[0])
        now_s = self._clock()
        assert self._visit is not None
        self._end_visit(self._visit, now_s)
        self._visit = None
        cohort = self._log.end_alone(len(inner), now_s)
        self._nodes.set_all(inner, self._file_alone(inner, cohort))
        self._count_seen(len(inner), len(inner), now_s)
        self.insert(keys[-1])

    def _are_new_and_alone(self, keys: Sequence[K]) -> bool:
        """Return True if the keys are distinct and unknown, and have no known children."""
        distinct = set(keys)
        is_unknown = self._nodes.are_new(distinct) and self._ghosts.keys().isdisjoint(distinct)
        return len(distinct) == len(keys) and is_unknown and self._parentless.keys().isdisjoint(distinct)

    def _find(self, key: K) -> PrefixNode[K] | None:
        """Return the block's node. A block stored alone is taken out of its run and gets a node."""
        node = self._nodes.get(key)
        if isinstance(node, VisitRun):
            run, node = node, alone(key, node.home)
            self._nodes[key] = node
            self._remove_from_run(run, 1)
        return node

    def _remove_from_run(self, run: VisitRun[K, Cohort[K]], count: int) -> None:
        """Count `count` blocks as removed from the run."""
        run.remove_keys(count)
        if not run.left:
            leaves = run.home.leaves[True]
            del leaves[run]
            if not leaves:
                leaves.clear()  # see _unfile
                self._order.leave(run.home, 1)

    def touch(self, key: K) -> None:
        node = self._nodes.get(key)
        if node is None:
            return
        now_s = self._clock()
        visit = self._visit
        if visit is None or isinstance(node, VisitRun) or node.parent is None or visit.tip != node.parent:
            visit = self._begin_visit(now_s)
            node = self._find(key)  # the end of the former visit may have filed it
            assert node is not None
        self._log.read(node.visit, key, now_s)
        if self._hints is not None:
            self._hints.touch(key, node.visit, visit, now_s)
        visit.turn = node.birth_turn + 1
        node.visit = visit
        if node.home is not None:
            self._unfile(key, node)
        visit.tip = key
        visit.blocks += 1
        if node.forks >= SHARED_FORKS[0]:
            self._end_shared(visit, node, now_s)

    def remove(self, key: K) -> None:
        node = self._nodes.get(key)
        if isinstance(node, VisitRun):  # rare, and a call for every key would cost a tenth of the method
            node = self._find(key)
        if node is None:
            return
        del self._nodes[key]
        if node.home is not None:
            self._unfile(key, node)
        self._remember(key, (node.visit, node.birth_turn, node.forks))
        if node.child is not None:
            self._orphan(key, node.children)
        self._leave_parent(key, node)

    def release(self, key: K) -> None:
        node = self._find(key)
        if node is None:
            return
        del self._nodes[key]
        if node.home is not None:
            self._unfile(key, node)
        now_s = self._clock()
        self._log.unwatch(node.visit, now_s)
        if self._hints is not None:
            self._hints.remove(key, node.visit, now_s, was_read=False)
        if node.child is not None:
            self._parentless[key] = node.children
        self._leave_parent(key, node)

    def set_priority(self, key: K, priority: int) -> None:
        level = level_of(priority)
        node = self._nodes.get(key)
        if node is None or level == (self._hints.level(key) if self._hints is not None else DEFAULT_LEVEL):
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

    def expect_reuse(self, key: K, after_s: float) -> None:
        node = self._nodes.get(key)
        if node is None:
            return
        now_s = self._clock()
        is_leaf = isinstance(node, VisitRun) or node.home is not None
        node = self._find(key)
        assert node is not None
        self._use_hints(now_s).expect(key, after_s, now_s)
        if is_leaf:
            self._refile(key, node)

    def _use_hints(self, now_s: float) -> BlockHints[K]:
        if self._hints is None:
            self._hints = BlockHints(self._order.grow_older)
            self._log.use_level_watcher(self._hints)
            self._learn(now_s)
        return self._hints

    def _leave_parent(self, key: K, node: PrefixNode[K]) -> None:
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
        if parent_node.child != key or parent_node.siblings:
            parent_node.lose_child(key)
            return
        parent_node.child = None
        # In front: a prompt that has begun to shrink is evicted on, and others stay whole.
        self._file_by_visit(parent, parent_node, in_front=True)

    def victim(self, evictable: Callable[[K], bool] = lambda key: True) -> K | None:
        first = self._order.first()
        if first is None:
            return next(filter(evictable, islice(self._eviction_order(), self.max_scan)), None)
        return first if evictable(first) else next(filter(evictable, islice(self._eviction_order(), 1, self.max_scan)), None)

    def take_victims(self, count: int, evictable: Callable[[K], bool], may_evict: Callable[[K], bool]) -> list[K]:
        found: list[K] = []
        while len(found) < count:
            more = self._take_alone(count - len(found), evictable, may_evict) or super().take_victims(1, evictable, may_evict)
            if not more:
                break
            found += more
        return found

    def _take_alone(self, count: int, evictable: Callable[[K], bool], may_evict: Callable[[K], bool]) -> list[K]:
        """Return the next victims as far as they belong to one run of blocks stored alone, of which only ghosts remain.

        Empty if the first victim belongs to no run, or may not be evicted.
        """
        nodes, first = self._nodes, self._order.first()
        run = nodes[first] if first is not None else None
        if not isinstance(run, VisitRun):
            return []
        found = list[K]()
        for key in islice(run, count):
            if not (evictable(key) and may_evict(key)):
                break
            found.append(key)
        for key in found:
            del nodes[key]
            self._remember(key, run.home)
        if found:
            self._remove_from_run(run, len(found))
        return found

    def _remember(self, key: K, ghost: tuple[Visit[K], int, int] | Cohort[K]) -> None:
        """Record a ghost of an evicted key."""
        ghosts = self._ghosts
        ghosts[key] = ghost
        if len(ghosts) > MIN_GHOSTS and len(ghosts) > GHOSTS_PER_BLOCK * len(self._nodes):
            self._forget_oldest()

    @property
    def remembered(self) -> int:
        return len(self._ghosts)

    def forget(self, count: int) -> None:
        for _ in range(min(count, len(self._ghosts))):
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        key, _ = self._ghosts.popitem(last=False)
        if self._hints is not None:
            self._hints.forget(key)

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: K) -> bool:
        return key in self._nodes

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
        self._visit = None

    def _end_visit(self, visit: Visit[K], now_s: float) -> None:
        """End the visit; its last block is filed like other leaves from now on."""
        cohort = self._log.end(visit, now_s)
        if self._hints is not None:
            self._hints.end_visit(visit)
        key = visit.tip
        assert key is not None
        node = self._nodes.get(key)
        if isinstance(node, PrefixNode) and node.child is None and node.home is None:
            if is_alone(node) and (self._hints is None or key not in self._hints):
                self._nodes[key] = self._file_alone((key,), cohort)
            else:
                self._file(key, node, cohort, is_tip=not visit.forks)
        self._count_seen(visit.blocks, 1, now_s)

    def _count_seen(self, blocks: int, visits: int, now_s: float) -> None:
        """Count blocks of visits that ended, and age and learn when due."""
        self._seen_blocks += blocks
        self._seen_visits += visits
        if now_s - self._advanced_s >= ADVANCE_S:
            self._advanced_s = now_s
            self._log.advance(now_s)
            if self._hints is not None:
                for key in self._hints.advance(now_s):
                    self._refile(key, self._child(key))
        if self._seen_blocks >= LEARN_BLOCKS:
            self._log.hazard.age(self._seen_visits)
            if self._hints is not None:
                self._hints.age(self._seen_visits)
            self._learn(now_s)
            self._seen_blocks = self._seen_visits = 0

    def _learn(self, now_s: float) -> None:
        """Order the cohorts by the current worth of their blocks."""
        tip_share = self._log.tips_read / self._log.tips
        worths = np.repeat(self._log.hazard.worth(now_s).ravel(), 2)
        worths[1::2] *= tip_share
        worths = np.append(worths, ORPHANS_WORTH)
        self._order.rank(worths if self._hints is None else self._hints.worths(worths, tip_share, self._log.hazard, now_s))

    # --- cohorts of leaves ---

    def _adopt_all(self, key: K, node: PrefixNode[K]) -> None:
        """Attach the children that arrived before this block; they are orphans no longer."""
        node.adopt(self._parentless.pop(key))
        for child_key in node.children:
            child = self._child(child_key)
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
                self._file(child_key, child, self._order.orphans)

    def _child(self, key: K) -> PrefixNode[K]:
        """Return the node of a block that is in no run: it has a parent or hints."""
        node = self._nodes[key]
        assert isinstance(node, PrefixNode)
        return node

    def _forget_parentless(self, parent: K, key: K) -> None:
        siblings = without_child(self._parentless[parent], key)
        if siblings:
            self._parentless[parent] = siblings
        else:
            del self._parentless[parent]

    def _file_by_visit(self, key: K, node: PrefixNode[K], *, in_front: bool = False) -> None:
        """File the leaf in the cohort of its last visit; during that visit, in the cohort in which it would end now."""
        visit = node.visit
        home = visit.cohort or self._log.cohort(visit.classify(), self._clock())
        self._file(key, node, home, is_tip=visit.tip == key and not visit.forks, in_front=in_front)

    def _refile(self, key: K, node: PrefixNode[K]) -> None:
        """File a leaf, whose hints have changed, where it belongs now."""
        home = node.home
        if home is not None:
            self._unfile(key, node)
        if home is self._order.orphans:
            self._file(key, node, home)
        else:
            self._file_by_visit(key, node)

    def _file(self, key: K, node: PrefixNode[K], home: Cohort[K], *, is_tip: bool = False, in_front: bool = False) -> None:
        kind = int(is_tip)
        if self._hints is not None and home is not self._order.orphans:
            home = self._hints.home(key) or home
            kind += 2 * self._hints.level(key)
            while kind >= len(home.leaves):
                home.leaves.append(OrderedDict())
        node.home = home
        node.kind = kind
        leaves = home.leaves[kind]
        if not leaves:
            self._order.enter(home, kind)
        leaves[key] = None
        if in_front:
            leaves.move_to_end(key, last=False)

    def _file_alone(self, keys: Sequence[K], home: Cohort[K]) -> VisitRun[K, Cohort[K]]:
        """File blocks stored alone: in the cohort's last run if that is complete, else in a new run."""
        leaves = home.leaves[True]
        last = next(reversed(leaves)) if leaves else None
        if isinstance(last, VisitRun) and last.is_whole:
            last.extend(keys)
            return last
        if not leaves:
            self._order.enter(home, 1)
        run = VisitRun(list(keys), home, self._nodes)
        leaves[run] = None
        return run

    def _unfile(self, key: K, node: PrefixNode[K]) -> None:
        home = node.home
        assert home is not None
        leaves = home.leaves[node.kind]
        del leaves[key]
        if not leaves:
            leaves.clear()  # frees the hash table, which single deletions do not shrink; cohorts are long-lived
            self._order.leave(home, node.kind)
        node.home = None

    def _eviction_order(self) -> Iterator[K]:
        """Yield every key: leaves by ascending worth; then the tip of the visit under way, whose next block would be an
        orphan; then the other blocks, for when every leaf is leased or pinned.
        """
        yield from self._order
        current_tip = self._visit.tip if self._visit is not None else None
        node = self._nodes.get(current_tip) if current_tip is not None else None
        if current_tip is not None and isinstance(node, PrefixNode) and node.child is None and node.home is None:
            yield current_tip
        for key, node in self._nodes.scan(MAX_PASSED):  # skips the leaves, which are few in this case
            if isinstance(node, PrefixNode) and node.child is not None:
                yield key

    def check_integrity(self) -> None:
        filed = self._order.check_integrity()
        nodes = {key: node for key, node in self._nodes.items() if isinstance(node, PrefixNode)}
        in_runs = {key: (run.home, 1) for key, run in self._nodes.items() if isinstance(run, VisitRun)}
        assert filed == in_runs | {key: (node.home, node.kind) for key, node in nodes.items() if node.home is not None}
        runs = Counter(run for _, run in self._nodes.items() if isinstance(run, VisitRun))
        assert all(run.left == count for run, count in runs.items())
        current_tip = self._visit.tip if self._visit is not None else None
        for key, node in nodes.items():
            is_filed, is_leaf = node.home is not None, node.child is None
            assert is_filed <= is_leaf <= (is_filed or key == current_tip), f"{key}: leaves are filed, others are not"
            assert is_leaf or all(nodes[child].parent == key for child in node.children)
            if node.parent is not None:
                parent_node = nodes.get(node.parent)
                siblings = parent_node.children if parent_node is not None else self._parentless[node.parent]
                assert siblings is not None
                assert key in siblings
        for parent, children in self._parentless.items():
            assert children
            assert parent not in self._nodes
        assert not any(has_cycle(key, self._parent_of) for key in nodes)
        assert not any(key in self._nodes for key in self._ghosts)
        if self._hints is not None:
            self._hints.check_integrity(lambda key: key in self._nodes or key in self._ghosts)
            filed_nodes = {key: node for key, node in nodes.items() if node.home not in (None, self._order.orphans)}
            assert all(node.kind >> 1 == self._hints.level(key) for key, node in filed_nodes.items())
            expected = {key: node.home for key, node in filed_nodes.items() if isinstance(node.home, ExpectedRead)}
            assert all(not home.is_over and self._hints.expected(key) is home for key, home in expected.items())
        assert len(self._nodes) == len(nodes) + len(in_runs)
