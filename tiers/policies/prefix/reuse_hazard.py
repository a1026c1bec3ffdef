"""Online model of reuse by class and age, and the worth of a cached block that follows from it. Pure arithmetic.

The model is a hazard rate: reads divided by time at risk, per class and age bucket. Blocks still being watched count
for the time so far. A class with few reads takes the common shape of all classes, scaled by its own rate. Unobserved
ages are assumed to be read no more than younger ones, so without any read the order is by recency.

A block's worth is its Gittins index: the largest hit rate that its slot can earn by keeping the block until some age,
with hits and time counted until the first hit. The index looks ahead: a conversation's blocks are worth more than their
current rate while the user types. Source: Gittins, Bandit Processes and Dynamic Allocation Indices, J. Royal
Statistical Society B, 1979.
"""

from bisect import bisect_right
from typing import Final

import numpy as np
from numpy.typing import NDArray

FIRST_EDGE_S: Final = 1 / 8
GROWTH: Final = 1.5
"""Ratio of consecutive bucket edges. Finer buckets learn more slowly and did no better on traces."""
EDGES_S: Final = (0.0, *(FIRST_EDGE_S * GROWTH**step for step in range(31)))
"""Lower edges of the age buckets; the last one begins at 6.6 hours and is unbounded."""
BUCKETS: Final = len(EDGES_S)
WIDTHS_S: Final = tuple(upper - lower for lower, upper in zip(EDGES_S, (*EDGES_S[1:], EDGES_S[-1] * GROWTH), strict=True))
HALF_LIFE: Final = 16_384.0
"""Observations after which an old one counts half."""
CLASS_PRIOR: Final = 10.0
"""Least weight of the common shape, in observations per bucket of a class."""
CLASS_PRIOR_READS: Final = 0.07
"""Least weight of the common shape, in expected reads: unread blocks teach little where reads are rare anyway. Without
it a class's observed ages fall below its unobserved ones, and new blocks leave before old ones.
"""
SCALE_PRIOR: Final = 10.0
"""Weight of the common rate, in reads of a class."""
SHAPE_PRIOR: Final = 15.0
"""Least weight of the previous bucket, in observations per bucket."""
SHAPE_PRIOR_READS: Final = 0.1
"""Least weight of the previous bucket, in expected reads."""
UNSEEN: Final = 0.02
"""Assumed probability of a read within one bucket, without observations; the first bucket is twice as wide as the next."""
FADING: Final = 0.8
"""Fraction of a bucket's excess over UNSEEN that the next one is assumed to keep. A shortfall is kept whole."""
YOUNG_BUCKETS: Final = 7
"""Each of these buckets, up to an age of 1.4 s, is worth more than the next: an engine may be about to read what another
has just stored. Up to 16 s instead costs .0024 of the hit ratio at 10,000 blocks.
"""
YOUNGER: Final = 1.001
"""Least ratio of worths of consecutive young buckets; more than 1, so that the older block leaves first."""


_WIDTHS_S: Final = np.array(WIDTHS_S)
_UNSEEN_SHARES: Final = (UNSEEN * WIDTHS_S[0] / WIDTHS_S[1], *(UNSEEN,) * (BUCKETS - 1))
_BEGINS: Final = np.triu_indices(BUCKETS)[0]
_ENDS: Final = np.triu_indices(BUCKETS)[1] + 1
"""Ages at which a block may be kept from and until, as indices of edges: each pair, by the first."""
_FIRST_ENDS: Final = np.flatnonzero(np.diff(_BEGINS, prepend=-1))


def bucket_of(age_s: float) -> int:
    """Return the bucket of an age of 0 seconds or more."""
    return bisect_right(EDGES_S, age_s) - 1


