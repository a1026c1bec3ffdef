"""How soon blocks are read again, by class and age, learned online; and from that what keeping one is worth. Pure arithmetic.

Of each class it is known how many readings happened in each bucket of age and for how long blocks of that age were watched, so a rate is
readings by time at risk: what is still being watched counts for as long as it has been. A class with few readings takes the shape of all
classes together, scaled by how often it was read beside them; ages nobody has seen yet are taken to be read ever less.

The worth of a block is its Gittins index: the most hits a second that can be had from its place by keeping it until some age, hits and time
both counted until the first of them. It looks ahead: a conversation's blocks are worth more than their present rate while their user types.
Source: Gittins, Bandit Processes and Dynamic Allocation Indices, J. Royal Statistical Society B, 1979.
"""

from bisect import bisect_right
from typing import Final

import numpy as np
from numpy.typing import NDArray

FIRST_EDGE_S: Final = 1 / 8
GROWTH: Final = 1.5
"""Of one bucket's upper edge over the last one's: finer ones learn more slowly, and did no better on traces."""
EDGES_S: Final = (0.0, *(FIRST_EDGE_S * GROWTH**step for step in range(31)))
"""Where the buckets of age begin; the last one begins at 6.6 hours and has no end."""
BUCKETS: Final = len(EDGES_S)
WIDTHS_S: Final = tuple(upper - lower for lower, upper in zip(EDGES_S, (*EDGES_S[1:], EDGES_S[-1] * GROWTH), strict=True))
HALF_LIFE: Final = 16_384.0
"""Observations after which an old one counts half: the service of today is not that of last month."""
CLASS_PRIOR: Final = 10.0
"""Observations in a bucket below which a class goes by the shape of all classes more than by its own."""
SCALE_PRIOR: Final = 10.0
"""Readings below which a class is taken to be read as often as all classes."""
SHAPE_PRIOR: Final = 15.0
"""Observations in a bucket below which it goes by the bucket before it."""
UNSEEN: Final = 0.02
"""Share of what is watched that is read within one bucket, where nothing is known."""
FADING: Final = 0.8
"""How much of a bucket's distance from UNSEEN the next one is expected to keep."""


_WIDTHS_S: Final = np.array(WIDTHS_S)
_NOT_EARLIER: Final = np.triu(np.ones((BUCKETS, BUCKETS), bool))


def bucket_of(age_s: float) -> int:
    """The bucket of an age of 0 seconds or more."""
    return bisect_right(EDGES_S, age_s) - 1


class ReuseHazard:
    """Readings and time at risk of `classes` classes. Weights are shares of an observation: a prompt's blocks count as one together."""

    def __init__(self, classes: int) -> None:
        self._shape = (classes, BUCKETS)
        cells = classes * BUCKETS
        self._readings = [0.0] * cells
        self._risk_s = [0.0] * cells
        self._watched = [0.0] * cells
        """Weight that is in the bucket now; and the same times when it came in, so that its time at risk is known at any moment."""
        self._watched_since = [0.0] * cells

    def enter(self, klass: int, bucket: int, weight: float, at_s: float) -> None:
        """Something is watched in this bucket from now on."""
        cell = klass * BUCKETS + bucket
        self._watched[cell] += weight
        self._watched_since[cell] += weight * at_s

    def leave(self, klass: int, bucket: int, weight: float, entered_s: float, now_s: float, *, was_read: bool) -> None:
        """It has left the bucket that it had entered at `entered_s`: read, or forgotten."""
        cell = klass * BUCKETS + bucket
        self._watched[cell] -= weight
        self._watched_since[cell] -= weight * entered_s
        self._risk_s[cell] += weight * (now_s - entered_s)
        if was_read:
            self._readings[cell] += weight

    def grow_older(self, klass: int, bucket: int, older: int, weight: float, began_s: float) -> None:
        """What has been watched since `began_s` passes unread from one bucket into an older one, through those between."""
        cell = klass * BUCKETS + bucket
        self._watched[cell] -= weight
        self._watched_since[cell] -= weight * (began_s + EDGES_S[bucket])
        for passed in range(bucket, older):
            self._risk_s[klass * BUCKETS + passed] += weight * WIDTHS_S[passed]
        self.enter(klass, older, weight, began_s + EDGES_S[older])

    def age(self, observations: int) -> None:
        """So many observations have been made since the last call: older ones count less."""
        factor = 0.5 ** (observations / HALF_LIFE)
        self._readings = [count * factor for count in self._readings]
        self._risk_s = [time_s * factor for time_s in self._risk_s]

    def worth(self, now_s: float) -> NDArray[np.float64]:
        """Shape (classes, BUCKETS): the index of a block in hits a second."""
        share = self._read_share(now_s)
        survival = np.cumprod(np.hstack([np.ones((len(share), 1)), 1 - share[:, :-1]]), axis=1)
        # What a place has earned and how long it was taken, from age 0 to the end of each bucket; those read go half way through it.
        hits = _from_zero(survival * share)
        held_s = _from_zero(survival * _WIDTHS_S * (1 - share / 2))
        gained = hits[:, None, 1:] - hits[:, :-1, None]
        taken_s = held_s[:, None, 1:] - held_s[:, :-1, None]
        rates = np.divide(gained, taken_s, out=np.zeros_like(gained), where=_NOT_EARLIER & (taken_s > 0))
        return np.asarray(rates.max(axis=2), np.float64)

    def _read_share(self, now_s: float) -> NDArray[np.float64]:
        """Of what enters a bucket, the share that is read in it. Shape (classes, BUCKETS), each in (0, 1)."""
        readings = np.array(self._readings).reshape(self._shape)
        watched_s = now_s * np.array(self._watched) - np.array(self._watched_since)
        at_risk = (np.array(self._risk_s) + np.maximum(watched_s, 0)).reshape(self._shape) / _WIDTHS_S
        common = _common_shape(readings.sum(axis=0), at_risk.sum(axis=0))
        scale = (readings.sum(axis=1) + SCALE_PRIOR) / ((at_risk * common).sum(axis=1) + SCALE_PRIOR)
        rate = (readings + CLASS_PRIOR * common * scale[:, None]) / (at_risk + CLASS_PRIOR)
        return np.asarray(1 - np.exp(-np.minimum(rate, 3.0)), np.float64)


def _common_shape(readings: NDArray[np.float64], at_risk: NDArray[np.float64]) -> NDArray[np.float64]:
    """The rate in each bucket, of all classes together; where little was seen, from the bucket before."""
    shape = np.empty(BUCKETS)
    expected = UNSEEN
    for bucket in range(BUCKETS):
        shape[bucket] = (readings[bucket] + SHAPE_PRIOR * expected) / (at_risk[bucket] + SHAPE_PRIOR)
        expected = UNSEEN + FADING * (shape[bucket] - UNSEEN)
    return shape


def _from_zero(steps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cumulative sums along the rows, with a 0 before the first."""
    return np.hstack([np.zeros((len(steps), 1)), np.cumsum(steps, axis=1)])
