"""LHD: evicts the key with the lowest hit density, that is expected hits per expected time in the cache.

The expectation is learned from keys of the same class and age. Time is counted in uses, ages in epochs of 1/16 of the
capacity's worth of uses. Keys of one class whose last use was in the same epoch form a cohort and share a density,
which changes only with the epoch. Cohorts are therefore ranked once per epoch, where the paper ranks a sample of keys
for each victim.

A class that is always evicted at once would never show hits. The paper keeps a few keys for exploration; here evicted
keys are remembered as ghosts, and a life ends as a hit or a loss when the ghost returns or is dropped.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.tiers.policies.interface import EvictionPolicy, K, ObservedCapacity

DECAY: Final = 0.95
"""Weight of earlier observations in the next estimate."""

CLASSES: Final = 16
"""From the paper: more classes gain nothing."""

EXACT_AGES: Final = 16

AGES: Final = EXACT_AGES + 8 * 20
"""Distinguished ages: each up to 15 epochs, then eight per power of two."""

EPOCHS_PER_CAPACITY: Final = 16

MIN_EPOCH_USES: Final = 16

EPOCHS_PER_MODEL: Final = 8
"""Epochs between two estimates of the densities."""

GHOSTS_PER_KEY: Final = 1
"""Ghosts per key of the capacity."""


class DensityModel:
    """Hits and other ends of lives by class and age, and the hit densities that follow: hits per epoch.

    Source: Beckmann, Chen, Cidon, LHD: Improving cache hit rate by maximizing hit density, NSDI 2018.
    """

    def __init__(self) -> None:
        self._hits = [0] * (CLASSES * AGES)
        self._losses = [0] * (CLASSES * AGES)
        self._hit_mass = np.zeros((CLASSES, AGES))
        self._mass = np.zeros((CLASSES, AGES))
        classes, ages = np.arange(1, CLASSES + 1), np.cumsum(_WIDTHS)
        # Initially, density falls with age and with the class's reuse interval.
        self._densities: list[float] = (1 / np.outer(classes, ages)).ravel().tolist()

    def add_hit(self, class_: int, age: int) -> None:
        """Count a use of a key of the class at that age."""
        self._hits[class_ * AGES + _age_index(age)] += 1

    def add_loss(self, class_: int, age: int) -> None:
        """Count a loss of a key of the class at that age."""
        self._losses[class_ * AGES + _age_index(age)] += 1

    def density(self, class_: int, age: int) -> float:
        """Return the density; 0 for an age at and after which nothing was observed."""
        return self._densities[class_ * AGES + _age_index(age)]

    def estimate(self) -> None:
        """Update the densities with the counts since the last call. O(CLASSES x AGES).

        For the keys that reach an age: the hits from there on, divided by the epochs that they live on.
        """
        hits = np.asarray(self._hits, dtype=float).reshape(CLASSES, AGES)
        losses = np.asarray(self._losses, dtype=float).reshape(CLASSES, AGES)
        self._hits = [0] * (CLASSES * AGES)
        self._losses = [0] * (CLASSES * AGES)
        self._hit_mass = DECAY * self._hit_mass + hits
        self._mass = DECAY * self._mass + hits + losses
        lifetimes = _sum_from(_sum_from(self._mass) * _WIDTHS)
        later_hits = _sum_from(self._hit_mass)
        self._densities = np.divide(later_hits, lifetimes, out=np.zeros_like(lifetimes), where=lifetimes > 0).ravel().tolist()


def _age_index(age: int) -> int:
    if age < EXACT_AGES:
        return age
    octave = age.bit_length() - 5
    return min(EXACT_AGES + 8 * octave + (age >> (octave + 1) & 7), AGES - 1)


def _sum_from(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return suffix sums of each row."""
    return np.flip(np.cumsum(np.flip(values, axis=1), axis=1), axis=1)


_WIDTHS: Final = np.array([1.0] * EXACT_AGES + [2.0 ** (1 + octave) for octave in range(20) for _ in range(8)])
"""Epochs in each distinguished age."""


