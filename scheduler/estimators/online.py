"""Estimators that learn while they are used: fitted again and again to the latest measurements. They measure nothing and know no clock.

Until there is enough to fit, and whenever the latest samples are too much alike, what was known before is used. That includes what was
fitted last: a quiet hour in which all prompts have one length does not make the scheduler forget the others.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from kvstore.protocol.errors import InvalidArgument
from kvstore.scheduler.estimators.interface import DecodeTime, PrefillTime
from kvstore.scheduler.estimators.regression import DecodeRegression, DecodeSample, FitReport, PrefillRegression, PrefillSample, Regression

WINDOW_SAMPLES: Final = 512
"""What is fitted to: the latest so many."""
REFIT_SAMPLES: Final = 32
"""After so many new ones. A fit of a full window takes a few milliseconds."""

S = TypeVar("S")
R = TypeVar("R", bound=Regression)


class _Online(Generic[S, R]):
    """The latest samples and the last fit of them. Not thread-safe."""

    def __init__(self, fitted: Callable[[Sequence[S]], R]) -> None:
        self._fitted = fitted
        self._samples: deque[S] = deque(maxlen=WINDOW_SAMPLES)
        self._new_samples = 0
        self._regression: R | None = None

    def add(self, sample: S) -> None:
        """Learn from a sample. O(1), but for every REFIT_SAMPLES-th: milliseconds."""
        self._samples.append(sample)
        self._new_samples += 1
        if self._new_samples < REFIT_SAMPLES:
            return
        self._new_samples = 0
        try:
            self._regression = self._fitted(list(self._samples))
        except InvalidArgument:
            return  # too few, or too much alike: the next ones may do

    @property
    def report(self) -> FitReport | None:
        """Of the last fit; None: there was none yet."""
        return self._regression.report if self._regression else None


class OnlinePrefill(_Online[PrefillSample, PrefillRegression]):
    """PrefillTime (interface.py), fitted to the samples that were added."""

    def __init__(self, initial: PrefillTime) -> None:
        """`initial` is used until the first fit."""
        super().__init__(PrefillRegression.fitted)
        self._initial = initial

    def prefill_s(self, input_tokens: int, prefix_tokens: int) -> float:
        """Seconds to compute a prompt, by the last fit."""
        return (self._regression or self._initial).prefill_s(input_tokens, prefix_tokens)


class OnlineDecode(_Online[DecodeSample, DecodeRegression]):
    """DecodeTime (interface.py), fitted to the samples that were added."""

    def __init__(self, initial: DecodeTime) -> None:
        """As OnlinePrefill."""
        super().__init__(DecodeRegression.fitted)
        self._initial = initial

    def tbt_s(self, batch: int, context_tokens: int) -> float:
        """Seconds for one token of each of `batch` sequences, by the last fit."""
        return (self._regression or self._initial).tbt_s(batch, context_tokens)
