"""Fitting a time as a sum of features whose coefficients are not negative, to measurements some of which are wrong.

A time grows with the work, so a negative coefficient is noise, and extrapolates to times below 0. Errors are relative: a prompt of 100
tokens matters as much as one of 100,000. What the features are is the caller's (regression.py).

Prefill time and time between tokens, fitted to measurements: as sums of what computing and loading grow with. No measuring of its own.

    prefill = c0 + c1 (n - p) + c2 (n^2 - p^2)     n tokens of which p are in the cache; the last is twice the pairs of causal attention
    TBT     = c0 + c1 batch + c2 context           loading the weights, computing a token, loading a token of cache

Source: polynomial regression of the prefill time on length and prefix length is Mooncake's (Qin et al., FAST 2025, section 5); which terms
it takes is not published.
"""

from collections.abc import Iterable, Sequence
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
MIN_SAMPLE_S: Final = 1e-6
"""A fit weighs samples by the inverse of their durations."""
MAX_SAMPLE_S: Final = 1e6
"""Nothing takes eleven days: the figure is wrong."""
MAX_REQUEST_TOKENS: Final = (1 << 32) - 1
"""Of one prompt, and sequences of one batch: reports have 32 bits for either."""
MAX_CONTEXT_TOKENS: Final = 1 << 53
"""Tokens beyond are no longer exact as floats, and are wrong anyway."""


@dataclass(frozen=True, slots=True)
class FitReport:
    """How well a fit keeps to its samples."""

    samples: int
    r_squared: float
    """Of the seconds: 1 is perfect, 0 no better than their mean."""
    median_relative_error: float


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
    return FitReport(len(y), r_squared, float(np.median(errors)))


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """One prefill, alone on its instance."""

    input_tokens: int
    prefix_tokens: int
    """Of these, found in the cache."""
    duration_s: float

    def __post_init__(self) -> None:
        """Raises InvalidArgument for what cannot have been measured."""
        if not 0 <= self.prefix_tokens < self.input_tokens <= MAX_REQUEST_TOKENS:
            raise InvalidArgument(f"a prefill of {self.input_tokens} tokens cannot have found {self.prefix_tokens} in the cache")
        _check_duration(self.duration_s)


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """One decode step."""

    batch: int
    context_tokens: int
    """Of all sequences of the batch."""
    duration_s: float

    def __post_init__(self) -> None:
        """Raises InvalidArgument for what cannot have been measured."""
        if not (1 <= self.batch <= self.context_tokens <= MAX_CONTEXT_TOKENS and self.batch <= MAX_REQUEST_TOKENS):
            raise InvalidArgument(f"a batch of {self.batch} cannot have {self.context_tokens} tokens of cache")
        _check_duration(self.duration_s)


def _check_duration(duration_s: float) -> None:
    if not MIN_SAMPLE_S <= duration_s <= MAX_SAMPLE_S:
        raise InvalidArgument(f"a step cannot have taken {duration_s:g} seconds: it takes from {MIN_SAMPLE_S:g} to {MAX_SAMPLE_S:g}")


@dataclass(frozen=True, slots=True)
class Regression:
    """Coefficients in seconds, none negative, and what they were fitted to."""

    coefficients: tuple[float, float, float]
    report: FitReport


class PrefillRegression(Regression):
    """PrefillTime (interface.py)."""

    __slots__ = ()

    @classmethod
    def fitted(cls, samples: Iterable[PrefillSample]) -> "PrefillRegression":
        """Raises InvalidArgument: too few samples, or too much alike."""
        taken = list(samples)
        rows = [(1.0, sample.input_tokens - sample.prefix_tokens, sample.input_tokens**2 - sample.prefix_tokens**2) for sample in taken]
        return cls(*_fitted(rows, [sample.duration_s for sample in taken]))

    def prefill_s(self, input_tokens: int, prefix_tokens: int) -> float:
        """Seconds to compute a prompt."""
        c0, c1, c2 = self.coefficients
        new_tokens = input_tokens - prefix_tokens
        return c0 + new_tokens * (c1 + c2 * (input_tokens + prefix_tokens))


class DecodeRegression(Regression):
    """DecodeTime (interface.py)."""

    __slots__ = ()

    @classmethod
    def fitted(cls, samples: Iterable[DecodeSample]) -> "DecodeRegression":
        """Raises InvalidArgument: too few samples, or too much alike."""
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
