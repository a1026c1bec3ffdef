"""Simulated instances that prefill and decode on the same GPUs: prefill first, decode first, or chunked prefill.

Each has a queue of prompts, a prefix cache and a decode loop. Names and sources: the paper's table "Serving Scheduling".
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import ClassVar

from kvstore.lab.simulator.decode import DecodeLoop, Gaps
from kvstore.lab.simulator.job import EventQueue, SimulatedJob
from kvstore.lab.simulator.plan import InstanceModel
from kvstore.lab.simulator.prefill import LocalCache, NetworkQueue, count_prefill


class CoupledServer(ABC):
    """Base of the coupled instances, FIFO. A prompt starts when its fetched blocks have arrived and its final KV cache fits; until then
    the batch is decoded."""

    yields: ClassVar[bool] = True
    """True if a new prompt interrupts decoding after the current step."""

    def __init__(
        self,
        machine: InstanceModel,
        events: EventQueue,
        cache: LocalCache,
        gaps: Gaps,
        *,
        on_prefilled: Callable[[SimulatedJob], bool],
        on_end: Callable[[SimulatedJob], None],
    ) -> None:
        self.cache = cache
        self.rails = NetworkQueue(machine.send_bytes_per_s)
        self.loop = DecodeLoop(machine, events, gaps, self._stopped)
        self.busy_s = 0.0
        """Time of prefills; the loop has that of decode steps."""
        self.flops = 0.0
        self.used_tokens = 0
        self._machine = machine
        self._events = events
        self._on_prefilled = on_prefilled
        self._on_end = on_end
        self._queue: deque[SimulatedJob] = deque()
        self._free_s = 0.0
        """End of the last or current prefill."""
        self._is_computing = False

    def queue_s(self) -> float:
        """Return the expected seconds until a new prompt could start, decode steps not counted."""
        running_s = max(0.0, self._free_s - self._events.now_s)
        return running_s + sum(job.expected_prefill_s for job in self._queue)

    @property
    def sequences(self) -> int:
        """Sequences in the batch and in the queue."""
        return len(self.loop.batch) + len(self._queue)

    def context_tokens(self) -> int:
        return self.loop.context_tokens() + sum(job.request.input_tokens for job in self._queue)

    def enqueue(self, job: SimulatedJob) -> None:
        """Queue a prompt whose `ready_s` and `expected_prefill_s` are set."""
        self._queue.append(job)
        self.wake()

    def wake(self) -> None:
        """Start the next prompt if possible. Called when a prompt or its blocks arrive."""
        if self.loop.is_running:
            if self.yields:
                self.loop.cut()
        elif not self._is_computing:
            self._next()

    @abstractmethod
    def _next(self) -> None:
        """Start the next work on idle GPUs, or stay idle until the next `wake`."""

    def _stopped(self, ended: list[SimulatedJob]) -> None:
        """Handle the end of a run of the decode loop."""
        for job in ended:
            self._leave(job)
        self._next()

    def _take(self) -> SimulatedJob | None:
        """Remove the first prompt from the queue and reserve its cache; None if it cannot start now."""
        now_s = self._events.now_s
        if not self._queue or self._queue[0].ready_s > now_s:
            return None
        job = self._queue[0]
        if self.used_tokens + job.cache_tokens > self._machine.capacity_tokens:
            return None
        self._queue.popleft()
        self.used_tokens += job.cache_tokens
        job.begin_prefill(head_s=self._free_s, now_s=now_s)
        return job

    def _compute(self, duration_s: float, then: Callable[[], None]) -> None:
        """Occupy the GPUs with prefill for this time, then call `then`."""
        self.busy_s += duration_s
        self._is_computing = True
        self._free_s = self._events.now_s + duration_s

        def end() -> None:
            self._is_computing = False
            then()

        self._events.at(self._free_s, end)

    def _prefilled(self, job: SimulatedJob) -> None:
        """Handle the first token: join the batch, or end if that was the only token or the admission rejects the job."""
        job.first_token_s = self._events.now_s
        self.cache.insert(job.request.keys, first=job.prefix_blocks)
        if not self._on_prefilled(job):
            self.used_tokens -= job.cache_tokens
        elif job.output_tokens > 1:
            self.loop.join(job)
        else:
            job.finish_s = self._events.now_s
            self._leave(job)

    def _leave(self, job: SimulatedJob) -> None:
        self.used_tokens -= job.cache_tokens
        self._on_end(job)

    def _count_flops(self, *, tokens: int, prefix_tokens: int) -> None:
        self.flops += self._machine.times.prefill_flops(tokens, prefix_tokens)


class PrefillFirst(CoupledServer):
    """Waiting prompts are prefilled before the next decode step; the batch stalls meanwhile.

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

    def _end(self, job: SimulatedJob) -> None:
        self._prefilled(job)
        self._next()