class ReuseHazard:
    """Reads and time at risk of `classes` classes. Weights are fractions of an observation: a prompt's blocks count as
    one together.
    """

    def __init__(self, classes: int) -> None:
        self._shape = (classes, BUCKETS)
        cells = classes * BUCKETS
        self._readings = [0.0] * cells
        self._risk_s = [0.0] * cells
        self._watched = [0.0] * cells
        """Weight in the bucket now; and weight times entry time, which gives the time at risk at any moment."""
        self._watched_since = [0.0] * cells
        self._others: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None

    def enter(self, klass: int, bucket: int, weight: float, at_s: float) -> None:
        """Begin to watch `weight` in this bucket."""
        cell = klass * BUCKETS + bucket
        self._watched[cell] += weight
        self._watched_since[cell] += weight * at_s

    def read(self, klass: int, bucket: int, weight: float, entered_s: float, now_s: float) -> None:
        """End watching `weight` that entered at `entered_s`: it was read."""
        cell = klass * BUCKETS + bucket
        self._watched[cell] -= weight
        self._watched_since[cell] -= weight * entered_s
        self._risk_s[cell] += weight * (now_s - entered_s)
        self._readings[cell] += weight

    def drop(self, klass: int, bucket: int, weight: float, entered_s: float, now_s: float) -> None:
        """End watching `weight` that entered at `entered_s` and was not read."""
        cell = klass * BUCKETS + bucket
        self._watched[cell] -= weight
        self._watched_since[cell] -= weight * entered_s
        self._risk_s[cell] += weight * (now_s - entered_s)

    def grow_older(self, klass: int, bucket: int, older: int, weight: float, began_s: float) -> None:
        """Move unread weight, watched since `began_s`, from one bucket into an older one through those between."""
        watched, since, risk_s = self._watched, self._watched_since, self._risk_s
        first = klass * BUCKETS
        watched[first + bucket] -= weight
        since[first + bucket] -= weight * (began_s + EDGES_S[bucket])
        for passed in range(bucket, older):
            risk_s[first + passed] += weight * WIDTHS_S[passed]
        watched[first + older] += weight
        since[first + older] += weight * (began_s + EDGES_S[older])

    def age(self, observations: int) -> None:
        """Discount earlier observations by the number made since the last call."""
        factor = 0.5 ** (observations / HALF_LIFE)
        self._readings = [count * factor for count in self._readings]
        self._risk_s = [time_s * factor for time_s in self._risk_s]

    def statistics(self, now_s: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the reads and the time at risk in seconds that were observed here. Shapes (classes, BUCKETS)."""
        readings = np.array(self._readings).reshape(self._shape)
        watched_s = now_s * np.array(self._watched) - np.array(self._watched_since)
        return readings, (np.array(self._risk_s) + np.maximum(watched_s, 0)).reshape(self._shape)

    def use_others(self, readings: NDArray[np.float64], risk_s: NDArray[np.float64]) -> None:
        """Count these reads and times at risk as observed, in place of those passed before. They do not age here."""
        self._others = readings, risk_s

    def worth(self, now_s: float) -> NDArray[np.float64]:
        """Return the index of a block in hits per second, raised for young blocks. Shape (classes, BUCKETS)."""
        share = self._read_share(now_s)
        survival = np.cumprod(np.hstack([np.ones((len(share), 1)), 1 - share[:, :-1]]), axis=1)
        # Hits of a slot, and the time it was occupied, from age 0 to the end of each bucket; a read falls in its middle on average.
        hits = _from_zero(survival * share)
        held_s = _from_zero(survival * _WIDTHS_S * (1 - share / 2))
        gained = hits[_ENDS] - hits[_BEGINS]
        taken_s = held_s[_ENDS] - held_s[_BEGINS]
        rates = np.divide(gained, taken_s, out=np.zeros_like(gained), where=taken_s > 0)
        worth = np.maximum.reduceat(rates, _FIRST_ENDS).T
        for bucket in reversed(range(YOUNG_BUCKETS)):
            np.maximum(worth[:, bucket], YOUNGER * worth[:, bucket + 1], out=worth[:, bucket])
        return worth

    def observed(self, now_s: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return `statistics`, with the time at risk in widths of the bucket."""
        readings, risk_s = self.statistics(now_s)
        return readings, risk_s / _WIDTHS_S

    def rate(self, now_s: float) -> NDArray[np.float64]:
        """Return the expected reads of a block that is in a bucket for as long as that is wide. Shape (classes, BUCKETS)."""
        return np.asarray(-np.log1p(-self._read_share(now_s)), np.float64)

    def _read_share(self, now_s: float) -> NDArray[np.float64]:
        """Return the probability that a block that enters a bucket is read in it. Shape (classes, BUCKETS), each in (0,
        1).
        """
        readings, risk_s = self.statistics(now_s)
        if self._others is not None:
            readings, risk_s = readings + self._others[0], risk_s + self._others[1]
        at_risk = risk_s / _WIDTHS_S
        common = _common_shape(readings.sum(axis=0), at_risk.sum(axis=0))
        scale = (readings.sum(axis=1) + SCALE_PRIOR) / ((at_risk * common).sum(axis=1) + SCALE_PRIOR)
        expected = common * scale[:, None]
        weight = np.maximum(CLASS_PRIOR, CLASS_PRIOR_READS / expected)
        rate = (readings + weight * expected) / (at_risk + weight)
        return np.asarray(1 - np.exp(-np.minimum(rate, 3.0)), np.float64)


def _common_shape(readings: NDArray[np.float64], at_risk: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rate of all classes together per bucket; with few observations, close to the previous bucket's."""
    shape = list[float]()
    relative = 1.0
    for unseen, read, exposed in zip(_UNSEEN_SHARES, readings.tolist(), at_risk.tolist(), strict=True):
        expected = unseen * relative
        weight = max(SHAPE_PRIOR, SHAPE_PRIOR_READS / expected)
        rate = (read + weight * expected) / (exposed + weight)
        shape.append(rate)
        relative = rate / unseen
        if relative > 1:
            relative = 1 + FADING * (relative - 1)
    return np.array(shape)


def _from_zero(steps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return cumulative sums along the rows, with a leading 0, transposed. Shape (columns + 1, rows)."""
    return np.vstack([np.zeros((1, len(steps))), np.cumsum(steps, axis=1).T])
