"""Order of cohorts for eviction: rings of cohorts by class and age, ranked by the worth of their blocks.

Each class and age bucket has two rings: for cohorts with leaves that end a prompt (tips), and for cohorts with other
leaves; a cohort may be in both. One more ring, for orphans, comes before all others. Keys are kept in the cohorts.

Hints add rings: classes of expected reads, whose buckets are the parts of the expected time; and all rings again for
each level of priority.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Final, Generic

import numpy as np
from numpy.typing import NDArray

from kvstore.tiers.policies.expected_reads import FIRST_EXPECTED, MAGNITUDES
from kvstore.tiers.policies.interface import K
from kvstore.tiers.policies.reuse_hazard import BUCKETS
from kvstore.tiers.policies.visits import CLASSES, Cohort, VisitRun, keys_in

RINGS: Final = CLASSES * BUCKETS * 2
"""Rings in use without hints, but for that of orphans, which follows them."""
LEVEL_RINGS: Final = (FIRST_EXPECTED + MAGNITUDES) * BUCKETS * 2
"""Rings of each level of priority: of classes of visits, one class for orphans, of classes of expected reads."""
ORPHANS_WORTH: Final = -1.0
"""Below that of all others."""


class CohortOrder(Generic[K]):
    """A cohort enters with its first leaf of a kind and leaves with the last. Operations are O(1) except `rank` and
    iteration.
    """

    def __init__(self) -> None:
        self.orphans: Cohort[K] = Cohort(CLASSES, 0.0)
        """Blocks whose parent was evicted: they cannot be hit."""
        self._rings: defaultdict[int, OrderedDict[Cohort[K], None]] = defaultdict(OrderedDict)
        self._rank: list[int] = []
        self._by_rank: list[int] = []
        self._occupied = 0
        """Bitmap of non-empty rings by rank; the lowest bit is the ring to evict from."""
        self.rank(np.append(np.zeros(RINGS), ORPHANS_WORTH))

    def rank(self, worths: NDArray[np.float64]) -> None:
        """Order the rings by the worth of their blocks: one number per ring in use, by level of priority, class, bucket
        and whether it is of tips. Shape (RINGS + 1,) without hints, else (levels * LEVEL_RINGS,).
        """
        by_rank = np.argsort(worths, kind="stable")
        rank = np.empty_like(by_rank)
        rank[by_rank] = np.arange(by_rank.size)
        self._by_rank, self._rank = by_rank.tolist(), rank.tolist()
        self._occupied = self._bits()

    def enter(self, cohort: Cohort[K], kind: int) -> None:
        """Add a cohort that has its first leaf of that kind: twice the level of priority, plus 1 for tips."""
        ring = (cohort.klass * BUCKETS + cohort.bucket) * 2 + kind  # a call would cost a twentieth of a read
        self._enter(ring if kind < 2 else _ring_of(cohort, cohort.bucket, kind), cohort)

    def leave(self, cohort: Cohort[K], kind: int) -> None:
        """Remove a cohort that has no leaf of that kind any more."""
        ring = (cohort.klass * BUCKETS + cohort.bucket) * 2 + kind
        self._leave(ring if kind < 2 else _ring_of(cohort, cohort.bucket, kind), cohort)

    def grow_older(self, cohort: Cohort[K], bucket: int) -> None:
        """Move the cohort's rings before it passes into `bucket`."""
        for kind, leaves in enumerate(cohort.leaves):
            if leaves:
                self._leave(_ring_of(cohort, cohort.bucket, kind), cohort)
                self._enter(_ring_of(cohort, bucket, kind), cohort)

    def first(self) -> K | None:
        """Return the leaf of least worth, or None."""
        if not self._occupied:
            return None
        ring = self._by_rank[(self._occupied & -self._occupied).bit_length() - 1]
        leaf = next(iter(next(iter(self._rings[ring])).leaves[_kind_of(ring)]))
        return leaf.first() if isinstance(leaf, VisitRun) else leaf

    def __iter__(self) -> Iterator[K]:
        """Iterate over all leaves, least worth first."""
        occupied = self._occupied
        while occupied:
            lowest = occupied & -occupied
            occupied ^= lowest
            ring = self._by_rank[lowest.bit_length() - 1]
            for cohort in self._rings[ring]:
                yield from keys_in(cohort.leaves[_kind_of(ring)])

    def check_integrity(self) -> dict[K, tuple[Cohort[K], int]]:
        """Assert that each cohort is in its rings; returns each leaf with its cohort and kind. For tests."""
        filed = {}
        for ring, cohorts in self._rings.items():
            kind = _kind_of(ring)
            for cohort in cohorts:
                assert cohort.leaves[kind]
                assert ring == _ring_of(cohort, cohort.bucket, kind)
                filed.update(dict.fromkeys(keys_in(cohort.leaves[kind]), (cohort, kind)))
        assert self._occupied == self._bits()
        return filed

    def _enter(self, ring: int, cohort: Cohort[K]) -> None:
        cohorts = self._rings[ring]
        if not cohorts:
            self._occupied |= 1 << self._rank[ring]
        cohorts[cohort] = None

    def _leave(self, ring: int, cohort: Cohort[K]) -> None:
        cohorts = self._rings[ring]
        del cohorts[cohort]
        if not cohorts:
            self._occupied ^= 1 << self._rank[ring]

    def _bits(self) -> int:
        return sum(1 << self._rank[ring] for ring, cohorts in self._rings.items() if cohorts)


def _ring_of(cohort: Cohort[K], bucket: int, kind: int) -> int:
    """Return the ring of a cohort in this bucket for leaves of this kind."""
    return (cohort.klass * BUCKETS + bucket) * 2 + (kind & 1) + (kind >> 1) * LEVEL_RINGS


def _kind_of(ring: int) -> int:
    return ring // LEVEL_RINGS * 2 + (ring & 1)
