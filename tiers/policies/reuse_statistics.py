"""Statistics of reuse that nodes exchange: what a policy has learned, as evidence for the policies of other nodes.

They are a state, not a change: the newest statistics of a node replace its former ones. Pure arithmetic.
"""

from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.protocol.errors import InvalidArgument
from kvstore.tiers.policies.prefix.reuse_hazard import BUCKETS, HALF_LIFE, WIDTHS_S

MAX_OBSERVATIONS: Final = HALF_LIFE
"""Observations that the statistics of one node, or of all others together, count as at most."""

WEIGHTS: Final = (1.0, 0.25, 1 / 16, 1 / 64, 0.0)
"""Weights of others' observations, the preferred first."""
SLACK: Final = 2.0
"""By how much the logarithm of the likelihood must grow for a lower weight. 0 and 6 give fewer hits."""
PRIOR: Final = 10.0
"""Observations per bucket of a class that the common rate of all own classes counts as. 3 gives fewer hits."""
PRIOR_READS: Final = 0.02
"""Reads in one observation that the common rate begins with."""

_WIDTHS_S: Final = np.array(WIDTHS_S)


@dataclass(frozen=True, slots=True, eq=False)
class ReuseStatistics:
    """Each number is finite and not negative. Weights are fractions of a visit, see ReuseHazard."""

    readings: NDArray[np.float64]
    """Reads by class and age bucket. Shape (classes, BUCKETS)."""
    risk_s: NDArray[np.float64]
    """Time at risk in seconds, including blocks that are still watched. Shape (classes, BUCKETS)."""
    tips: NDArray[np.float64]
    """Reads of prompts' last blocks, and visits of which any block was read. Shape (2,)."""

    @classmethod
    def none(cls, classes: int) -> "ReuseStatistics":
        """Return statistics without an observation."""
        return cls(np.zeros((classes, BUCKETS)), np.zeros((classes, BUCKETS)), np.zeros(2))

    def pack(self) -> bytes:
        """Return float32 values, little-endian: readings, then time at risk, row by row, then tips. Rounding errors
        below 0 become 0."""
        numbers = np.concatenate([self.readings, self.risk_s, self.tips], axis=None)
        return bytes(np.maximum(numbers, 0).astype("<f4"))

    @classmethod
    def unpack(cls, data: bytes, classes: int) -> "ReuseStatistics":
        """Raises InvalidArgument: another size, or a number that is negative or not finite."""
        cells = classes * BUCKETS
        if len(data) != 4 * (2 * cells + 2):
            raise InvalidArgument(f"statistics of reuse have {len(data)} bytes: {4 * (2 * cells + 2)} are right for {classes} classes")
        numbers = np.frombuffer(data, "<f4").astype(np.float64)
        if not (np.isfinite(numbers) & (numbers >= 0)).all():
            raise InvalidArgument("statistics of reuse have a number that is negative or not finite")
        return cls(numbers[:cells].reshape(classes, BUCKETS), numbers[cells : 2 * cells].reshape(classes, BUCKETS), numbers[2 * cells :])

    @property
    def observations(self) -> float:
        """Visits observed: those that passed the most frequented age bucket, or the reads if these are more."""
        return float(max((self.risk_s.sum(axis=0) / _WIDTHS_S).max(), self.readings.sum()))

    def limited(self, observations: float = MAX_OBSERVATIONS) -> "ReuseStatistics":
        """Return the statistics, scaled down to at most that many observations."""
        if self.observations <= observations and self.tips.max() <= observations:
            return self
        scale = min(1.0, observations / max(self.observations, 1.0))
        return ReuseStatistics(
            self.readings * scale, self.risk_s * scale, self.tips * min(1.0, observations / max(float(self.tips.max()), 1.0))
        )

    def as_evidence_for(self, own: "ReuseStatistics") -> "ReuseStatistics":
        """Return the statistics with the rows of each class weighted by how well they predict `own`.

        The weight is the one in WEIGHTS under which the class's own reads are most likely, with Gamma distributed rates
        (a power prior, chosen by its marginal likelihood). A class without observations of its own gets the full weight.
        Source: Ibrahim and Chen, Power Prior Distributions for Regression Models, Statistical Science 2000.
        """
        reads, exposure = own.readings, own.risk_s / _WIDTHS_S
        common = (reads.sum(axis=0) + PRIOR_READS) / (exposure.sum(axis=0) + 1)
        best, weights = np.full(len(reads), -np.inf), np.zeros(len(reads))
        for weight in WEIGHTS:
            shape = weight * self.readings + PRIOR * common
            rate = weight * self.risk_s / _WIDTHS_S + PRIOR
            likely = _log_gamma(shape + reads) - _log_gamma(shape) + shape * np.log(rate) - (shape + reads) * np.log(rate + exposure)
            total = likely.sum(axis=1)
            weights = np.where(total > best + SLACK, weight, weights)
            best = np.maximum(best, total)
        of_tips = float((weights * self.readings.sum(axis=1)).sum() / max(self.readings.sum(), 1e-9))
        return ReuseStatistics(self.readings * weights[:, None], self.risk_s * weights[:, None], self.tips * of_tips)

    def __add__(self, other: "ReuseStatistics") -> "ReuseStatistics":
        return ReuseStatistics(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def without(self, part: "ReuseStatistics") -> "ReuseStatistics":
        """Return the sum of which these are the statistics, without one of its summands."""
        return ReuseStatistics(*(np.maximum(getattr(self, field.name) - getattr(part, field.name), 0) for field in fields(self)))


def _log_gamma(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the logarithm of the gamma function of positive numbers, to about 1e-6 (Stirling's series above 3)."""
    y = x + 3
    return np.asarray((y - 0.5) * np.log(y) - y + 0.5 * np.log(2 * np.pi) + 1 / (12 * y) - 1 / (360 * y**3) - np.log(x * (x + 1) * (x + 2)))
