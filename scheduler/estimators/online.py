"""Estimators that are refitted to the latest measurements while in use. They measure nothing and use no clock.

Until there are enough samples, and whenever the latest ones are too similar to fit, the last fit stays in use. An hour
of equal prompt lengths thus does not erase what was learned about others.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from kvstore.protocol.errors import InvalidArgument
from kvstore.scheduler.estimators.interface import DecodeTime, PrefillTime
from kvstore.scheduler.estimators.regression import DecodeRegression, DecodeSample, FitReport, PrefillRegression, PrefillSample, Regression

WINDOW_SAMPLES: Final = 512
"""Latest samples that a fit uses."""
REFIT_SAMPLES: Final = 32
"""New samples between fits. A fit of a full window takes a few milliseconds."""

S = TypeVar("S")
R = TypeVar("R", bound=Regression)


class _Online(Generic[S, R]):
    """Window of samples and the last fit. Not thread-safe."""

    def __init__(self, fitted: Callable[[Sequence[S]], R]) -> None:
        self._fitted = fitted
        self._samples: deque[S] = deque(maxlen=WINDOW_SAMPLES)
        self._new_samples = 0
        self._regression: R | None = None

    def add(self, sample: S) -> None:
        """Add a sample. O(1), except every REFIT_SAMPLES-th: milliseconds."""
        self._samples.append(sample)
        self._new_samples += 1
        if self._new_samples < REFIT_SAMPLES:
            return
        self._new_samples = 0
        try:
            self._regression = self._fitted(list(self._samples))
        except InvalidArgument:
            return  # too few or too similar samples: keep the last fit

    @property
    def report(self) -> FitReport | None:
        """Report of the last fit; None before the first."""
        return self._regression.report if self._regression else None


class OnlinePrefill(_Online[PrefillSample, PrefillRegression]):
    """PrefillTime fitted to the added samples."""

    def __init__(self, initial: PrefillTime) -> None:
        """`initial` is used until the first fit."""
        super().__init__(PrefillRegression.fitted)
        self._initial = initial

    def prefill_s(self, input_tokens: int, prefix_tokens: int) -> float:
        """Seconds to compute a prompt, by the last fit."""
        return (self._regression or self._initial).prefill_s(input_tokens, prefix_tokens)


class OnlineDecode(_Online[DecodeSample, DecodeRegression]):
    """DecodeTime fitted to the added samples."""

    def __init__(self, initial: DecodeTime) -> None:
        """As OnlinePrefill."""
        super().__init__(DecodeRegression.fitted)
        self._initial = initial

    def tbt_s(self, batch: int, context_tokens: int) -> float:
        """Seconds for one token of each of `batch` sequences, by the last fit."""
        return (self._regression or self._initial).tbt_s(batch, context_tokens)
