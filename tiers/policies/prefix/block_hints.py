"""Hints about blocks of PrefixPolicy: their priorities and expected reads, and how far earlier hints came true.

Hints of evicted blocks are kept with their ghosts: a block that is stored again was read, whether it was cached or not.
"""

from collections.abc import Callable, Iterable
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from kvstore.tiers.policies.interface import K
from kvstore.tiers.policies.prefix.expected_reads import ExpectedRead, ExpectedReads
from kvstore.tiers.policies.prefix.priority_levels import DEFAULT_LEVEL, LEVELS, LevelReuse
from kvstore.tiers.policies.prefix.reuse_hazard import BUCKETS, EDGES_S, ReuseHazard
from kvstore.tiers.policies.prefix.visits import CLASSES, Cohort, Visit


class BlockHints(Generic[K]):
    """Hints of present blocks and of ghosts."""

    def __init__(self, on_older: Callable[[Cohort[K], int], None]) -> None:
        """`on_older` is called with a cohort of expected reads and its next part before the cohort passes into it."""
        self.levels_in_use = 1
        """Levels below this one may have blocks."""
        self._levels: dict[K, int] = {}
        self._expected: dict[K, ExpectedRead[K]] = {}
        self._reads: ExpectedReads[K] = ExpectedReads(on_older)
        self._reuse = LevelReuse(CLASSES)

    def __contains__(self, key: K) -> bool:
        return key in self._levels or key in self._expected

    def level(self, key: K) -> int:
        return self._levels.get(key, DEFAULT_LEVEL)

    def set_level(self, key: K, level: int, visit: Visit[K], now_s: float) -> None:
        """Set the level of a block whose last visit is given."""
        self._drop_level(key, visit, now_s, was_read=False)
        if level == DEFAULT_LEVEL:
            return
        self._levels[key] = level
        self.levels_in_use = max(self.levels_in_use, level + 1)
        self._join(visit, level)

    def expect(self, key: K, after_s: float, now_s: float) -> None:
        """Expect a read of a present block; replaces what was expected before."""
        self._end_expected(key, was_read=False)
        expected = self._reads.begin(after_s, now_s)
        if expected is not None:
            self._expected[key] = expected

    def expected(self, key: K) -> ExpectedRead[K] | None:
        return self._expected.get(key)

    def home(self, key: K) -> Cohort[K] | None:
        """Return the cohort of a block whose expected read is believed, None for others."""
        expected = self._expected.get(key)
        if expected is not None and expected.is_over:
            del self._expected[key]
            return None
        return expected if expected is not None and self._reads.is_believed(expected) else None

    def touch(self, key: K, last: Visit[K], visit: Visit[K], now_s: float) -> None:
        """Record that a present block, last visited in `last`, is read in `visit`. Call after the log."""
        self._end_expected(key, was_read=True)
        level = self._drop_level(key, last, now_s, was_read=True)
        if level:
            self._levels[key] = level
            self._join(visit, level)

    def remove(self, key: K, last: Visit[K], now_s: float, *, was_read: bool) -> None:
        """Forget the hints of a block: a ghost that was stored again, so it was read; or that another node keeps."""
        self._end_expected(key, was_read=was_read)
        self._drop_level(key, last, now_s, was_read=was_read)

    def forget(self, key: K) -> None:
        """Forget the hints of a ghost that is forgotten."""
        self._expected.pop(key, None)
        self._levels.pop(key, None)

    def end_visit(self, visit: Visit[K]) -> None:
        """Begin to watch the blocks with a priority of a visit that has just ended."""
        levels, cohort = visit.levels, visit.cohort
        if levels is None or cohort is None:
            return
        visit.levels = None
        for level, blocks in enumerate(levels):
            if blocks:
                self._watch(cohort, level, blocks / visit.blocks)

    def advance(self, now_s: float, leaves_of: Callable[[Cohort[K]], Iterable[K]]) -> list[K]:
        """Pass expectations into the next part of their time; returns the leaves whose expectations count no longer.
        `leaves_of` returns those of a cohort.
        """
        return [key for expected in self._reads.advance(now_s) for key in leaves_of(expected)]

    def grow_older(self, cohort: Cohort[K], older: int) -> None:
        """Record that a cohort with priorities passes into an older bucket."""
        for level, weight in enumerate(cohort.levels or ()):
            if weight:
                self._reuse.grow_older(level, cohort.klass, cohort.bucket, older, weight, cohort.time_s)

    def stop_watching(self, cohort: Cohort[K], now_s: float) -> None:
        """Stop watching the blocks with a priority of a cohort that the log drops."""
        entered_s = cohort.time_s + EDGES_S[cohort.bucket]
        for level, weight in enumerate(cohort.levels or ()):
            if weight:
                self._reuse.leave(level, cohort.klass, cohort.bucket, weight, entered_s, now_s, was_read=False)
        cohort.levels = None

    def age(self, observations: int) -> None:
        self._reuse.age(observations)
        self._reads.age(observations)

    def worths(self, worths: NDArray[np.float64], tip_share: float, of_all: ReuseHazard, now_s: float) -> NDArray[np.float64]:
        """Return the worth of each ring in use, from those of the default level without hints, orphans last."""
        expected = np.repeat(self._reads.worth().ravel(), 2)
        expected[1::2] *= tip_share
        orphans = np.full(2 * BUCKETS, worths[-1])
        by_class, by_level = self._reuse.weights(of_all, now_s)
        by_ring = np.repeat(by_class, 2 * BUCKETS, axis=1)
        levels = range(self.levels_in_use)
        return np.concatenate([part for level in levels for part in (worths[:-1] * by_ring[level], orphans, expected * by_level[level])])

    def check_integrity(self, is_known: Callable[[K], bool]) -> None:
        """Assert that hints belong to known blocks, present ones or ghosts. For tests."""
        assert all(map(is_known, self._levels))
        assert all(map(is_known, self._expected))
        assert all(0 < level < self.levels_in_use for level in self._levels.values())
        self._reads.check_integrity()

    def _join(self, visit: Visit[K], level: int) -> None:
        """Count a block of this level in its visit."""
        if visit.cohort is not None:
            self._watch(visit.cohort, level, 1 / visit.blocks)
            return
        if visit.levels is None:
            visit.levels = [0] * LEVELS
        visit.levels[level] += 1

    def _watch(self, cohort: Cohort[K], level: int, weight: float) -> None:
        if not cohort.is_watched:
            return
        if cohort.levels is None:
            cohort.levels = [0.0] * LEVELS
        cohort.levels[level] += weight
        self._reuse.enter(level, cohort.klass, cohort.bucket, weight, cohort.time_s + EDGES_S[cohort.bucket])

    def _drop_level(self, key: K, visit: Visit[K], now_s: float, *, was_read: bool) -> int:
        """Remove and return the level of a block."""
        level = self._levels.pop(key, DEFAULT_LEVEL)
        cohort = visit.cohort
        if level and visit.levels is not None:
            visit.levels[level] -= 1
        elif level and cohort is not None and cohort.is_watched and cohort.levels is not None:
            share = min(1 / visit.blocks, cohort.levels[level])
            cohort.levels[level] -= share
            entered_s = cohort.time_s + EDGES_S[cohort.bucket]
            self._reuse.leave(level, cohort.klass, cohort.bucket, share, entered_s, now_s, was_read=was_read)
        return level

    def _end_expected(self, key: K, *, was_read: bool) -> None:
        expected = self._expected.pop(key, None)
        if expected is not None:
            self._reads.end(expected, was_read=was_read)
