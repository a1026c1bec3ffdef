"""Robust non-negative regression of times, and its use for prefill time and time between tokens.

    prefill = c0 + c1 (n - p) + c2 (n^2 - p^2)
    TBT     = c0 + c1 batch + c2 context

Of n prompt tokens p are cached; n^2 - p^2 is twice the pairs of causal attention. The terms of TBT are loading the
weights, computing a token, and loading a token of cache.

Times grow with work, so a negative coefficient is noise and would extrapolate below 0. Errors are relative: a prompt of
100 tokens counts as much as one of 100,000. Outliers are down-weighted.

Source: polynomial regression of the prefill time on length and prefix length is Mooncake's (Qin et al., FAST 2025,
section 5); its terms are not published.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.protocol.errors import InvalidArgument

SAMPLES_PER_FEATURE: Final = 4
"""Minimum samples per feature: with one, every fit is perfect and meaningless."""
MAX_CONDITION: Final = 1e6
"""Maximum condition number of the scaled features: beyond it they cannot be separated."""
ROUNDS: Final = 20
OUTLIER_SPREADS: Final = 2.0
"""Multiple of the typical relative error beyond which errors count linearly instead of squared (Huber's loss)."""
Matrix = NDArray[np.float64]
MIN_SAMPLE_S: Final = 1e-6
"""Minimum duration; samples are weighted by its inverse."""
MAX_SAMPLE_S: Final = 1e6
"""Maximum plausible duration, eleven days."""
MAX_REQUEST_TOKENS: Final = (1 << 32) - 1
"""Tokens of one prompt, or sequences of one batch: 32 bits in reports."""
MAX_CONTEXT_TOKENS: Final = 1 << 53
"""Beyond this, floats are no longer exact."""


@dataclass(frozen=True, slots=True)
class FitReport:
    """Quality of a fit."""

    samples: int
    r_squared: float
    """Of the seconds: 1 is perfect, 0 no better than their mean."""
    median_relative_error: float


def fit(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[tuple[float, ...], FitReport]:
    """Fit coefficients, one per feature, with a quality report. `features` is [samples][features], `seconds` is above
    0.

    Least squares of relative errors, refined until outliers count linearly. Up to a tenth of the samples may be off by
    a factor from 0.1 to 10, moving the fit by some percent.

    Raises:
        InvalidArgument: fewer than SAMPLES_PER_FEATURE samples per feature, or inseparable features (all prompts of one length, say).
    """
    x, y = np.asarray(features, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    needed = SAMPLES_PER_FEATURE * (x.shape[1] if x.ndim == 2 else 1)
    if len(y) < needed:
        raise InvalidArgument(f"{len(y)} samples are too few to fit: at least {needed} are needed")
    scale = np.abs(x).max(axis=0)
    if not scale.all() or np.linalg.cond(x / scale) > MAX_CONDITION:
        raise InvalidArgument("the samples are too similar to fit: measure other sizes, too")
    x = x / scale
    weights = 1.0 / y
    coefficients = _non_negative(x, y, weights)
    for _ in range(ROUNDS):
        fitted = np.maximum(x @ coefficients, y.min() / 10)  # avoids infinite weights
        errors = np.abs(y - fitted) / fitted
        limit = max(OUTLIER_SPREADS * float(np.median(errors)), 1e-9)
        weights = np.sqrt(np.minimum(1.0, limit / np.maximum(errors, limit))) / fitted
        refined = _non_negative(x, y, weights)
        if np.allclose(refined, coefficients, rtol=1e-6, atol=0):
            break
        coefficients = refined
    return tuple(float(value) for value in coefficients / scale), _report(y, x @ coefficients)


def _non_negative(x: Matrix, y: Matrix, weights: Matrix) -> Matrix:
    """Non-negative weighted least squares: the best of the plain solutions on each subset of the features.

    Exact, because the solution equals the plain one on the features it uses; 3 features have 7 subsets.
    """
    rows, goal = x * weights[:, None], y * weights
    gram, moments = rows.T @ rows, rows.T @ goal
    best, best_gain = np.zeros(x.shape[1]), 0.0
    for size in range(1, x.shape[1] + 1):
        for subset in combinations(range(x.shape[1]), size):
            chosen = list(subset)
            found = np.linalg.lstsq(gram[np.ix_(chosen, chosen)], moments[chosen], rcond=None)[0]
            gain = float(found @ moments[chosen])  # reduction of the sum of squares
            if (found >= 0).all() and gain > best_gain:
                best, best_gain = np.zeros(x.shape[1]), gain
                best[chosen] = found
    return best


def _report(y: Matrix, fitted: Matrix) -> FitReport:
    errors = np.abs(y - fitted) / y
    spread = float(((y - y.mean()) ** 2).sum())
    residual = float(((y - fitted) ** 2).sum())
    r_squared = 1.0 - residual / spread if spread else 0.0
    return FitReport(len(y), r_squared, float(np.median(errors)))


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """Duration of one prefill, alone on its instance."""

    input_tokens: int
    prefix_tokens: int
    """Tokens that were cached."""
    duration_s: float

    def __post_init__(self) -> None:
        """Raises InvalidArgument for impossible values."""
        if not 0 <= self.prefix_tokens < self.input_tokens <= MAX_REQUEST_TOKENS:
            raise InvalidArgument(f"a prefill of {self.input_tokens} tokens cannot have found {self.prefix_tokens} in the cache")
        _check_duration(self.duration_s)


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """Duration of one decode step."""

    batch: int
    context_tokens: int
    """Context of all sequences of the batch."""
    duration_s: float

    def __post_init__(self) -> None:
        """Raises InvalidArgument for impossible values."""
        if not (1 <= self.batch <= self.context_tokens <= MAX_CONTEXT_TOKENS and self.batch <= MAX_REQUEST_TOKENS):
            raise InvalidArgument(f"a batch of {self.batch} cannot have {self.context_tokens} tokens of cache")
        _check_duration(self.duration_s)


def _check_duration(duration_s: float) -> None:
    if not MIN_SAMPLE_S <= duration_s <= MAX_SAMPLE_S:
        raise InvalidArgument(f"a step cannot have taken {duration_s:g} seconds: it takes from {MIN_SAMPLE_S:g} to {MAX_SAMPLE_S:g}")


@dataclass(frozen=True, slots=True)
class Regression:
    """Fitted coefficients in seconds, none negative, with the fit's quality."""

    coefficients: tuple[float, float, float]
    report: FitReport


class PrefillRegression(Regression):
    """PrefillTime by regression."""

    __slots__ = ()

    @classmethod
    def fitted(cls, samples: Iterable[PrefillSample]) -> "PrefillRegression":
        """Raises InvalidArgument for too few or too similar samples."""
        taken = list(samples)
        rows = [(1.0, sample.input_tokens - sample.prefix_tokens, sample.input_tokens**2 - sample.prefix_tokens**2) for sample in taken]
        return cls(*_fitted(rows, [sample.duration_s for sample in taken]))

    def prefill_s(self, input_tokens: int, prefix_tokens: int) -> float:
        """Seconds to compute a prompt."""
        c0, c1, c2 = self.coefficients
        new_tokens = input_tokens - prefix_tokens
        return c0 + new_tokens * (c1 + c2 * (input_tokens + prefix_tokens))


class DecodeRegression(Regression):
    """DecodeTime by regression."""

    __slots__ = ()

    @classmethod
    def fitted(cls, samples: Iterable[DecodeSample]) -> "DecodeRegression":
        """Raises InvalidArgument for too few or too similar samples."""
        taken = list(samples)
        rows = [(1.0, sample.batch, sample.context_tokens) for sample in taken]
        return cls(*_fitted(rows, [sample.duration_s for sample in taken]))

    def tbt_s(self, batch: int, context_tokens: int) -> float:
        """Seconds for one token of each of `batch` sequences."""
        c0, c1, c2 = self.coefficients
        return c0 + c1 * batch + c2 * context_tokens


def _fitted(rows: Sequence[tuple[float, float, float]], seconds: Sequence[float]) -> tuple[tuple[float, float, float], FitReport]:
    (c0, c1, c2), report = fit(rows, seconds)
    return (c0, c1, c2), report
