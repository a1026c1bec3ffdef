"""A simulated decode instance: continuous batching within the KV cache of its GPUs, and a queue for what does not fit.

Many decode steps of an unchanged batch are one stretch of simulated time. Between one sequence that joins or ends and the next, the batch
size is fixed and the context grows by that size a step. Where the time of a step is affine in the context (AnalyticModel's is, for a fixed
batch), the time of k steps is an arithmetic series and exact. Elsewhere the stretch is halved until it is affine, or is no longer than
MAX_BENT_STEPS, over which the curve is taken for its chord.

A sequence is admitted when there is room for all the tokens it will have, so none is ever thrown out: engines that overcommit and
recompute are not simulated.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, TypeVar

from kvstore.lab.simulator.job import EventQueue, SimulatedEvent, SimulatedJob
from kvstore.lab.simulator.plan import InstanceModel
from kvstore.scheduler.estimators.interface import DecodeTime
from kvstore.scheduler.running_batch import RunningBatch

T = TypeVar("T")
MAX_BENT_STEPS: Final = 8
AFFINE_TOLERANCE: Final = 1e-9
"""Relative difference between the middle step and the mean of the outer ones up to which a stretch is affine: rounding stays below."""


class Gaps:
    """Gaps in seconds, weighted by their number: a stretch of decode steps enters as its mean."""

    def __init__(self) -> None:
        self._found: dict[float, int] = {}

    def add(self, gap_s: float, count: int) -> None:
        """`count` tokens (0 is none) came `gap_s` after the one before."""
        if count:
            self._found[gap_s] = self._found.get(gap_s, 0) + count

    @property
    def count(self) -> int:
        return sum(self._found.values())

    @property
    def mean_s(self) -> float:
        """0 where there were none."""
        return sum(gap_s * count for gap_s, count in self._found.items()) / (self.count or 1)

    def percentiles_s(self, shares: Sequence[float]) -> list[float]:
        """For each of `shares`, ascending, the smallest gap that at least so many are not above; 0 where there were none."""
        ordered = sorted(self._found.items())
        total, found, seen, position = self.count, [], 0, 0
        for share in shares:
            while position < len(ordered) and (seen < share * total or not seen):
                seen += ordered[position][1]
                position += 1
            found.append(ordered[position - 1][0] if position else 0.0)
        return found

    def points(self) -> Sequence[tuple[float, float]]:
        """(gap in seconds, share of all gaps not above it), ascending: the points of a distribution curve."""
        ordered = sorted(self._found.items())
        total = self.count
        return [(gap_s, seen / total) for (gap_s, _), seen in zip(ordered, accumulate(count for _, count in ordered), strict=True)]


@dataclass(frozen=True, slots=True)
class FastForward:
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


def next_stretch(batch: RunningBatch[T], times: DecodeTime) -> FastForward:
    """The steps until the first sequence ends, or fewer where the time of a step is not affine over so many."""
    size, context, steps = len(batch), batch.context_tokens, batch.steps_to_next_end
    first_s = times.tbt_s(size, context)
    while True:
        last_s = times.tbt_s(size, context + (steps - 1) * size)
        if steps <= MAX_BENT_STEPS or _is_affine(times, size, context, steps, first_s, last_s):
            return FastForward(steps, first_s, (last_s - first_s) / (steps - 1) if steps > 1 else 0.0)
        steps //= 2


def _is_affine(times: DecodeTime, size: int, context: int, steps: int, first_s: float, last_s: float) -> bool:
    middle = (steps - 1) // 2
    chord_s = first_s + (last_s - first_s) * middle / (steps - 1)
    return abs(times.tbt_s(size, context + middle * size) - chord_s) <= AFFINE_TOLERANCE * last_s


class DecodeLoop:
    """Runs one stretch at a time and then calls `on_stop` with the jobs that ended, while it is idle again."""

    def __init__(self, machine: InstanceModel, events: EventQueue, gaps: Gaps, on_stop: Callable[[list[SimulatedJob]], None]) -> None:
        self.batch: RunningBatch[SimulatedJob] = RunningBatch()
        self.busy_s = 0.0
        self.flops = 0.0
        self._machine = machine
        self._events = events
        self._gaps = gaps
        self._on_stop = on_stop
        self._joined: list[SimulatedJob] = []
        self._stretch: FastForward | None = None
        self._began_s = 0.0
        self._stopped_s = 0.0
        self._steps = 0
        self._share = 1.0
        self._end: SimulatedEvent | None = None

    @property
    def is_running(self) -> bool:
        return self._stretch is not None

    def join(self, job: SimulatedJob) -> None:
        """It has its first token and takes part from the next step on. Only while idle."""
        assert not self.is_running
        self.batch.join(job, context_tokens=job.request.input_tokens + 1, steps=job.output_tokens - 1)
        self._joined.append(job)

    def run(self) -> None:
        """Begin a stretch, as long as the batch stays the same."""
        self._begin(next_stretch(self.batch, self._machine))

    def run_step(self, duration_s: float, *, decode_share_s: float) -> None:
        """Begin one step of another length, of which `decode_share_s` is the decoding's."""
        self._begin(FastForward(1, duration_s, 0.0), share=decode_share_s / duration_s)

    def cut(self) -> None:
        """Stop after the step that runs now. Nothing if none runs."""
        if self._stretch is None or self._end is None:
            return
        self._steps = self._stretch.steps_after(self._events.now_s - self._began_s)
        self._end.cancel()
        # The sum is rounded, and may lie an ulp before now.
        self._end = self._events.at(max(self._events.now_s, self._began_s + self._stretch.duration_s(self._steps)), self._finish)

    def context_tokens(self) -> int:
        """Of all sequences, now."""
        if self._stretch is None:
            return self.batch.context_tokens
        done = self._stretch.steps_after(self._events.now_s - self._began_s) - 1
        return self.batch.context_tokens + done * len(self.batch)

    def _begin(self, stretch: FastForward, *, share: float = 1.0) -> None:
        assert not self.is_running
        self._stretch, self._steps, self._began_s, self._share = stretch, stretch.steps, self._events.now_s, share
        self._end = self._events.at(self._began_s + stretch.duration_s(stretch.steps), self._finish)

    def _finish(self) -> None:
        """The stretch is over: count it, and let go who ended with it."""
        stretch, steps, size = self._stretch, self._steps, len(self.batch)
        assert stretch is not None
        duration_s = stretch.duration_s(steps)
        self.busy_s += duration_s * self._share
        self.flops += steps * self._machine.times.decode_flops(size, self.batch.context_tokens + (steps - 1) * size // 2)
        self._count_gaps(stretch, steps, size, duration_s)
        self._stretch, self._end, self._stopped_s = None, None, self._events.now_s
        ended = self.batch.advance(steps)
        for job in ended:
            job.finish_s = self._events.now_s
        self._on_stop(ended)

    def _count_gaps(self, stretch: FastForward, steps: int, size: int, duration_s: float) -> None:
        """Those who joined waited since their first token, the others since the last stretch's end."""
        for job in self._joined:
            self._gaps.add(self._began_s + stretch.first_s - job.first_token_s, 1)
        self._gaps.add(self._began_s + stretch.first_s - self._stopped_s, size - len(self._joined))
        if steps > 1:
            self._gaps.add((duration_s - stretch.first_s) / (steps - 1), (steps - 1) * size)
        self._joined.clear()


class DecodeServer:
    """First come, first served into the batch; joining and leaving takes place between two steps."""

    def __init__(self, machine: InstanceModel, events: EventQueue, gaps: Gaps, on_end: Callable[[SimulatedJob], None]) -> None:
        self.loop = DecodeLoop(machine, events, gaps, self._go_on)
        self.used_tokens = 0
        """KV cache that is taken or reserved by the sequences of the batch."""
        self._capacity_tokens = machine.capacity_tokens
        self._on_end = on_end
        self._queue: deque[SimulatedJob] = deque()
        self._promised = 0
        self._coming_tokens = 0
        """Of the prompts that are promised or wait."""

    @property
    def sequences(self) -> int:
        """Decoded, waiting, and promised."""
        return len(self.loop.batch) + len(self._queue) + self._promised

    def context_tokens(self) -> int:
        """Of all of these, now."""
        return self.loop.context_tokens() + self._coming_tokens

    def promise(self, job: SimulatedJob) -> None:
        """It will be given, or broken off."""
        self._promised += 1
        self._coming_tokens += job.request.input_tokens

    def break_off(self, job: SimulatedJob) -> None:
        """It will not come after all."""
        self._promised -= 1
        self._coming_tokens -= job.request.input_tokens

    def give(self, job: SimulatedJob) -> None:
        """Its KV cache has arrived."""
        self._promised -= 1
        self._queue.append(job)
        if self.loop.is_running:
            self.loop.cut()
        else:
            self._go_on([])

    def _go_on(self, ended: list[SimulatedJob]) -> None:
        for job in ended:
            self.used_tokens -= job.cache_tokens
            self._on_end(job)
        while self._queue and self.used_tokens + self._queue[0].cache_tokens <= self._capacity_tokens:
            job = self._queue.popleft()
            self._coming_tokens -= job.request.input_tokens
            self.used_tokens += job.cache_tokens
            self.loop.join(job)
        if len(self.loop.batch):
            self.loop.run()
