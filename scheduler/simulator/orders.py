"""The orders in which one group of GPUs does both: prefill first, decode first, in chunks. Each says what comes next, no more.

The fourth, none of both on one group, is prefill.py with decode.py. Names and sources: the table "Serving Scheduling".
"""

from collections.abc import Callable
from typing import ClassVar

from kvstore.scheduler.simulator.cache import LocalCache
from kvstore.scheduler.simulator.coupled import CoupledServer
from kvstore.scheduler.simulator.events import EventQueue
from kvstore.scheduler.simulator.gaps import Gaps
from kvstore.scheduler.simulator.job import Job
from kvstore.scheduler.simulator.machine import Machine
from kvstore.scheduler.simulator.prefill import count_prefill


class PrefillFirst(CoupledServer):
    """A prompt that waits is computed before the next decode step: the batch stalls meanwhile.

    Source: Kwon et al., vLLM, SOSP 2023, and Yu et al., Orca, OSDI 2022.
    """

    def _next(self) -> None:
        job = self._take()
        if job is not None:
            duration_s = count_prefill(job, self._machine, self.cache)
            self._count_flops(tokens=job.request.input_tokens, prefix_tokens=job.prefix_tokens)
            self._compute(duration_s, lambda: self._end(job))
        elif len(self.loop.batch):
            self.loop.run()

    def _end(self, job: Job) -> None:
        self._prefilled(job)
        self._next()


class DecodeFirst(CoupledServer):
    """A batch is decoded to its last token before the next prompts are computed, all that wait and fit together.

    Sequences that end leave at once, where a fixed batch would decode on beside them to no use: kinder than its original.
    Source: FasterTransformer (NVIDIA), as described by Agrawal et al., Sarathi-Serve, OSDI 2024, section 3.
    """

    yields: ClassVar[bool] = False

    def queue_s(self) -> float:
        """With what is left of the batch, by the time of its step now."""
        batch = self.loop.batch
        left_s = batch.longest_steps * self._machine.tbt_s(len(batch), batch.context_tokens) if len(batch) else 0.0
        return super().queue_s() + left_s

    def _next(self) -> None:
        if len(self.loop.batch):
            self.loop.run()
            return
        taken: list[Job] = []
        while (job := self._take()) is not None:
            taken.append(job)
        if not taken:
            return
        duration_s = 0.0
        for job in taken:
            duration_s += count_prefill(job, self._machine, self.cache)
            self._count_flops(tokens=job.request.input_tokens, prefix_tokens=job.prefix_tokens)
        self._compute(duration_s, lambda: self._end(taken, duration_s))

    def _end(self, taken: list[Job], duration_s: float) -> None:
        """They have their first tokens together."""
        for job in taken:
            job.prefill_s = duration_s - job.load_s
            self._prefilled(job)
        self._next()


class Chunked(CoupledServer):
    """Prompts are computed in chunks, each in one step with the batch's next tokens: nobody stalls, everybody slows down.

    One prompt at a time: its last chunk is not filled up with the next one's beginning.
    Source: Agrawal et al., Sarathi-Serve, OSDI 2024, section 4.
    """

    def __init__(
        self,
        machine: Machine,
        events: EventQueue,
        cache: LocalCache,
        gaps: Gaps,
        *,
        on_prefilled: Callable[[Job], bool],
        on_end: Callable[[Job], None],
        chunk_tokens: int,
    ) -> None:
        super().__init__(machine, events, cache, gaps, on_prefilled=on_prefilled, on_end=on_end)
        self._chunk_tokens = chunk_tokens
        self._job: Job | None = None
        self._began_s = 0.0
        self._done_tokens = 0

    def queue_s(self) -> float:
        """With what is left of the prompt that is being computed."""
        found_s = super().queue_s()
        if self._job is not None and self._done_tokens < self._job.request.input_tokens:
            found_s += self._machine.times.prefill_s(self._job.request.input_tokens, self._done_tokens)
        return found_s

    def _next(self) -> None:
        load_s = self._begin() if self._job is None else 0.0
        if self._job is not None:
            self._run_chunk(self._job, load_s)
        elif len(self.loop.batch):
            self.loop.run()

    def _begin(self) -> float:
        """Take the next prompt if there is one; what loading its prefix adds to its first chunk."""
        self._job = job = self._take()
        if job is None:
            return 0.0
        count_prefill(job, self._machine, self.cache)
        self._began_s, self._done_tokens = self._events.now_s, job.prefix_tokens
        return job.load_s

    def _run_chunk(self, job: Job, load_s: float) -> None:
        prefix = self._done_tokens
        tokens = min(self._chunk_tokens, job.request.input_tokens - prefix)
        self._count_flops(tokens=prefix + tokens, prefix_tokens=prefix)
        step_s = self._machine.times.step_s
        alone_s = load_s + step_s(new_tokens=tokens, prefix_tokens=prefix, batch=0, context_tokens=0)
        self._done_tokens += tokens
        if not len(self.loop.batch):
            self._compute(alone_s, self._end_chunk_alone)
            return
        self.busy_s += alone_s
        batch = self.loop.batch
        together_s = load_s + step_s(new_tokens=tokens, prefix_tokens=prefix, batch=len(batch), context_tokens=batch.context_tokens)
        self._free_s = self._events.now_s + together_s
        self.loop.run_step(together_s, decode_share_s=together_s - alone_s)

    def _stopped(self, ended: list[Job]) -> None:
        self._end_chunk()
        super()._stopped(ended)

    def _end_chunk_alone(self) -> None:
        self._end_chunk()
        self._next()

    def _end_chunk(self) -> None:
        """If that was the last of a prompt, it is decoded from now on."""
        job = self._job
        if job is not None and self._done_tokens >= job.request.input_tokens:
            self._job = None
            job.prefill_s = self._events.now_s - self._began_s - job.load_s
            self._prefilled(job)
