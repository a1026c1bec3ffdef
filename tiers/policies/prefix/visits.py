"""Visits of prompts as PrefixPolicy sees them: runs of blocks, their classes, and the log from which reuse is learned.

A visit is a run of blocks read or stored consecutively, each the child of the one before. It ends where the prompt
ends, or at the end of a shared prefix, which is a visit of its own. The log watches each visit's blocks age until they
are visited again, whether they are still cached or not: ghosts teach as much as residents.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress, repeat
from operator import is_
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

from kvstore.tiers.policies.interface import K, States
from kvstore.tiers.policies.prefix.reuse_hazard import BUCKETS, EDGES_S, FIRST_EDGE_S, ReuseHazard

H = TypeVar("H")

PART_KEYS: Final = 256
"""Keys looked up at a time."""

SHARED_FORKS: Final = (4, 16, 64)
"""Lower bounds, in children, of the classes of shared prefixes. A conversation's own blocks have two children: the next
turn does not extend an unfinished last block.
"""

PROMPT_BLOCKS: Final = (4, 16, 64, 128)
"""Lower bounds, in blocks, of the classes of first turns."""

TURNS: Final = (2, 3, 4, 5, 6)

NEW_BLOCKS: Final = (3, 6)
"""Later turns are classified by turn number and by the blocks that they add: a pasted document is asked about once, a
dialogue continues.
"""

FIRST_TURNS: Final = len(SHARED_FORKS)

LATER_TURNS: Final = FIRST_TURNS + len(PROMPT_BLOCKS) + 1

ALONE: Final = FIRST_TURNS + bisect_right(PROMPT_BLOCKS, 1)
"""Class of a first turn of one block."""

CLASSES: Final = LATER_TURNS + len(TURNS) * (len(NEW_BLOCKS) + 1)

TICK_S: Final = FIRST_EDGE_S
"""Visits of one class that end within this time share a cohort, so ageing costs the same however many there are."""

MAX_COHORTS: Final = 16_384
"""Cohorts watched; beyond that the oldest is dropped. About 500 bytes each."""

Leaf: TypeAlias = "K | VisitRun[K, Cohort[K]]"
"""A block, or a run of blocks stored alone."""


class VisitRun(Generic[K, H]):
    """Blocks stored alone, filed together in `home`. `left` of `keys` are present: those that `nodes` maps to this run.
    `places` is the policy that they are in."""

    __slots__ = ("_begin", "_keys", "_nodes", "home", "left", "places")

    def __init__(self, keys: list[K], home: H, nodes: States[K, Any], places: tuple[Any, ...]) -> None:
        self.places = places
        self._keys = keys
        self._nodes = nodes
        self._begin = 0
        """No key before this index is present."""
        self.home = home
        self.left = len(keys)

    def first(self) -> K:
        """Return the first present key; there is one."""
        keys, nodes = self._keys, self._nodes
        while nodes.get(key := keys[self._begin]) is not self:
            self._begin += 1
        return key

    def __iter__(self) -> Iterator[K]:
        """Iterate over the present keys in order; none may be removed meanwhile."""
        begin = self._begin
        while begin < len(self._keys):
            keys = self._keys[begin : begin + PART_KEYS]
            yield from compress(keys, map(is_, self._nodes.found(keys), repeat(self)))
            begin += len(keys)

    @property
    def is_whole(self) -> bool:
        """True if all keys are present. A removed key may return and must not be in the run twice."""
        return self.left == len(self._keys)

    def extend(self, keys: Sequence[K]) -> None:
        """Append keys to a whole run."""
        self._keys.extend(keys)
        self.left += len(keys)

    def remove_keys(self, count: int) -> None:
        """Count keys as removed, and compact the list when more than half are."""
        self.left -= count
        if 2 * self.left < len(self._keys):  # frees the removed keys
            self._keys, self._begin = list(self), 0


class Cohort(Generic[K]):
    """Visits of one class that ended within one TICK_S."""

    __slots__ = ("bucket", "filed", "is_open", "is_watched", "klass", "levels", "time_s", "unread")

    def __init__(self, klass: int, time_s: float) -> None:
        self.filed = 0
        """Rings with leaves of it, in all policies: most cohorts have none left."""
        self.klass = klass
        self.time_s = time_s
        self.bucket = 0
        self.unread = 0.0
        """Visits, in fractions of their blocks, that were not visited since."""
        self.is_watched = True
        self.is_open = True
        """Accepts visits until it ages or is dropped."""
        self.levels: list[float] | None = None
        """Of `unread`, that of blocks with a priority, by level; None without any."""


def keys_in(leaves: Iterable["Leaf[K]"]) -> Iterator[K]:
    """Yield the blocks of these leaves, in order."""
    for leaf in leaves:
        if isinstance(leaf, VisitRun):
            yield from leaf
        else:
            yield leaf


class Visit(Generic[K]):
    """One pass over a run of blocks."""

    __slots__ = ("before", "blocks", "cohort", "forks", "levels", "new_blocks", "tip", "turn", "was_read")

    def __init__(self) -> None:
        self.turn = 1
        self.before = 0
        """Blocks of the same prompt in the visit that this one continues."""
        self.blocks = 0
        self.new_blocks = 0
        self.forks = 0
        """Forks of its last block, if that ends a shared prefix."""
        self.cohort: Cohort[K] | None = None
        """None until the visit ends."""
        self.was_read = False
        """True if any of its blocks has been visited since."""
        self.tip: K | None = None
        """Its last block."""
        self.levels: list[int] | None = None
        """Until it ends, its blocks with a priority, by level; None without any."""

    def follow(self, last: "Visit[K]", parent: K | None, birth_turn: int, forks: int) -> None:
        """Begin with a new block below `parent`, which `last` passed last: a continuation of that prompt, or a branch
        of it.

        Below a shared prefix a new prompt begins.
        """
        if forks >= SHARED_FORKS[0]:
            return
        if last.tip == parent:
            self.turn, self.before, self.new_blocks = last.turn, last.before + last.blocks, last.new_blocks
        else:
            self.turn = birth_turn + 1

    def classify(self) -> int:
        """Return the class by what is known so far, in [0, CLASSES)."""
        if self.forks:
            return bisect_right(SHARED_FORKS, self.forks) - 1
        if self.turn == 1:
            return FIRST_TURNS + bisect_right(PROMPT_BLOCKS, self.before + self.blocks)
        turn = bisect_right(TURNS, self.turn) - 1
        return LATER_TURNS + turn * (len(NEW_BLOCKS) + 1) + bisect_right(NEW_BLOCKS, self.new_blocks)


class LevelWatcher(Protocol[K]):
    """Watches the blocks with a priority."""

    def grow_older(self, cohort: Cohort[K], older: int) -> None:
        """Record that the cohort is about to pass into an older bucket."""

    def stop_watching(self, cohort: Cohort[K], now_s: float) -> None:
        """Record that the cohort is no longer watched."""


class VisitLog(Generic[K]):
    """Watches visits that have ended. Not thread-safe."""

    def __init__(self, on_older: Callable[[Cohort[K], int], None] = lambda cohort, bucket: None) -> None:
        """`on_older` is called with a cohort that has leaves, and its next bucket, before the cohort passes into it."""
        self.hazard = ReuseHazard(CLASSES)
        self._on_older = on_older
        self._level_watcher: LevelWatcher[K] | None = None
        self._by_bucket: list[deque[Cohort[K]]] = [deque() for _ in range(BUCKETS)]
        self._ageing = [(bucket, self._by_bucket[bucket], EDGES_S[bucket + 1]) for bucket in reversed(range(BUCKETS - 1))]
        """Buckets that cohorts pass out of, oldest first, with their cohorts by age and their upper edges in seconds."""
        self._newest: list[Cohort[K] | None] = [None] * CLASSES
        self._count = 0
        self.tips_read = 1.0
        self.tips = 1.0
        """Visits of which any block was visited again, and those whose last block was."""

    def cohort(self, klass: int, now_s: float) -> Cohort[K]:
        """Return the cohort of visits that end now."""
        newest = self._newest[klass]
        if newest is not None and newest.is_open and now_s - newest.time_s < TICK_S:
            return newest
        newest = self._newest[klass] = Cohort(klass, now_s)
        self._by_bucket[0].append(newest)
        self._count += 1
        if self._count > MAX_COHORTS:
            self._drop_oldest(now_s)
        return newest

    def end(self, visit: Visit[K], now_s: float) -> Cohort[K]:
        """End a visit: its class is final, and its blocks begin to age."""
        klass = visit.classify()
        cohort = self._newest[klass]
        if cohort is None or not cohort.is_open or now_s - cohort.time_s >= TICK_S:
            cohort = self.cohort(klass, now_s)
        visit.cohort = cohort
        cohort.unread += 1
        self.hazard.enter(klass, 0, 1.0, cohort.time_s)
        return cohort

    def end_alone(self, count: int, now_s: float) -> Cohort[K]:
        """As `end`, for `count` first visits of one new block each."""
        cohort = self.cohort(ALONE, now_s)
        cohort.unread += count
        self.hazard.enter(ALONE, 0, count, cohort.time_s)
        return cohort

    def read(self, visit: Visit[K], key: K, now_s: float) -> None:
        """Record that one of the visit's blocks is visited again."""
        cohort = visit.cohort
        if cohort is None or not cohort.is_watched:
            return
        share = 1 / visit.blocks
        entered_s = cohort.time_s + EDGES_S[cohort.bucket]
        self.hazard.read(cohort.klass, cohort.bucket, share, entered_s, now_s)
        cohort.unread -= share
        if not visit.forks:
            self.tips += not visit.was_read
            self.tips_read += visit.tip == key
            visit.was_read = True

    def unwatch(self, visit: Visit[K], now_s: float) -> None:
        """Stop watching one of the visit's blocks: reads of it are seen elsewhere."""
        cohort = visit.cohort
        if cohort is None or not cohort.is_watched:
            return
        share = min(1 / visit.blocks, cohort.unread)
        self.hazard.drop(cohort.klass, cohort.bucket, share, cohort.time_s + EDGES_S[cohort.bucket], now_s)
        cohort.unread -= share

    def use_level_watcher(self, watcher: LevelWatcher[K]) -> None:
        """Report what happens to cohorts that have blocks with a priority."""
        self._level_watcher = watcher

    def advance(self, now_s: float) -> None:
        """Pass cohorts into the buckets of their age; each does so BUCKETS times at most."""
        for bucket, waiting, upper_s in self._ageing:  # oldest first keeps each bucket's cohorts ordered by age
            while waiting and now_s - waiting[0].time_s >= upper_s:
                cohort = waiting.popleft()
                older = bisect_right(EDGES_S, now_s - cohort.time_s, bucket + 1) - 1
                self.hazard.grow_older(cohort.klass, bucket, older, cohort.unread, cohort.time_s)
                if cohort.filed:
                    self._on_older(cohort, older)
                if cohort.levels is not None and self._level_watcher is not None:
                    self._level_watcher.grow_older(cohort, older)
                cohort.bucket, cohort.is_open = older, False
                self._by_bucket[older].append(cohort)

    def _drop_oldest(self, now_s: float) -> None:
        oldest = next(waiting for waiting in reversed(self._by_bucket) if waiting).popleft()
        entered_s = oldest.time_s + EDGES_S[oldest.bucket]
        self.hazard.drop(oldest.klass, oldest.bucket, oldest.unread, entered_s, now_s)
        if oldest.levels is not None and self._level_watcher is not None:
            self._level_watcher.stop_watching(oldest, now_s)
        oldest.is_watched = oldest.is_open = False
        self._count -= 1

    def __len__(self) -> int:
        """Number of cohorts watched."""
        return self._count
