"""A simulated instance that does both prefill and decode on the same GPUs: a queue of prompts, a prefix cache, one decode loop.

Which comes next whenever the GPUs are free is not said here but by each order, in orders.py.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import ClassVar

from kvstore.scheduler.simulator.cache import LocalCache
from kvstore.scheduler.simulator.decode_loop import DecodeLoop
from kvstore.scheduler.simulator.events import EventQueue
from kvstore.scheduler.simulator.gaps import Gaps
from kvstore.scheduler.simulator.job import Job
from kvstore.scheduler.simulator.machine import Machine
from kvstore.scheduler.simulator.rails import Rails


class CoupledServer(ABC):
    """First come, first served. A prompt is taken when its fetched blocks are there and the KV cache that it needs to its end fits; until
    then the batch is decoded."""

    yields: ClassVar[bool] = True
    """Whether decoding is cut short when a prompt comes."""

    def __init__(
        self,
        machine: Machine,
        events: EventQueue,
        cache: LocalCache,
        gaps: Gaps,
        *,
        on_prefilled: Callable[[Job], bool],
        on_end: Callable[[Job], None],
    ) -> None:
        self.cache = cache
        self.rails = Rails(machine.send_bytes_per_s)
        self.loop = DecodeLoop(machine, events, gaps, self._stopped)
        self.busy_s = 0.0
        """Of prefills; those of decode steps are the loop's."""
        self.flops = 0.0
        self.used_tokens = 0
        self._machine = machine
        self._events = events
        self._on_prefilled = on_prefilled
        self._on_end = on_end
        self._queue: deque[Job] = deque()
        self._free_s = 0.0
        """The moment a prefill last ended or the running one will."""
        self._is_computing = False

    def queue_s(self) -> float:
        """Expected seconds until it could start on something new, if no decode step came between."""
        running_s = max(0.0, self._free_s - self._events.now_s)
        return running_s + sum(job.expected_prefill_s for job in self._queue)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def sequences(self) -> int:
        """In the batch and waiting for their prefill."""
        return len(self.loop.batch) + len(self._queue)

    def context_tokens(self) -> int:
        return self.loop.context_tokens() + sum(job.request.input_tokens for job in self._queue)

    def give(self, job: Job) -> None:
        """A prompt, with `ready_s` and `expected_prefill_s` filled in."""
        self._queue.append(job)
        self.wake()

    def wake(self) -> None:
        """There may be something to begin with."""
        if self.loop.is_running:
            if self.yields:
                self.loop.cut()
        elif not self._is_computing:
            self._next()

    @abstractmethod
    def _next(self) -> None:
        """The GPUs are free: begin something, or stay idle until the next `wake`."""

    def _stopped(self, ended: list[Job]) -> None:
        """The decode loop is idle."""
        for job in ended:
            self._leave(job)
        self._next()

    def _take(self) -> Job | None:
        """The first prompt off the queue, its room reserved; None if it cannot begin now."""
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
        """Prefill and nothing else for so long."""
        self.busy_s += duration_s
        self._is_computing = True
        self._free_s = self._events.now_s + duration_s

        def end() -> None:
            self._is_computing = False
            then()

        self._events.at(self._free_s, end)

    def _prefilled(self, job: Job) -> None:
        """It has its first token: it is decoded from now on, unless that was all or the simulation says no."""
        job.first_token_s = self._events.now_s
        self.cache.insert(job.request.keys, first=job.prefix_blocks)
        if not self._on_prefilled(job):
            self.used_tokens -= job.cache_tokens
        elif job.output_tokens > 1:
            self.loop.join(job)
        else:
            job.finish_s = self._events.now_s
            self._leave(job)

    def _leave(self, job: Job) -> None:
        self.used_tokens -= job.cache_tokens
        self._on_end(job)

    def _count_flops(self, *, tokens: int, prefix_tokens: int) -> None:
        self.flops += self._machine.times.prefill_flops(tokens, prefix_tokens)
