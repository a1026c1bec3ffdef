"""A simulated decode instance: continuous batching within the KV cache that its GPUs hold, and a queue for what does not fit.

A sequence is let in when there is room for all the tokens it will have, so none is ever thrown out again: engines that overcommit and
recompute are not simulated.
"""

from collections import deque
from collections.abc import Callable

from kvstore.scheduler.simulator.decode_loop import DecodeLoop
from kvstore.scheduler.simulator.events import EventQueue
from kvstore.scheduler.simulator.gaps import Gaps
from kvstore.scheduler.simulator.job import Job
from kvstore.scheduler.simulator.machine import Machine


class DecodeServer:
    """First come, first served into the batch; joining and leaving takes place between two steps."""

    def __init__(self, machine: Machine, events: EventQueue, gaps: Gaps, on_end: Callable[[Job], None]) -> None:
        self.loop = DecodeLoop(machine, events, gaps, self._go_on)
        self.used_tokens = 0
        """KV cache that is taken or reserved by the sequences of the batch."""
        self._capacity_tokens = machine.capacity_tokens
        self._on_end = on_end
        self._queue: deque[Job] = deque()
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

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def promise(self, job: Job) -> None:
        """It will be given, or broken off."""
        self._promised += 1
        self._coming_tokens += job.request.input_tokens

    def break_off(self, job: Job) -> None:
        """It will not come after all."""
        self._promised -= 1
        self._coming_tokens -= job.request.input_tokens

    def give(self, job: Job) -> None:
        """Its KV cache has arrived."""
        self._promised -= 1
        self._queue.append(job)
        if self.loop.is_running:
            self.loop.cut()
        else:
            self._go_on([])

    def _go_on(self, ended: list[Job]) -> None:
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
