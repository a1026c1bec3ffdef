"""Promises of decode.py: a fast forward equals single steps. A step takes 1/16 s, and 1/64 s more per sequence."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.lab.simulator.decode import DecodeLoop, DecodeServer, FastForward, Gaps, next_steps
from kvstore.lab.simulator.job import EventQueue, SimulatedJob
from kvstore.scheduler.running_batch import RunningBatch
from tests.lab.simulator.parts import job, machine

SHARES = (0.5, 0.9, 0.99, 1.0)


def naive_percentile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of all are not above."""
    ordered = sorted(values)
    return next(value for number, value in enumerate(ordered, 1) if number >= share * len(ordered))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), min_size=1))
def test_weights_count_as_repetitions(found: list[tuple[int, int]]) -> None:
    gaps = Gaps()
    for gap_s, count in found:
        gaps.add(gap_s, count)
    values = [float(gap_s) for gap_s, count in found for _ in range(count)]
    assert gaps.count == len(values)
    if values:
        assert gaps.mean_s == sum(values) / len(values)
        assert gaps.percentiles_s(SHARES) == [naive_percentile(values, share) for share in SHARES]
        assert gaps.points() == [(value, sum(each <= value for each in values) / len(values)) for value in sorted(set(values))]


def test_none_have_no_length() -> None:
    gaps = Gaps()
    gaps.add(1.0, 0)
    assert (gaps.count, gaps.mean_s, gaps.percentiles_s(SHARES), gaps.points()) == (0, 0.0, [0.0] * 4, [])


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
        stretch = next_steps(batch, times)
        now_s += stretch.duration_s(stretch.steps)
        stretches += 1
        ends.update(dict.fromkeys(batch.advance(stretch.steps), now_s))
    assert batch.context_tokens == 0
    return ends, stretches


@given(sequences)
def test_affine_times_are_exact_in_one_stretch_an_end(found: Sequences) -> None:
    ends, stretches = closed(AFFINE, found)
    assert ends == pytest.approx(naive(AFFINE, found), rel=1e-9)
    assert stretches <= len(found)


@pytest.mark.parametrize("times", [CURVED, KINKED], ids=["curved", "kinked"])
@given(found=sequences)
def test_other_times_are_taken_in_short_stretches(times: Times, found: Sequences) -> None:
    """A bend of the curve within a fast forward of at most 8 steps costs an error below one step in a thousand."""
    ends, _ = closed(times, found)
    assert ends == pytest.approx(naive(times, found), rel=1e-3)


def test_a_curve_costs_bounded_stretches() -> None:
    _, stretches = closed(CURVED, [(1000, 256)])
    assert 256 / 8 <= stretches <= 256 / 4


@given(st.floats(1e-4, 1), st.floats(0, 1e-2), st.integers(1, 1000), st.floats(0, 1))
def test_a_moment_belongs_to_the_step_that_runs(first_s: float, growth_s: float, steps: int, share: float) -> None:
    stretch = FastForward(steps, first_s, growth_s)
    elapsed_s = stretch.duration_s(steps) * share
    found = stretch.steps_after(elapsed_s)
    assert 1 <= found <= steps
    assert stretch.duration_s(found) >= elapsed_s or found == steps
    assert found == 1 or stretch.duration_s(found - 1) < elapsed_s


class Owner:
    """Goes on as long as there is anything to decode, and notes who ended when."""

    def __init__(self, *jobs: SimulatedJob) -> None:
        self.events = EventQueue()
        self.gaps = Gaps()
        self.loop = DecodeLoop(machine(), self.events, self.gaps, self.stopped)
        self.ended: list[tuple[int, float]] = []
        self.joining: list[SimulatedJob] = []
        for each in jobs:
            self.loop.join(each)

    def stopped(self, ended: list[SimulatedJob]) -> None:
        self.ended += [(each.number, self.events.now_s) for each in ended]
        for each in self.joining:
            self.loop.join(each)
        self.joining.clear()
        if len(self.loop.batch):
            self.loop.run()