class LHD(EvictionPolicy[K]):
    """Cohorts in the order of their densities. A key's class is the power of two of the sum of its last two ages at a
    use; the last class is of keys used once. A touch is O(1), an eviction O(log n) amortised. Deterministic.

    Source: Beckmann, Chen, Cidon, LHD: Improving cache hit rate by maximizing hit density, NSDI 2018.
    """

    name = "lhd"

    def __init__(self) -> None:
        self._cohorts: dict[K, _Cohort[K]] = {}
        self._keys = self._cohorts
        self._hit_age: dict[K, int] = {}
        """Key, present or ghost -> epochs between its last two uses, if there were two."""
        self._ghosts: OrderedDict[K, tuple[int, int]] = OrderedDict()
        """Evicted key -> (class, epoch of its last use)."""
        self._model = DensityModel()
        self._capacity = ObservedCapacity()
        self._epoch = 0
        self._uses_left = MIN_EPOCH_USES
        self._newest: list[_Cohort[K]] = []
        """By class, the cohorts of keys used now."""
        self._ranked: list[_Cohort[K]] = []
        self._first = 0
        """Index of the first cohort that may have keys."""
        self._rank()

    def insert(self, key: K, parent: K | None = None) -> None:
        if key in self._cohorts:
            self.touch(key)
            return
        ghost = self._ghosts.pop(key, None)
        if ghost is None:
            self._join(key, CLASSES - 1)
        else:
            self._use(key, *ghost)
        while len(self._ghosts) > GHOSTS_PER_KEY * max(self._capacity.keys, len(self)):
            lost, (class_, epoch) = self._ghosts.popitem(last=False)
            self._model.add_loss(class_, self._epoch - epoch)
            self._hit_age.pop(lost, None)

    def touch(self, key: K) -> None:
        cohort = self._cohorts.get(key)
        if cohort is not None:
            del cohort[key]
            self._use(key, cohort.class_, cohort.epoch)

    def _use(self, key: K, class_: int, epoch: int) -> None:
        """Record a use of a key of that class, last used in that epoch."""
        age = self._epoch - epoch
        self._model.add_hit(class_, age)
        ages = age + self._hit_age.get(key, 0)
        self._hit_age[key] = age
        self._join(key, min(ages.bit_length(), CLASSES - 2))

    def _join(self, key: K, class_: int) -> None:
        cohort = self._cohorts[key] = self._newest[class_]
        cohort[key] = None
        self._first = min(self._first, cohort.rank)
        self._uses_left -= 1
        if not self._uses_left:
            self._end_epoch()

    def _end_epoch(self) -> None:
        self._epoch += 1
        self._uses_left = max(MIN_EPOCH_USES, max(self._capacity.keys, len(self)) // EPOCHS_PER_CAPACITY)
        if self._epoch % EPOCHS_PER_MODEL == 0:
            self._model.estimate()
        self._rank()

    def _rank(self) -> None:
        """Order the cohorts that have keys, and those of the new epoch, by density; among equals the older one is
        first.
        """
        density, now = self._model.density, self._epoch
        self._newest = [_Cohort(now, class_) for class_ in range(CLASSES)]
        present = [cohort for cohort in self._ranked if cohort]
        self._ranked = sorted(present + self._newest, key=lambda cohort: (density(cohort.class_, now - cohort.epoch), cohort.epoch))
        for rank, cohort in enumerate(self._ranked):
            cohort.rank = rank
        self._first = 0

    def remove(self, key: K) -> None:
        cohort = self._cohorts.pop(key, None)
        if cohort is not None:
            del cohort[key]
            self._ghosts[key] = cohort.class_, cohort.epoch

    def victim(self, evictable: Callable[[K], bool] = lambda key: True) -> K | None:
        self._capacity.observe(len(self))
        if not self._cohorts:
            return None
        while not self._ranked[self._first]:
            self._first += 1
        return next(filter(evictable, self._in_order()), None)

    def next_victims(self, count: int, evictable: Callable[[K], bool] = lambda key: True) -> list[K]:
        return list(islice(filter(evictable, self._in_order()), count))

    def _in_order(self) -> Iterator[K]:
        return islice(chain.from_iterable(islice(self._ranked, self._first, None)), self.max_scan)

    def check_integrity(self) -> None:
        assert sum(map(len, self._ranked)) == len(self._cohorts)
        assert all(key in cohort for key, cohort in self._cohorts.items())
        assert all(cohort.rank == rank for rank, cohort in enumerate(self._ranked))
        assert not any(self._ranked[: self._first])
        assert not self._ghosts.keys() & self._cohorts.keys()
        assert self._hit_age.keys() <= self._cohorts.keys() | self._ghosts.keys()
        assert self._uses_left > 0


class _Cohort(OrderedDict[K, None]):
    """Keys of one class last used in one epoch, in order of use."""

    __slots__ = ("class_", "epoch", "rank")

    def __init__(self, epoch: int, class_: int) -> None:
        super().__init__()
        self.epoch = epoch
        self.class_ = class_
        self.rank = 0
