"""Fitting a time as a sum of features whose coefficients are not negative, to measurements some of which are wrong.

A time grows with the work, so a negative coefficient is noise, and extrapolates to times below 0. Errors are relative: a prompt of 100
tokens matters as much as one of 100,000. What the features are is the caller's (regression.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.protocol.errors import InvalidArgument

SAMPLES_PER_FEATURE: Final = 4
"""Fewer samples are refused: with one a feature, every fit is perfect and says nothing."""
MAX_CONDITION: Final = 1e6
"""Of the scaled features: beyond it the samples do not tell the features apart."""
ROUNDS: Final = 20
OUTLIER_SPREADS: Final = 2.0
"""From this multiple of the typical relative error on, a sample counts by its error and not by its square (Huber's loss)."""

Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FitReport:
    """How well a fit keeps to its samples."""

    samples: int
    r_squared: float
    """Of the seconds: 1 is perfect, 0 no better than their mean."""
    median_relative_error: float
    max_relative_error: float
    """Of the worst sample: |measured - fitted| / measured."""


def fit(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[tuple[float, ...], FitReport]:
    """The coefficients, one a feature, and how good they are. `features` is [samples][features], `seconds` is above 0.

    Least squares of the relative errors, refined until outliers count linearly. So a tenth of the samples may be off by any factor from 0.1
    to 10 and the fit moves by some percent; more than that and it moves with them.

    Raises:
        InvalidArgument: there are fewer than SAMPLES_PER_FEATURE samples a feature, or they do not tell the features apart (all prompts
            have one length, say).
    """
    x, y = np.asarray(features, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    needed = SAMPLES_PER_FEATURE * (x.shape[1] if x.ndim == 2 else 1)
    if len(y) < needed:
        raise InvalidArgument(f"{len(y)} samples are too few to fit: it takes {needed}")
    scale = np.abs(x).max(axis=0)
    if not scale.all() or np.linalg.cond(x / scale) > MAX_CONDITION:
        raise InvalidArgument("the samples are too much alike to fit: measure other sizes, too")
    x = x / scale
    weights = 1.0 / y
    coefficients = _non_negative(x, y, weights)
    for _ in range(ROUNDS):
        fitted = np.maximum(x @ coefficients, y.min() / 10)  # a fit of 0 would weigh infinitely
        errors = np.abs(y - fitted) / fitted
        limit = max(OUTLIER_SPREADS * float(np.median(errors)), 1e-9)
        weights = np.sqrt(np.minimum(1.0, limit / np.maximum(errors, limit))) / fitted
        refined = _non_negative(x, y, weights)
        if np.allclose(refined, coefficients, rtol=1e-6, atol=0):
            break
        coefficients = refined
    return tuple(float(value) for value in coefficients / scale), _report(y, x @ coefficients)


def _non_negative(x: Matrix, y: Matrix, weights: Matrix) -> Matrix:
    """The non-negative coefficients with the least weighted squares: the best of the plain solutions on each subset of the features.

    Exact, because the solution is the plain one on those features that it uses; 7 subsets of 3.
    """
    rows, goal = x * weights[:, None], y * weights
    gram, moments = rows.T @ rows, rows.T @ goal
    best, best_gain = np.zeros(x.shape[1]), 0.0
    for size in range(1, x.shape[1] + 1):
        for subset in combinations(range(x.shape[1]), size):
            chosen = list(subset)
            found = np.linalg.lstsq(gram[np.ix_(chosen, chosen)], moments[chosen], rcond=None)[0]
            gain = float(found @ moments[chosen])  # what the squares are reduced by
            if (found >= 0).all() and gain > best_gain:
                best, best_gain = np.zeros(x.shape[1]), gain
                best[chosen] = found
    return best


def _report(y: Matrix, fitted: Matrix) -> FitReport:
    errors = np.abs(y - fitted) / y
    spread = float(((y - y.mean()) ** 2).sum())
    residual = float(((y - fitted) ** 2).sum())
    r_squared = 1.0 - residual / spread if spread else 0.0
    return FitReport(len(y), r_squared, float(np.median(errors)), float(errors.max()))
