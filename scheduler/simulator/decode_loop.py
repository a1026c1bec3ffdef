"""Decode steps in simulated time: a batch that runs in stretches, which can be cut short, and the figures of what it did.

Who may join is decided by its owner: decode.py, coupled.py.
"""

from collections.abc import Callable

from kvstore.scheduler.batching import RunningBatch
from kvstore.scheduler.simulator.events import Event, EventQueue
from kvstore.scheduler.simulator.gaps import Gaps
from kvstore.scheduler.simulator.job import Job
from kvstore.scheduler.simulator.machine import Machine
from kvstore.scheduler.simulator.stretches import Stretch, next_stretch


class DecodeLoop:
    """Runs one stretch at a time and then calls `on_stop` with the jobs that ended, while it is idle again."""

    def __init__(self, machine: Machine, events: EventQueue, gaps: Gaps, on_stop: Callable[[list[Job]], None]) -> None:
        self.batch: RunningBatch[Job] = RunningBatch()
        self.busy_s = 0.0
        self.flops = 0.0
        self.tokens = 0
        self._machine = machine
        self._events = events
        self._gaps = gaps
        self._on_stop = on_stop
        self._joined: list[Job] = []
        self._stretch: Stretch | None = None
        self._began_s = 0.0
        self._stopped_s = 0.0
        self._steps = 0
        self._share = 1.0
        self._end: Event | None = None

    @property
    def is_running(self) -> bool:
        return self._stretch is not None

    def join(self, job: Job) -> None:
        """It has its first token and takes part from the next step on. Only while idle."""
        assert not self.is_running
        self.batch.join(job, context_tokens=job.request.input_tokens + 1, steps=job.output_tokens - 1)
        self._joined.append(job)

    def run(self) -> None:
        """Begin a stretch, as long as the batch stays the same."""
        self._begin(next_stretch(self.batch, self._machine))

    def run_step(self, duration_s: float, *, decode_share_s: float) -> None:
        """Begin one step of another length, of which `decode_share_s` is the decoding's."""
        self._begin(Stretch(1, duration_s, 0.0), share=decode_share_s / duration_s)

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

    def _begin(self, stretch: Stretch, *, share: float = 1.0) -> None:
        assert not self.is_running
        self._stretch, self._steps, self._began_s, self._share = stretch, stretch.steps, self._events.now_s, share
        self._end = self._events.at(self._began_s + stretch.duration_s(stretch.steps), self._finish)

    def _finish(self) -> None:
        """The stretch is over: count it, and let go who ended with it."""
        stretch, steps, size = self._stretch, self._steps, len(self.batch)
        assert stretch is not None
        duration_s = stretch.duration_s(steps)
        self.busy_s += duration_s * self._share
        self.tokens += steps * size
        self.flops += steps * self._machine.times.decode_flops(size, self.batch.context_tokens + (steps - 1) * size // 2)
        self._count_gaps(stretch, steps, size, duration_s)
        self._stretch, self._end, self._stopped_s = None, None, self._events.now_s
        ended = self.batch.advance(steps)
        for job in ended:
            job.finish_s = self._events.now_s
        self._on_stop(ended)

    def _count_gaps(self, stretch: Stretch, steps: int, size: int, duration_s: float) -> None:
        """Those who joined waited since their first token, the others since the last stretch's end."""
        for job in self._joined:
            self._gaps.add(self._began_s + stretch.first_s - job.first_token_s, 1)
        self._gaps.add(self._began_s + stretch.first_s - self._stopped_s, size - len(self._joined))
        if steps > 1:
            self._gaps.add((duration_s - stretch.first_s) / (steps - 1), (steps - 1) * size)
        self._joined.clear()
