"""Estimate of reuse of a tenant's blocks, from their visits, their hints, and other nodes' statistics; and the ranking
of all leaves that follows from it.
"""

from collections.abc import Callable
from typing import Final, Generic

import numpy as np

from kvstore.tiers.policies.interface import K
from kvstore.tiers.policies.prefix.block_hints import BlockHints
from kvstore.tiers.policies.prefix.cohort_order import ORPHANS_WORTH, ranking_of, ring_of
from kvstore.tiers.policies.prefix.places import Places
from kvstore.tiers.policies.prefix.visits import CLASSES, Cohort, VisitLog
from kvstore.tiers.policies.reuse_statistics import ReuseStatistics

LEARN_BLOCKS: Final = 2048
"""Blocks seen between two computations of worths: 0.4 ms, 0.2 us per block. A batch counts at once."""
ADVANCE_S: Final = 0.125
"""Interval of ageing; the width of the youngest age bucket."""


class ReuseEstimate(Generic[K]):
    """Worth of the blocks in `places`, by cohort. `clock` gives monotonic seconds. Not thread-safe."""

    def __init__(self, places: Places[K], clock: Callable[[], float]) -> None:
        self.log: VisitLog[K] = VisitLog(places.grow_older)
        self.hints: BlockHints[K] | None = None
        """None until the first hint."""
        self._places = places
        self._clock = clock
        self._of_others = ReuseStatistics.none(CLASSES)
        self._seen_blocks = self._seen_visits = 0
        """In visits that ended since worths were computed."""
        self._advanced_s = clock()
        self.learn(self._advanced_s)

    def use_hints(self, now_s: float) -> BlockHints[K]:
        """Return the hints, which count from the first call on."""
        if self.hints is None:
            self.hints = BlockHints(self._places.grow_older)
            self.log.use_level_watcher(self.hints)
            self.learn(now_s)
        return self.hints

    def advance(self, now_s: float) -> list[K]:
        """Age cohorts when due. Returns the leaves whose hints count no longer, which the caller files again."""
        if now_s - self._advanced_s < ADVANCE_S:
            return []
        self._advanced_s = now_s
        self.log.advance(now_s)
        return self.hints.advance(now_s, self._places.leaves_of) if self.hints is not None else []

    def count_seen(self, blocks: int, visits: int, now_s: float) -> None:
        """Count blocks of visits that ended, and learn when due. Call after `advance`."""
        self._seen_blocks += blocks
        self._seen_visits += visits
        if self._seen_blocks >= LEARN_BLOCKS:
            self.log.hazard.age(self._seen_visits)
            if self.hints is not None:
                self.hints.age(self._seen_visits)
            self.learn(now_s)
            self._seen_blocks = self._seen_visits = 0

    def learn(self, now_s: float) -> None:
        """Order the cohorts by the current worth of their blocks."""
        tips_read, tips = self._of_others.tips.tolist()
        tip_share = (self.log.tips_read + tips_read) / (self.log.tips + tips)
        worths = np.repeat(self.log.hazard.worth(now_s).ravel(), 2)
        worths[1::2] *= tip_share
        worths = np.append(worths, ORPHANS_WORTH)
        self._worths = worths if self.hints is None else self.hints.worths(worths, tip_share, self.log.hazard, now_s)
        self.ranking = ranking_of(self._worths)
        self._places.rank(self.ranking)

    def worth(self, cohort: Cohort[K], kind: int) -> float:
        """Return the hits per second of a slot that holds a leaf of this kind of the cohort."""
        return float(self._worths[ring_of(cohort, cohort.bucket, kind)])

    def reuse_statistics(self) -> ReuseStatistics:
        """See PolicyFamily."""
        readings, risk_s = self.log.hazard.statistics(self._clock())
        return ReuseStatistics(readings, risk_s, np.array([self.log.tips_read - 1, self.log.tips - 1]))

    def use_statistics_of_others(self, statistics: ReuseStatistics) -> None:
        """See PolicyFamily."""
        self._of_others = statistics.limited().as_evidence_for(self.reuse_statistics())
        self.log.hazard.use_others(self._of_others.readings, self._of_others.risk_s)
        self._seen_blocks = max(self._seen_blocks, LEARN_BLOCKS)  # compute worths at the end of the next visit