class DecodeFirst(CoupledServer):
    """A batch is decoded to its last token before the next prompts are prefilled, all that fit together.

    Unlike in the original, finished sequences leave the batch at once, so they waste no decode time.
    Source: FasterTransformer (NVIDIA), as described by Agrawal et al., Sarathi-Serve, OSDI 2024, section 3.
    """

    yields: ClassVar[bool] = False

    def queue_s(self) -> float:
        """As the base, plus the rest of the batch at the current step time."""
        batch = self.loop.batch
        left_s = batch.longest_steps * self._machine.tbt_s(len(batch), batch.context_tokens) if len(batch) else 0.0
        return super().queue_s() + left_s

    def _next(self) -> None:
        if len(self.loop.batch):
            self.loop.run()
            return
        taken: list[SimulatedJob] = []
        while (job := self._take()) is not None:
            taken.append(job)
        if not taken:
            return
        duration_s = 0.0
        for job in taken:
            duration_s += count_prefill(job, self._machine, self.cache)
            self._count_flops(tokens=job.request.input_tokens, prefix_tokens=job.prefix_tokens)
        self._compute(duration_s, lambda: self._end(taken, duration_s))

    def _end(self, taken: list[SimulatedJob], duration_s: float) -> None:
        """Handle the first tokens of all prompts of a prefill."""
        for job in taken:
            job.prefill_s = duration_s - job.load_s
            self._prefilled(job)
        self._next()


class Chunked(CoupledServer):
    """Prompts are prefilled in chunks, each in one step with the batch's next tokens: decode never stalls, but steps take longer.

    One prompt at a time: its last chunk is not filled up from the next prompt.
    Source: Agrawal et al., Sarathi-Serve, OSDI 2024, section 4.
    """

    def __init__(
        self,
        machine: InstanceModel,
        events: EventQueue,
        cache: LocalCache,
        gaps: Gaps,
        *,
        on_prefilled: Callable[[SimulatedJob], bool],
        on_end: Callable[[SimulatedJob], None],
        chunk_tokens: int,
    ) -> None:
        super().__init__(machine, events, cache, gaps, on_prefilled=on_prefilled, on_end=on_end)
        self._chunk_tokens = chunk_tokens
        self._job: SimulatedJob | None = None
        self._began_s = 0.0
        self._done_tokens = 0

    def queue_s(self) -> float:
        """As the base, plus the rest of the current prompt."""
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
        """Start the next prompt if possible; return the load time of its prefix, which delays its first chunk."""
        self._job = job = self._take()
        if job is None:
            return 0.0
        count_prefill(job, self._machine, self.cache)
        self._began_s, self._done_tokens = self._events.now_s, job.prefix_tokens
        return job.load_s

    def _run_chunk(self, job: SimulatedJob, load_s: float) -> None:
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

    def _stopped(self, ended: list[SimulatedJob]) -> None:
        self._end_chunk()
        super()._stopped(ended)

    def _end_chunk_alone(self) -> None:
        self._end_chunk()
        self._next()

    def _end_chunk(self) -> None:
        """After a prompt's last chunk, move it to the batch."""
        job = self._job
        if job is not None and self._done_tokens >= job.request.input_tokens:
            self._job = None
            job.prefill_s = self._events.now_s - self._began_s - job.load_s
            self._prefilled(job)
