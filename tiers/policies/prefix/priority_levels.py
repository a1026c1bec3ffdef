"""Levels of priority, and their weights: how often blocks of a level are read, against other blocks of their class and age."""

from bisect import bisect_right
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.tiers.policies.prefix.reuse_hazard import ReuseHazard

DEFAULT_LEVEL: Final = 0
FIRST_TO_LEAVE: Final = 1
"""The level of priority 0."""
NOMINAL_WEIGHTS: Final = (1.0, 1e-6, 4.0, 2.0, 0.5)
"""Weights by level while nothing is known: default, priority 0, highest, high, low. Not 0, which would leave no order."""
LEVELS: Final = len(NOMINAL_WEIGHTS)
PRIOR: Final = 10.0
"""Weight of the nominal weight, in expected reads of visits."""
_LOWER_BOUNDS: Final = (1, 40, 61, 90)
_BY_BOUND: Final = (FIRST_TO_LEAVE, 4, DEFAULT_LEVEL, 3, 2)


_IS_RAISED: Final = np.array(NOMINAL_WEIGHTS) > 1


def level_of(priority: int) -> int:
    """Return the level of a priority from 0 to 100."""
    return _BY_BOUND[bisect_right(_LOWER_BOUNDS, priority)]


class LevelReuse:
    """Reads and time at risk of the blocks of each level but the default."""

    def __init__(self, classes: int) -> None:
        self._classes = classes
        self._seen = ReuseHazard((LEVELS - 1) * classes)

    def enter(self, level: int, klass: int, bucket: int, weight: float, at_s: float) -> None:
        """Begin to watch blocks of a level, as ReuseHazard does."""
        self._seen.enter((level - 1) * self._classes + klass, bucket, weight, at_s)

    def leave(self, level: int, klass: int, bucket: int, weight: float, entered_s: float, now_s: float, *, was_read: bool) -> None:
        leave = self._seen.read if was_read else self._seen.drop
        leave((level - 1) * self._classes + klass, bucket, weight, entered_s, now_s)

    def grow_older(self, level: int, klass: int, bucket: int, older: int, weight: float, began_s: float) -> None:
        self._seen.grow_older((level - 1) * self._classes + klass, bucket, older, weight, began_s)

    def age(self, observations: int) -> None:
        self._seen.age(observations)

    def weights(self, of_all: ReuseHazard, now_s: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the factor of the worth by level and class, and by level over all classes; 1 for the default level.
        Shapes (LEVELS, classes) and (LEVELS,).

        The second moves from the nominal weight to the measured one: reads over those that class and age predict. The
        first moves from the second to the one measured in the class, as far as the class has blocks of the level and of
        the default: one priority for all blocks must not reorder classes. A priority above the default never lowers the
        worth, one below never raises it.
        """
        rate = of_all.rate(now_s)
        all_readings, all_at_risk = of_all.observed(now_s)
        readings, at_risk = (found.reshape(LEVELS - 1, *rate.shape) for found in self._seen.observed(now_s))
        read = _with_default(all_readings.sum(axis=1), readings.sum(axis=2))
        expected = _with_default((rate * all_at_risk).sum(axis=1), (rate * at_risk).sum(axis=2))
        # Rates are smoothed and limited: all levels together are read as often as expected.
        expected *= (read.sum(axis=0) + PRIOR) / (expected.sum(axis=0) + PRIOR)
        by_level = (read.sum(axis=1) + PRIOR * np.array(NOMINAL_WEIGHTS)) / (expected.sum(axis=1) + PRIOR)
        by_level /= by_level[DEFAULT_LEVEL]
        by_class = (read + PRIOR * by_level[:, None]) / (expected + PRIOR)
        by_class /= by_class[DEFAULT_LEVEL]
        compared = np.minimum(expected, expected[DEFAULT_LEVEL])
        by_class = by_level[:, None] + compared / (compared + PRIOR) * (by_class - by_level[:, None])
        return _limited(by_class.T).T, _limited(by_level)


def _with_default(of_all: NDArray[np.float64], of_levels: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return counts of all levels by class. Shape (LEVELS, classes)."""
    return np.vstack([np.maximum(of_all - of_levels.sum(axis=0), 0), of_levels])


def _limited(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return weights, by level in the last axis, on their side of 1."""
    return np.where(_IS_RAISED, np.maximum(weights, 1), np.minimum(weights, 1))
