"""Order of cohorts for eviction: rings of cohorts by class and age, ranked by the worth of their blocks.

Each class and age bucket has two rings: for cohorts with leaves that end a prompt (tips), and for cohorts with other
leaves; a cohort may be in both. One more ring, for orphans, comes before all others. Keys are kept in the cohorts.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Generic

from kvstore.tiers.policies.interface import K
from kvstore.tiers.policies.reuse_hazard import BUCKETS
from kvstore.tiers.policies.visits import CLASSES, Cohort, Leaf, VisitRun

RINGS: Final = CLASSES * BUCKETS * 2
ORPHANS: Final = RINGS


class CohortOrder(Generic[K]):
    """A cohort enters with its first leaf of a kind and leaves with the last. Operations are O(1) except `rank` and
    iteration.
    """

    def __init__(self) -> None:
        self.orphans: Cohort[K] = Cohort(CLASSES, 0.0)
        """Blocks whose parent was evicted: they cannot be hit."""
        self._rings: list[OrderedDict[Cohort[K], None]] = [OrderedDict() for _ in range(RINGS + 1)]
        self._rank: list[int] = []
        self._by_rank: list[int] = []
        self._occupied = 0
        """Bitmap of non-empty rings by rank; the lowest bit is the ring to evict from."""
        self.rank([0.0] * RINGS)

    def rank(self, worths: Sequence[float]) -> None:
        """Order the rings by the worth of their blocks: one number per ring, by class, bucket and whether it is of
        tips.
        """
        self._by_rank = [ORPHANS, *sorted(range(RINGS), key=worths.__getitem__)]
        self._rank = [0] * (RINGS + 1)
        for rank, ring in enumerate(self._by_rank):
            self._rank[ring] = rank
        self._occupied = self._bits()

    def enter(self, cohort: Cohort[K], is_tip: bool) -> None:
        """Add a cohort that has its first leaf of that kind."""
        self._enter((cohort.klass * BUCKETS + cohort.bucket) * 2 + is_tip, cohort)

    def leave(self, cohort: Cohort[K], is_tip: bool) -> None:
        """Remove a cohort that has no leaf of that kind any more."""
        self._leave((cohort.klass * BUCKETS + cohort.bucket) * 2 + is_tip, cohort)

    def grow_older(self, cohort: Cohort[K], bucket: int) -> None:
        """Move the cohort's rings before it passes into `bucket`."""
        for is_tip in (False, True):
            if cohort.leaves[is_tip]:
                self._leave(_ring_of(cohort, cohort.bucket) + is_tip, cohort)
                self._enter(_ring_of(cohort, bucket) + is_tip, cohort)

    def first(self) -> K | None:
        """Return the leaf of least worth, or None."""
        if not self._occupied:
            return None
        ring = self._by_rank[(self._occupied & -self._occupied).bit_length() - 1]
        leaf = next(iter(next(iter(self._rings[ring])).leaves[ring & 1]))
        return leaf.first() if isinstance(leaf, VisitRun) else leaf

    def __iter__(self) -> Iterator[K]:
        """Iterate over all leaves, least worth first."""
        occupied = self._occupied
        while occupied:
            lowest = occupied & -occupied
            occupied ^= lowest
            ring = self._by_rank[lowest.bit_length() - 1]
            for cohort in self._rings[ring]:
                yield from keys_in(cohort.leaves[ring & 1])

    def check_integrity(self) -> dict[K, tuple[Cohort[K], int]]:
        """Assert that each cohort is in its rings; returns each leaf with its cohort, and 1 for a tip. For tests."""
        filed = {}
        for ring, cohorts in enumerate(self._rings):
            for cohort in cohorts:
                assert cohort.leaves[ring & 1]
                assert ring == _ring_of(cohort, cohort.bucket) + (ring & 1)
                filed.update(dict.fromkeys(keys_in(cohort.leaves[ring & 1]), (cohort, ring & 1)))
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
        return sum(1 << self._rank[ring] for ring, cohorts in enumerate(self._rings) if cohorts)


def keys_in(leaves: "Iterable[Leaf[K]]") -> Iterator[K]:
    """Yield the blocks of these leaves, in order."""
    for leaf in leaves:
        if isinstance(leaf, VisitRun):
            yield from leaf
        else:
            yield leaf


def _ring_of(cohort: Cohort[K], bucket: int) -> int:
    """Return the ring of a cohort in this bucket for leaves that are no tips; the ring of tips follows it."""
    return (cohort.klass * BUCKETS + bucket) * 2
