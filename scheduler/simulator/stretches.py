"""Decode steps in closed form: many steps of a batch that does not change, as one stretch of simulated time.

Between one sequence that joins or ends and the next, `size` is fixed and the context grows by `size` tokens a step. Where the time of a
step is affine in the context (analytic.py's is, for a fixed batch) the time of k steps is an arithmetic series and exact. Where it is
not, the stretch is halved until it is, or is no longer than MAX_BENT_STEPS, over which the curve is taken for its chord.
Not the engine's loop: it decides neither who joins nor when (decode.py, coupled.py).
"""

import math
from dataclasses import dataclass
from typing import Final, TypeVar

from kvstore.scheduler.batching import RunningBatch
from kvstore.scheduler.estimators.interface import DecodeTime

T = TypeVar("T")

MAX_BENT_STEPS: Final = 8
AFFINE_TOLERANCE: Final = 1e-9
"""Relative difference between the middle step and the mean of the outer ones up to which a stretch is affine: rounding stays below."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """`steps` decode steps; step k of them takes first_s + k * growth_s."""

    steps: int
    first_s: float
    growth_s: float

    def duration_s(self, steps: int) -> float:
        """Seconds of the first `steps` of them."""
        return steps * self.first_s + self.growth_s * (steps * (steps - 1) / 2)

    def steps_after(self, elapsed_s: float) -> int:
        """How many are over at the end of the step that runs, or just ended, at `elapsed_s`: from 1 to `steps`."""
        half = self.growth_s / 2
        if half > 0:
            linear = self.first_s - half
            found = (math.sqrt(linear * linear + 4 * half * elapsed_s) - linear) / (2 * half)
        else:
            found = elapsed_s / self.first_s
        steps = min(max(math.ceil(found), 1), self.steps)
        # The root is rounded: one step to either side may be the true answer.
        while steps < self.steps and self.duration_s(steps) < elapsed_s:
            steps += 1
        while steps > 1 and self.duration_s(steps - 1) >= elapsed_s:
            steps -= 1
        return steps


def next_stretch(batch: RunningBatch[T], times: DecodeTime) -> Stretch:
    """The steps until the first sequence ends, or fewer where the time of a step is not affine over so many."""
    size, context, steps = len(batch), batch.context_tokens, batch.steps_to_next_end
    first_s = times.tbt_s(size, context)
    while True:
        last_s = times.tbt_s(size, context + (steps - 1) * size)
        if steps <= MAX_BENT_STEPS or _is_affine(times, size, context, steps, first_s, last_s):
            return Stretch(steps, first_s, (last_s - first_s) / (steps - 1) if steps > 1 else 0.0)
        steps //= 2


def _is_affine(times: DecodeTime, size: int, context: int, steps: int, first_s: float, last_s: float) -> bool:
    middle = (steps - 1) // 2
    chord_s = first_s + (last_s - first_s) * middle / (steps - 1)
    return abs(times.tbt_s(size, context + middle * size) - chord_s) <= AFFINE_TOLERANCE * last_s
