"""Prefill time and time between tokens, fitted to measurements: as sums of what computing and loading grow with. No measuring of its own.

    prefill = c0 + c1 (n - p) + c2 (n^2 - p^2)     n tokens of which p are in the cache; the last is twice the pairs of causal attention
    TBT     = c0 + c1 batch + c2 context           loading the weights, computing a token, loading a token of cache

Source: polynomial regression of the prefill time on length and prefix length is Mooncake's (Qin et al., FAST 2025, section 5); which terms
it takes is not published.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

from kvstore.protocol.errors import ConfigError, InvalidArgument
from kvstore.scheduler.estimators.least_squares import FitReport, fit

MIN_SAMPLE_S: Final = 1e-6
"""A fit weighs samples by the inverse of their durations."""
MAX_SAMPLE_S: Final = 1e6
"""Nothing takes eleven days: the figure is wrong."""
MAX_REQUEST_TOKENS: Final = (1 << 32) - 1
"""Of one prompt, and sequences of one batch: reports have 32 bits for either."""
MAX_CONTEXT_TOKENS: Final = 1 << 53
"""Tokens beyond are no longer exact as floats, and are wrong anyway."""


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


R = TypeVar("R", bound="Regression")


@dataclass(frozen=True, slots=True)
class Regression:
    """Coefficients in seconds, none negative, and what they were fitted to."""

    coefficients: tuple[float, float, float]
    report: FitReport

    kind: ClassVar[str] = ""

    def save(self, path: Path) -> None:
        """Write it as JSON, for `load`. Raises OSError."""
        report = {name: getattr(self.report, name) for name in FitReport.__slots__}
        path.write_text(
            json.dumps({"kind": self.kind, "coefficients": self.coefficients, "report": report}, indent=2) + "\n", encoding="utf-8"
        )

    @classmethod
    def load(cls: type[R], path: Path) -> R:
        """What `save` of the same class wrote.

        Raises:
            ConfigError: the file cannot be read, or is something else.
        """
        try:
            found: Any = json.loads(path.read_text(encoding="utf-8"))
            if found["kind"] != cls.kind:
                raise ConfigError(f"{path} is a regression of {found['kind']!r}, not of {cls.kind!r}")
            c0, c1, c2 = (float(value) for value in found["coefficients"])
            report = FitReport(**found["report"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no saved regression: {error!r}") from None
        if not all(0 <= value < math.inf for value in (c0, c1, c2)):
            raise ConfigError(f"{path}: a coefficient of a regression is finite and not negative")
        return cls((c0, c1, c2), report)


class PrefillRegression(Regression):
    """PrefillTime (interface.py)."""

    __slots__ = ()
    kind = "prefill"

    @classmethod
    def fitted(cls, samples: Iterable[PrefillSample]) -> "PrefillRegression":
        """Raises InvalidArgument: too few samples, or too much alike (least_squares.py)."""
        taken = list(samples)
        rows = [(1.0, sample.input_tokens - sample.prefix_tokens, sample.input_tokens**2 - sample.prefix_tokens**2) for sample in taken]
        return cls(*_fit(rows, [sample.duration_s for sample in taken]))

    def prefill_s(self, input_tokens: int, prefix_tokens: int) -> float:
        """Seconds to compute a prompt."""
        c0, c1, c2 = self.coefficients
        new_tokens = input_tokens - prefix_tokens
        return c0 + new_tokens * (c1 + c2 * (input_tokens + prefix_tokens))


class DecodeRegression(Regression):
    """DecodeTime (interface.py)."""

    __slots__ = ()
    kind = "decode"

    @classmethod
    def fitted(cls, samples: Iterable[DecodeSample]) -> "DecodeRegression":
        """Raises InvalidArgument: too few samples, or too much alike (least_squares.py)."""
        taken = list(samples)
        rows = [(1.0, sample.batch, sample.context_tokens) for sample in taken]
        return cls(*_fit(rows, [sample.duration_s for sample in taken]))

    def tbt_s(self, batch: int, context_tokens: int) -> float:
        """Seconds for one token of each of `batch` sequences."""
        c0, c1, c2 = self.coefficients
        return c0 + c1 * batch + c2 * context_tokens


def _fit(rows: Sequence[tuple[float, float, float]], seconds: Sequence[float]) -> tuple[tuple[float, float, float], FitReport]:
    (c0, c1, c2), report = fit(rows, seconds)
    return (c0, c1, c2), report
