"""Promises of stretches.py: many steps at once come to what they come to one by one."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.scheduler.batching import RunningBatch
from kvstore.scheduler.simulator.decode import Stretch, next_stretch


@dataclass(frozen=True)
class Times:
    """A step's time as any function of batch and context."""

    of: Callable[[int, int], float]

    def tbt_s(self, batch: int, context_tokens: int) -> float:
        return self.of(batch, context_tokens)


AFFINE = Times(lambda batch, context: 0.01 + 0.002 * batch + 3e-6 * context)
CURVED = Times(lambda batch, context: 0.01 + 0.002 * batch + 1e-10 * context**2)
KINKED = Times(lambda batch, context: max(0.01, 1e-5 * context))

Sequences = list[tuple[int, int]]
"""(context, steps) of each."""

sequences = st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 300)), min_size=1, max_size=8)


def naive(times: Times, found: Sequences) -> dict[int, float]:
    """When each sequence ends, a token at a time."""
    now_s, ends = 0.0, {}
    left = {number: [context, steps] for number, (context, steps) in enumerate(found)}
    while left:
        now_s += times.tbt_s(len(left), sum(context for context, _ in left.values()))
        for number, sequence in list(left.items()):
            sequence[0] += 1
            sequence[1] -= 1
            if not sequence[1]:
                ends[number] = now_s
                del left[number]
    return ends


def closed(times: Times, found: Sequences) -> tuple[dict[int, float], int]:
    """The same by stretches, and how many of them it took."""
    batch: RunningBatch[int] = RunningBatch()
    for number, (context, steps) in enumerate(found):
        batch.join(number, context_tokens=context, steps=steps)
    now_s, ends, stretches = 0.0, {}, 0
    while len(batch):
        stretch = next_stretch(batch, times)
        now_s += stretch.duration_s(stretch.steps)
        stretches += 1
        ends.update(dict.fromkeys(batch.advance(stretch.steps), now_s))
    assert batch.context_tokens == 0
    return ends, stretches


@pytest.mark.no_cover
@given(sequences)
def test_affine_times_are_exact_in_one_stretch_an_end(found: Sequences) -> None:
    ends, stretches = closed(AFFINE, found)
    assert ends == pytest.approx(naive(AFFINE, found), rel=1e-9)
    assert stretches <= len(found)


@pytest.mark.no_cover
@pytest.mark.parametrize("times", [CURVED, KINKED], ids=["curved", "kinked"])
@given(found=sequences)
def test_other_times_are_taken_in_short_stretches(times: Times, found: Sequences) -> None:
    """What a stretch of at most 8 steps can miss where the curve bends within it: less than a step in a thousand."""
    ends, _ = closed(times, found)
    assert ends == pytest.approx(naive(times, found), rel=1e-3)


def test_a_curve_costs_bounded_stretches() -> None:
    _, stretches = closed(CURVED, [(1000, 256)])
    assert 256 / 8 <= stretches <= 256 / 4


@given(st.floats(1e-4, 1), st.floats(0, 1e-2), st.integers(1, 1000), st.floats(0, 1))
def test_a_moment_belongs_to_the_step_that_runs(first_s: float, growth_s: float, steps: int, share: float) -> None:
    stretch = Stretch(steps, first_s, growth_s)
    elapsed_s = stretch.duration_s(steps) * share
    found = stretch.steps_after(elapsed_s)
    assert 1 <= found <= steps
    assert stretch.duration_s(found) >= elapsed_s or found == steps
    assert found == 1 or stretch.duration_s(found - 1) < elapsed_s