def test_decode_single_sequence_takes_a_step_per_token() -> None:
    owner = Owner(job(tokens=100, output=9))
    owner.loop.run()
    owner.events.run()
    step_s = 1 / 16 + 1 / 64
    assert owner.ended == [(0, 8 * step_s)]
    assert owner.loop.busy_s == 8 * step_s
    # Its own token and 101, 102, ... of context: 10 and the context for each step.
    assert owner.loop.flops == sum(10 + 101 + step for step in range(8)) - 4
    assert owner.gaps.points() == [(step_s, 1.0)]
    assert not owner.loop.is_running


def test_who_comes_during_a_step_joins_after_it() -> None:
    owner = Owner(job(0, tokens=100, output=5))
    late = job(1, tokens=50, output=3)
    late.first_token_s = 0.1
    owner.loop.run()

    def come() -> None:
        assert owner.loop.context_tokens() == 102, "one step is over and the second runs"
        owner.joining.append(late)
        owner.loop.cut()
        owner.loop.cut()

    owner.events.at(0.1, come)
    owner.events.run()
    alone_s, both_s = 5 / 64, 6 / 64
    assert owner.ended == [(0, 2 * alone_s + 2 * both_s), (1, 2 * alone_s + 2 * both_s)]
    # The newcomer's first gap runs from its first token, at 0.1.
    assert owner.gaps.points() == [(alone_s, 2 / 6), (both_s, 5 / 6), (pytest.approx(2 * alone_s + both_s - 0.1), 1.0)]


def test_a_stall_is_a_gap_of_those_who_waited() -> None:
    owner = Owner(job(tokens=100, output=3))
    owner.stopped = lambda ended: None  # type: ignore[method-assign]
    owner.loop = DecodeLoop(machine(), owner.events, owner.gaps, lambda ended: None)
    owner.loop.join(job(tokens=100, output=4))
    owner.loop.run_step(1.0, decode_share_s=0.25)
    owner.events.at(5.0, owner.loop.run)
    owner.events.run()
    assert owner.gaps.points() == [(5 / 64, 1 / 3), (1.0, 2 / 3), (4 + 5 / 64, 1.0)]
    assert owner.loop.busy_s == 0.25 + 2 * 5 / 64


class Served:
    """A server and the jobs that it finished."""

    def __init__(self, capacity_tokens: int = 1_000_000) -> None:
        self.events = EventQueue()
        self.ended: list[tuple[int, float]] = []
        self.server = DecodeServer(machine(capacity_tokens=capacity_tokens), self.events, Gaps(), self._end)

    def _end(self, found: SimulatedJob) -> None:
        self.ended.append((found.number, self.events.now_s))

    def give_at(self, at_s: float, found: SimulatedJob) -> None:
        self.server.reserve(found)
        self.events.at(at_s, lambda: self.server.enqueue(found))


def test_who_comes_joins_those_who_are_there() -> None:
    served = Served()
    served.give_at(0.0, job(0, tokens=100, output=5))
    served.give_at(0.1, job(1, tokens=100, output=3))
    served.events.run()
    # Two steps alone, of 5/64 s; the second arrives during the second of them.
    assert served.ended == [(0, 22 / 64), (1, 22 / 64)]
    assert (served.server.used_tokens, served.server.sequences, served.server.context_tokens()) == (0, 0, 0)


def test_what_is_promised_counts_before_it_comes() -> None:
    served = Served()
    kept, broken = job(0, tokens=100, output=5), job(1, tokens=70, output=5)
    served.server.reserve(kept)
    served.server.reserve(broken)
    assert (served.server.sequences, served.server.context_tokens()) == (2, 170)
    served.server.cancel(broken)
    served.server.enqueue(kept)
    assert (served.server.sequences, served.server.context_tokens(), served.server.used_tokens) == (1, 101, 105)


def test_what_does_not_fit_waits_and_nobody_passes_it() -> None:
    served = Served(capacity_tokens=250)
    for number, tokens in enumerate((195, 95, 5)):
        served.give_at(0.0, job(number, tokens=tokens, output=5))
    served.events.at(0.001, lambda: served.ended.append((-served.server.sequences, served.server.context_tokens())))
    served.events.run()
    assert served.ended == [(-3, 296), (0, 20 / 64), (1, 44 / 64), (2, 44 / 64)]
