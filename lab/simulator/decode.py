"""Simulated decode instance: continuous batching within the KV cache of its GPUs, with a FIFO queue.

Decode steps of an unchanged batch are simulated as one event (fast forward). Until a sequence joins or ends, the batch size is fixed and
the context grows by that size per step. If the step time is affine in the context (as AnalyticModel's), the time of k steps is an
arithmetic series, and exact. Otherwise the number of steps is halved until it is affine, or at most MAX_BENT_STEPS, where a chord
approximates it.

A sequence is admitted only if its final cache fits, so none is preempted. Engines that overcommit are not simulated.
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
"""Largest relative deviation of the middle step from the chord that counts as affine; rounding errors are smaller."""


class Gaps:
    """Distribution of times between tokens. The steps of a fast forward are added as their mean."""

    def __init__(self) -> None:
        self._found: dict[float, int] = {}

    def add(self, gap_s: float, count: int) -> None:
        """Add `count` tokens that came `gap_s` after their predecessors."""
        if count:
            self._found[gap_s] = self._found.get(gap_s, 0) + count

    @property
    def count(self) -> int:
        return sum(self._found.values())

    @property
    def mean_s(self) -> float:
        """Mean gap; 0 without any."""
        return sum(gap_s * count for gap_s, count in self._found.items()) / (self.count or 1)

    def percentiles_s(self, shares: Sequence[float]) -> list[float]:
        """Return for each of `shares`, ascending, the smallest gap that this share does not exceed; 0 without any."""
        ordered = sorted(self._found.items())
        total, found, seen, position = self.count, [], 0, 0
        for share in shares:
            while position < len(ordered) and (seen < share * total or not seen):
                seen += ordered[position][1]
                position += 1
            found.append(ordered[position - 1][0] if position else 0.0)
        return found

    def points(self) -> Sequence[tuple[float, float]]:
        """Return the cumulative distribution: (gap in seconds, share of gaps at or below), ascending."""
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
        """Return the seconds of the first `steps` steps."""
        return steps * self.first_s + self.growth_s * (steps * (steps - 1) / 2)

    def steps_after(self, elapsed_s: float) -> int:
        """Return the number of steps up to the end of the one that runs or just ended at `elapsed_s`, in [1, steps]."""
        half = self.growth_s / 2
        if half > 0:
            linear = self.first_s - half
            found = (math.sqrt(linear * linear + 4 * half * elapsed_s) - linear) / (2 * half)
        else:
            found = elapsed_s / self.first_s
        steps = min(max(math.ceil(found), 1), self.steps)
        # Rounding of the root may be off by one step.
        while steps < self.steps and self.duration_s(steps) < elapsed_s:
            steps += 1
        while steps > 1 and self.duration_s(steps - 1) >= elapsed_s:
            steps -= 1
        return steps


def next_steps(batch: RunningBatch[T], times: DecodeTime) -> FastForward:
    """Return the steps until the first sequence ends, or fewer if the step time is not affine over all of them."""
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
    """Runs decode steps of a batch. After each fast forward it is idle and calls `on_stop` with the finished jobs."""

    def __init__(self, machine: InstanceModel, events: EventQueue, gaps: Gaps, on_stop: Callable[[list[SimulatedJob]], None]) -> None:
        self.batch: RunningBatch[SimulatedJob] = RunningBatch()
        self.busy_s = 0.0
        self.flops = 0.0
        self._machine = machine
        self._events = events
        self._gaps = gaps
        self._on_stop = on_stop
        self._joined: list[SimulatedJob] = []
        self._run: FastForward | None = None
        self._began_s = 0.0
        self._stopped_s = 0.0
        self._steps = 0
        self._share = 1.0
        self._end: SimulatedEvent | None = None

    @property
    def is_running(self) -> bool:
        return self._run is not None

    def join(self, job: SimulatedJob) -> None:
        """Add a job that has its first token. Only while idle."""
        assert not self.is_running
        self.batch.join(job, context_tokens=job.request.input_tokens + 1, steps=job.output_tokens - 1)
        self._joined.append(job)

    def run(self) -> None:
        """Start decode steps until the batch changes."""
        self._begin(next_steps(self.batch, self._machine))

    def run_step(self, duration_s: float, *, decode_share_s: float) -> None:
        """Start one step of the given duration, of which `decode_share_s` counts as decode."""
        self._begin(FastForward(1, duration_s, 0.0), share=decode_share_s / duration_s)

    def cut(self) -> None:
        """Stop after the current step. No-op while idle."""
        if self._run is None or self._end is None:
            return
        self._steps = self._run.steps_after(self._events.now_s - self._began_s)
        self._end.cancel()
        # max: the rounded sum may be an ulp before now.
        self._end = self._events.at(max(self._events.now_s, self._began_s + self._run.duration_s(self._steps)), self._finish)

    def context_tokens(self) -> int:
        """Return the current context of all sequences."""
        if self._run is None:
            return self.batch.context_tokens
        done = self._run.steps_after(self._events.now_s - self._began_s) - 1
        return self.batch.context_tokens + done * len(self.batch)

    def _begin(self, run: FastForward, *, share: float = 1.0) -> None:
        assert not self.is_running
        self._run, self._steps, self._began_s, self._share = run, run.steps, self._events.now_s, share
        self._end = self._events.at(self._began_s + run.duration_s(run.steps), self._finish)

    def _finish(self) -> None:
        """End the fast forward: count it, and pass on the finished jobs."""
        run, steps, size = self._run, self._steps, len(self.batch)
        assert run is not None
        duration_s = run.duration_s(steps)
        self.busy_s += duration_s * self._share
        self.flops += steps * self._machine.times.decode_flops(size, self.batch.context_tokens + (steps - 1) * size // 2)
        self._count_gaps(run, steps, size, duration_s)
        self._run, self._end, self._stopped_s = None, None, self._events.now_s
        ended = self.batch.advance(steps)
        for job in ended:
            job.finish_s = self._events.now_s
        self._on_stop(ended)

    def _count_gaps(self, run: FastForward, steps: int, size: int, duration_s: float) -> None:
        """The first gap of a new job began with its first token, that of the others with the end of the last run."""
        for job in self._joined:
            self._gaps.add(self._began_s + run.first_s - job.first_token_s, 1)
        self._gaps.add(self._began_s + run.first_s - self._stopped_s, size - len(self._joined))
        if steps > 1:
            self._gaps.add((duration_s - run.first_s) / (steps - 1), (steps - 1) * size)
        self._joined.clear()


class DecodeServer:
    """Decode instance with a FIFO queue. Sequences join and leave the batch between two steps."""

    def __init__(self, machine: InstanceModel, events: EventQueue, gaps: Gaps, on_end: Callable[[SimulatedJob], None]) -> None:
        self.loop = DecodeLoop(machine, events, gaps, self._next)
        self.used_tokens = 0
        """KV cache reserved by the sequences of the batch."""
        self._capacity_tokens = machine.capacity_tokens
        self._on_end = on_end
        self._queue: deque[SimulatedJob] = deque()
        self._reserved = 0
        self._pending_tokens = 0
        """Prompt tokens of reserved and queued jobs."""

    @property
    def sequences(self) -> int:
        """Sequences in the batch, in the queue, and reserved."""
        return len(self.loop.batch) + len(self._queue) + self._reserved

    def context_tokens(self) -> int:
        """Return the current context of all these sequences."""
        return self.loop.context_tokens() + self._pending_tokens

    def reserve(self, job: SimulatedJob) -> None:
        """Count a job that is being prefilled; `enqueue` or `cancel` follows."""
        self._reserved += 1
        self._pending_tokens += job.request.input_tokens

    def cancel(self, job: SimulatedJob) -> None:
        """Drop a reservation."""
        self._reserved -= 1
        self._pending_tokens -= job.request.input_tokens

    def enqueue(self, job: SimulatedJob) -> None:
        """Queue a reserved job whose KV cache has arrived."""
        self._reserved -= 1
        self._queue.append(job)
        if self.loop.is_running:
            self.loop.cut()
        else:
            self._next([])

    def _next(self, ended: list[SimulatedJob]) -> None:
        for job in ended:
            self.used_tokens -= job.cache_tokens
            self._on_end(job)
        while self._queue and self.used_tokens + self._queue[0].cache_tokens <= self._capacity_tokens:
            job = self._queue.popleft()
            self._pending_tokens -= job.request.input_tokens
            self.used_tokens += job.cache_tokens
            self.loop.join(job)
        if len(self.loop.batch):
            self.loop.run()
