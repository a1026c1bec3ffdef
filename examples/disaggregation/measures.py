"""Distance of logits from those of one process that holds the whole model. Only numpy: the program has no torch in it."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[Any]
"""[tokens, vocabulary]."""
ROUNDING_FACTOR: Final = 4.0
"""Allowed distance of a float32 executor from the float64 logits, as a multiple of that of one float32 process.

Sums are added in another order, with the same precision: measured ratios are 1.0 to 1.4."""


@dataclass(frozen=True, slots=True)
class Distance:
    """Of logits to those of one process, `single`, which itself is as far from the exact ones as float32 gets."""

    to_single: float
    """Largest difference to the logits of one process in float32."""
    to_exact: float
    """To those in float64."""
    allowed: float
    """ROUNDING_FACTOR times the distance of one process in float32 to float64."""

    @property
    def verdict(self) -> str:
        return "bit-equal" if self.to_single == 0 else "rounding" if self.to_exact <= self.allowed else "DIFFERENT"


def distance(found: Logits, single: Logits, exact: Logits) -> Distance:
    """`found` and `single` were computed in float32, `exact` in float64."""
    allowed = ROUNDING_FACTOR * float(np.abs(single - exact).max())
    return Distance(float(np.abs(found - single).max()), float(np.abs(found - exact).max()), allowed)


@dataclass(frozen=True, slots=True)
class Damage:
    """Effect of approximated keys and values on the predictions of a text."""

    max_logit_error: float
    mean_logit_error: float
    kl_nats: float
    """Mean Kullback-Leibler divergence of the predicted distribution from that of the reference."""
    same_choice: float
    """Share of tokens after which the most likely next one is the same."""
    perplexity: float

    @classmethod
    def of(cls, found: Logits, reference: Logits, next_tokens: list[int]) -> "Damage":
        """Row i of both predicts next_tokens[i]."""
        errors = np.abs(found - reference)
        told, truth = _log_softmax(found), _log_softmax(reference)
        return cls(
            max_logit_error=float(errors.max()),
            mean_logit_error=float(errors.mean()),
            kl_nats=float((np.exp(truth) * (truth - told)).sum(-1).mean()),
            same_choice=float((found.argmax(-1) == reference.argmax(-1)).mean()),
            perplexity=float(np.exp(-told[np.arange(len(next_tokens)), next_tokens].mean())),
        )


def _log_softmax(logits: Logits) -> Logits:
    shifted: Logits = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    sums: Logits = np.exp(shifted).sum(-1, keepdims=True)
    return shifted - np.log(sums)
