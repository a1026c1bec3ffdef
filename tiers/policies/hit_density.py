"""Hit densities, as LHD learns them from how keys of a class fared at each age. It knows no keys.

Ages are in epochs, whatever the caller means by one.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

DECAY: Final = 0.95
"""Weight that what was seen before an estimate has in the next one."""
CLASSES: Final = 16
"""The paper: more bring nothing."""
EXACT_AGES: Final = 16
AGES: Final = EXACT_AGES + 8 * 20
"""Ages told apart: each one up to 15 epochs, then eight to each doubling."""


class DensityModel:
    """Ends of lives by class and age, hits and others, and the densities they let expect: hits for an epoch of stay.

    Source: Beckmann, Chen, Cidon, LHD: Improving cache hit rate by maximizing hit density, NSDI 2018.
    """

    def __init__(self) -> None:
        self._hits = [0] * (CLASSES * AGES)
        self._losses = [0] * (CLASSES * AGES)
        self._hit_mass = np.zeros((CLASSES, AGES))
        self._mass = np.zeros((CLASSES, AGES))
        classes, ages = np.arange(1, CLASSES + 1), np.cumsum(_WIDTHS)
        # To begin with, what was used lately, and again soon, is better.
        self._densities: list[float] = (1 / np.outer(classes, ages)).ravel().tolist()

    def add_hit(self, class_: int, age: int) -> None:
        """A key of the class was used at that age."""
        self._hits[class_ * AGES + _age_index(age)] += 1

    def add_loss(self, class_: int, age: int) -> None:
        """A key of the class was given up at that age."""
        self._losses[class_ * AGES + _age_index(age)] += 1

    def density(self, class_: int, age: int) -> float:
        """0 for an age at which nothing was heard of the class, nor later."""
        return self._densities[class_ * AGES + _age_index(age)]

    def estimate(self) -> None:
        """Take over what was counted since the last call. O(CLASSES x AGES).

        Of those that get to an age: the hits from there on, over the epochs they live on from there.
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
    """Of each row, the sum from each place to the end."""
    return np.flip(np.cumsum(np.flip(values, axis=1), axis=1), axis=1)


_WIDTHS: Final = np.array([1.0] * EXACT_AGES + [2.0 ** (1 + octave) for octave in range(20) for _ in range(8)])
"""Epochs in each age told apart."""
