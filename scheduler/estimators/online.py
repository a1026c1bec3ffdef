"""Estimators that learn while they are used: fitted again and again to the latest measurements. They measure nothing and know no clock.

Until there is enough to fit, and whenever the latest samples are too much alike, what was known before is used. That includes what was
fitted last: a quiet hour in which all prompts have one length does not make the scheduler forget the others.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from kvstore.protocol.errors import InvalidArgument
from kvstore.scheduler.estimators.interface import DecodeTime, PrefillTime
from kvstore.scheduler.estimators.least_squares import FitReport
from kvstore.scheduler.estimators.regression import DecodeRegression, DecodeSample, PrefillRegression, PrefillSample, Regression

WINDOW_SAMPLES: Final = 512
"""What is fitted to: the latest so many."""
REFIT_SAMPLES: Final = 32
"""After so many new ones. A fit of a full window takes a few milliseconds."""

S = TypeVar("S")
R = TypeVar("R", bound=Regression)


class _Window(Generic[S, R]):
    """The latest samples and the last fit of them."""

    def __init__(self, fitted: Callable[[Sequence[S]], R], *, window_samples: int, refit_samples: int) -> None:
        if not 1 <= refit_samples <= window_samples:
            raise InvalidArgument(f"refit_samples is {refit_samples}: it must be within [1, window_samples], here {window_samples}")
        self._fitted = fitted
        self._samples: deque[S] = deque(maxlen=window_samples)
        self._refit_samples = refit_samples
        self._new_samples = 0
        self.regression: R | None = None

    def add(self, sample: S) -> None:
        self._samples.append(sample)
        self._new_samples += 1
        if self._new_samples < self._refit_samples:
            return
        self._new_samples = 0
        try:
            self.regression = self._fitted(list(self._samples))
        except InvalidArgument:
            return  # too few, or too much alike: the next ones may do


class OnlinePrefill:
    """PrefillTime (interface.py), fitted to the samples that were added. Not thread-safe."""

    def __init__(self, initial: PrefillTime, *, window_samples: int = WINDOW_SAMPLES, refit_samples: int = REFIT_SAMPLES) -> None:
        """`initial` is used until the first fit.

        Raises:
            InvalidArgument: refit_samples is not within [1, window_samples].
        """
        self._initial = initial
        self._window = _Window(PrefillRegression.fitted, window_samples=window_samples, refit_samples=refit_samples)

    def add(self, sample: PrefillSample) -> None:
        """Learn from it, the next time that enough have come together. O(1), but for every refit_samples-th: milliseconds."""
        self._window.add(sample)

    def prefill_s(self, input_tokens: int, prefix_tokens: int) -> float:
        """Seconds to compute a prompt, by the last fit."""
        return (self._window.regression or self._initial).prefill_s(input_tokens, prefix_tokens)

    @property
    def report(self) -> FitReport | None:
        """Of the last fit; None: there was none yet."""
        return self._window.regression.report if self._window.regression else None


class OnlineDecode:
    """DecodeTime (interface.py), fitted to the samples that were added. Not thread-safe."""

    def __init__(self, initial: DecodeTime, *, window_samples: int = WINDOW_SAMPLES, refit_samples: int = REFIT_SAMPLES) -> None:
        """As OnlinePrefill."""
        self._initial = initial
        self._window = _Window(DecodeRegression.fitted, window_samples=window_samples, refit_samples=refit_samples)

    def add(self, sample: DecodeSample) -> None:
        """As OnlinePrefill.add."""
        self._window.add(sample)

    def tbt_s(self, batch: int, context_tokens: int) -> float:
        """Seconds for one token of each of `batch` sequences, by the last fit."""
        return (self._window.regression or self._initial).tbt_s(batch, context_tokens)

    @property
    def report(self) -> FitReport | None:
        """Of the last fit; None: there was none yet."""
        return self._window.regression.report if self._window.regression else None
