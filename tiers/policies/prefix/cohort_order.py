"""Order of cohorts for eviction: rings of cohorts by class and age, ranked by the worth of their blocks.

Each class and age bucket has two rings: for cohorts with leaves that end a prompt (tips), and for cohorts with other
leaves; a cohort may be in both. One more ring, for orphans, comes before all others.

Hints add rings: classes of expected reads, whose buckets are the parts of the expected time; and all rings again for
each level of priority.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any, Final, Generic

import numpy as np
from numpy.typing import NDArray

from kvstore.tiers.policies.interface import K
from kvstore.tiers.policies.prefix.expected_reads import FIRST_EXPECTED, MAGNITUDES
from kvstore.tiers.policies.prefix.reuse_hazard import BUCKETS
from kvstore.tiers.policies.prefix.visits import CLASSES, Cohort, VisitRun, keys_in

RINGS: Final = CLASSES * BUCKETS * 2
"""Rings in use without hints, but for that of orphans, which follows them."""
LEVEL_RINGS: Final = (FIRST_EXPECTED + MAGNITUDES) * BUCKETS * 2
"""Rings of each level of priority: of classes of visits, one class for orphans, of classes of expected reads."""
ORPHANS_WORTH: Final = -1.0
"""Below that of all others."""


Ranking = tuple[list[int], list[int]]
"""Rank of each ring in use, and the rings by rank."""


def ranking_of(worths: NDArray[np.float64]) -> Ranking:
    """Rank the rings by the worth of their blocks: one number per ring in use, by level of priority, class, bucket and
    whether it is of tips. Shape (RINGS + 1,) without hints, else (levels * LEVEL_RINGS,).
    """
    by_rank = np.argsort(worths, kind="stable")
    ranks = np.empty_like(by_rank)
    ranks[by_rank] = np.arange(by_rank.size)
    return ranks.tolist(), by_rank.tolist()


class CohortOrder(Generic[K]):
    """Leaves of one policy. Operations are O(1) except `rank` and iteration.

    A leaf's kind is twice its level of priority, plus 1 if it ends its prompt.
    """

    def __init__(self, ranking: Ranking) -> None:
        self._rings: defaultdict[int, OrderedDict[Cohort[K], OrderedDict[Any, None]]] = defaultdict(OrderedDict)
        """By ring, its cohorts with their leaves, never none. Blocks stored alone consecutively are one leaf: their run."""
        self._occupied = 0
        """Bitmap of non-empty rings by rank; the lowest bit is the ring to evict from."""
        self._offsets: list[int] = []
        """Of the ring of each kind of leaves in use, from that of kind 0."""
        self._next_ring: int | None = None
        """That ring, once it is known."""
        self.rank(ranking)

    def rank(self, ranking: Ranking) -> None:
        """Order the rings."""
        self._rank, self._by_rank = ranking
        levels = max(1, len(self._rank) // LEVEL_RINGS)
        self._offsets = [level * LEVEL_RINGS + is_tip for level in range(levels) for is_tip in (0, 1)]
        self._occupied = self._bits()
        self._next_ring = None

    def file(self, leaf: Any, cohort: Cohort[K], kind: int, *, in_front: bool = False) -> None:
        """Add a leaf of the cohort."""
        ring = (cohort.klass * BUCKETS + cohort.bucket) * 2 + kind  # a call would cost a twentieth of a read
        if kind > 1:
            ring = ring_of(cohort, cohort.bucket, kind)
        cohorts = self._rings[ring]
        leaves = cohorts.get(cohort)
        if leaves is None:
            if not cohorts:
                self._occupied |= 1 << self._rank[ring]
                self._next_ring = None
            leaves = cohorts[cohort] = OrderedDict()
            cohort.filed += 1
        leaves[leaf] = None
        if in_front:
            leaves.move_to_end(leaf, last=False)

    def unfile(self, leaf: Any, cohort: Cohort[K], kind: int) -> None:
        """Remove a leaf."""
        ring = (cohort.klass * BUCKETS + cohort.bucket) * 2 + kind
        if kind > 1:
            ring = ring_of(cohort, cohort.bucket, kind)
        cohorts = self._rings[ring]
        leaves = cohorts[cohort]
        del leaves[leaf]
        if not leaves:
            del cohorts[cohort]
            cohort.filed -= 1
            if not cohorts:
                self._occupied ^= 1 << self._rank[ring]
                self._next_ring = None

    def replace(self, leaf: Any, other: Any, cohort: Cohort[K], kind: int) -> None:
        """Unfile a leaf, then file another in front of the same cohort, with the same kind of 0 or 1."""
        cohorts = self._rings[(cohort.klass * BUCKETS + cohort.bucket) * 2 + kind]
        leaves = cohorts[cohort]
        del leaves[leaf]
        if leaves:
            leaves[other] = None
            leaves.move_to_end(other, last=False)
        else:
            leaves[other] = None
            cohorts.move_to_end(cohort)  # as one that is filed again

    def last(self, cohort: Cohort[K], kind: int) -> Any:
        """Return the leaf that was filed last in the cohort, or None."""
        leaves = self._rings[ring_of(cohort, cohort.bucket, kind)].get(cohort)
        return next(reversed(leaves)) if leaves else None

    def leaves_of(self, cohort: Cohort[K]) -> list[K]:
        """Return the blocks filed in the cohort."""
        found: list[K] = []
        first = ring_of(cohort, cohort.bucket, 0)
        for offset in self._offsets:
            found += keys_in(self._rings[first + offset].get(cohort, ()))
        return found

    def grow_older(self, cohort: Cohort[K], bucket: int) -> None:
        """Move the cohort's leaves before it passes into `bucket`."""
        rings, rank = self._rings, self._rank
        first = (cohort.klass * BUCKETS + cohort.bucket) * 2
        step = (bucket - cohort.bucket) * 2
        for offset in self._offsets:
            ring = first + offset
            cohorts = rings.get(ring)
            if not cohorts or cohort not in cohorts:
                continue
            leaves = cohorts.pop(cohort)
            if not cohorts:
                self._occupied ^= 1 << rank[ring]
            ring += step
            cohorts = rings[ring]
            if not cohorts:
                self._occupied |= 1 << rank[ring]
            cohorts[cohort] = leaves
        self._next_ring = None

    def first(self) -> K | None:
        """Return the leaf of least worth, or None."""
        ring = self._next_ring
        if ring is None:
            if not self._occupied:
                return None
            ring = self._next_ring = self._by_rank[(self._occupied & -self._occupied).bit_length() - 1]
        cohorts = self._rings[ring]
        leaf = next(iter(cohorts[next(iter(cohorts))]))  # faster than by `values`
        found: K = leaf.first() if isinstance(leaf, VisitRun) else leaf
        return found

    def __iter__(self) -> Iterator[K]:
        """Iterate over all leaves, least worth first."""
        occupied = self._occupied
        while occupied:
            lowest = occupied & -occupied
            occupied ^= lowest
            ring = self._by_rank[lowest.bit_length() - 1]
            for leaves in self._rings[ring].values():
                yield from keys_in(leaves)

    def check_integrity(self) -> dict[K, tuple[Cohort[K], int]]:
        """Assert that each cohort is in its rings; returns each leaf with its cohort and kind. For tests."""
        filed = {}
        for ring, cohorts in self._rings.items():
            kind = _kind_of(ring)
            for cohort, leaves in cohorts.items():
                assert leaves
                assert ring == ring_of(cohort, cohort.bucket, kind)
                filed.update(dict.fromkeys(keys_in(leaves), (cohort, kind)))
        assert self._occupied == self._bits()
        assert self._next_ring in (None, self._by_rank[(self._occupied & -self._occupied).bit_length() - 1])
        return filed

    def _bits(self) -> int:
        ranks = np.zeros(len(self._rank), np.bool_)
        ranks[[self._rank[ring] for ring, cohorts in self._rings.items() if cohorts]] = True
        return int.from_bytes(np.packbits(ranks, bitorder="little").tobytes(), "little")


def ring_of(cohort: Cohort[K], bucket: int, kind: int) -> int:
    """Return the ring of a cohort in this bucket for leaves of this kind."""
    return (cohort.klass * BUCKETS + bucket) * 2 + (kind & 1) + (kind >> 1) * LEVEL_RINGS


def _kind_of(ring: int) -> int:
    return ring // LEVEL_RINGS * 2 + (ring & 1)
