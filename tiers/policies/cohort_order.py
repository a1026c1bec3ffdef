"""Which cohort of leaves is evicted from first: a ring of cohorts for each class and age, and the rings in the order of their worth.

Two rings a class and bucket of age: for cohorts with leaves that are the last blocks of their prompts (tips), and with others; a cohort
with both is in both. One ring more, for orphans, comes before all others. It keeps no keys: those are in the cohorts.
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
    """Cohorts enter with their first leaf of a kind and leave with the last one; every operation is O(1) but `rank` and the iteration."""

    def __init__(self) -> None:
        self.orphans: Cohort[K] = Cohort(CLASSES, 0.0)
        """For blocks whose parent was evicted. They cannot be hit."""
        self._rings: list[OrderedDict[Cohort[K], None]] = [OrderedDict() for _ in range(RINGS + 1)]
        self._rank: list[int] = []
        self._by_rank: list[int] = []
        self._occupied = 0
        """A bit for each ring that is not empty, by rank: the lowest is the one to evict from."""
        self.rank([0.0] * RINGS)

    def rank(self, worths: Sequence[float]) -> None:
        """Order the rings by what a block there is worth: one number a ring, by class, bucket, and whether it is of tips."""
        self._by_rank = [ORPHANS, *sorted(range(RINGS), key=worths.__getitem__)]
        self._rank = [0] * (RINGS + 1)
        for rank, ring in enumerate(self._by_rank):
            self._rank[ring] = rank
        self._occupied = self._bits()

    def enter(self, cohort: Cohort[K], is_tip: bool) -> None:
        """The cohort has its first leaf of that kind."""
        self._enter((cohort.klass * BUCKETS + cohort.bucket) * 2 + is_tip, cohort)

    def leave(self, cohort: Cohort[K], is_tip: bool) -> None:
        """It has none any more."""
        self._leave((cohort.klass * BUCKETS + cohort.bucket) * 2 + is_tip, cohort)

    def grow_older(self, cohort: Cohort[K], bucket: int) -> None:
        """The cohort is about to pass into `bucket`."""
        for is_tip in (False, True):
            if cohort.leaves[is_tip]:
                self._leave(_ring_of(cohort, cohort.bucket) + is_tip, cohort)
                self._enter(_ring_of(cohort, bucket) + is_tip, cohort)

    def first(self) -> K | None:
        """The leaf that is worth least; None where there is no leaf."""
        if not self._occupied:
            return None
        ring = self._by_rank[(self._occupied & -self._occupied).bit_length() - 1]
        leaf = next(iter(next(iter(self._rings[ring])).leaves[ring & 1]))
        return leaf.first() if isinstance(leaf, VisitRun) else leaf

    def __iter__(self) -> Iterator[K]:
        """Every leaf, those worth least first."""
        occupied = self._occupied
        while occupied:
            lowest = occupied & -occupied
            occupied ^= lowest
            ring = self._by_rank[lowest.bit_length() - 1]
            for cohort in self._rings[ring]:
                yield from keys_in(cohort.leaves[ring & 1])

    def check_integrity(self) -> dict[K, tuple[Cohort[K], int]]:
        """Assert that each cohort is where it belongs; every leaf with its cohort, and 1 for a tip. For tests."""
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
    """The blocks that these leaves are, in order."""
    for leaf in leaves:
        if isinstance(leaf, VisitRun):
            yield from leaf
        else:
            yield leaf


def _ring_of(cohort: Cohort[K], bucket: int) -> int:
    """Of a cohort in this bucket, for leaves that are no tips; one more for those that are."""
    return (cohort.klass * BUCKETS + bucket) * 2
