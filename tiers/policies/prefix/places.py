"""Policies of a tenant as their shared model sees them: one place per slot group of a tier, with the order of its leaves."""

from collections.abc import Iterator
from typing import Generic

from kvstore.tiers.policies.interface import K
from kvstore.tiers.policies.prefix.cohort_order import CohortOrder, Ranking
from kvstore.tiers.policies.prefix.visits import Cohort


class Place(Generic[K]):
    """One policy: a slot group of a tier."""

    __slots__ = ("count", "order", "tier")

    def __init__(self, tier: int, ranking: Ranking) -> None:
        self.tier = tier
        """0 is the fastest."""
        self.order: CohortOrder[K] = CohortOrder(ranking)
        self.count = 0
        """Blocks in it."""


class Places(Generic[K]):
    """All policies of a tenant. Iteration yields each place."""

    def __init__(self) -> None:
        self.are_several = False
        """True if a block may be in more than one policy, and be a leaf in some of them only."""
        self._all: list[Place[K]] = []
        self._together: dict[tuple[Place[K], ...], tuple[Place[K], ...]] = {}
        """Places of blocks: blocks in the same policies share one tuple."""

    def open(self, tier: int, ranking: Ranking) -> tuple[Place[K], ...]:
        """Add a policy. Returns the places of blocks that are in it alone."""
        place: Place[K] = Place(tier, ranking)
        self._all.append(place)
        self.are_several = len(self._all) > 1
        return self.together((place,))

    def close(self, place: Place[K]) -> bool:
        """Remove an empty policy. Returns True if it was the last one."""
        self._all.remove(place)
        self.are_several = len(self._all) > 1
        self._together = {places: places for places in self._together if place not in places}
        return not self._all

    def together(self, places: tuple[Place[K], ...]) -> tuple[Place[K], ...]:
        """Return the one tuple of these places, fastest first."""
        places = tuple(sorted(places, key=lambda place: place.tier))
        return self._together.setdefault(places, places)

    def rank(self, ranking: Ranking) -> None:
        """Order the rings of all policies."""
        for place in self._all:
            place.order.rank(ranking)

    def grow_older(self, cohort: Cohort[K], bucket: int) -> None:
        """Move the cohort's leaves before it passes into `bucket`."""
        for place in self._all:
            place.order.grow_older(cohort, bucket)

    def leaves_of(self, cohort: Cohort[K]) -> set[K]:
        """Return the blocks filed in the cohort, in any policy."""
        return {key for place in self._all for key in place.order.leaves_of(cohort)}

    def __iter__(self) -> Iterator[Place[K]]:
        return iter(self._all)
