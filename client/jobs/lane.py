"""Jobs that wait for a worker, and those under way: first come, first served, bounded in number and in bytes. Sans-I/O."""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate

from kvstore.client.jobs.job import BaseJob
from kvstore.protocol.errors import Full
from kvstore.protocol.settings import format_size


class Lane:
    """Not thread-safe."""

    def __init__(self, *, max_jobs: int, max_bytes: int | None) -> None:
        """`max_bytes` bounds the values of jobs that wait or run; None: they hold no memory but their caller's."""
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self.waiting: deque[BaseJob] = deque()
        self.running: set[BaseJob] = set()
        self.held_bytes = 0
        """Of the values of all of them."""

    def add(self, job: BaseJob) -> bool:
        """Let it wait, with as many of its keys, from the first on, as there is room for; the others are refused with Full. False if
        those are all."""
        if len(self.waiting) >= self._max_jobs:
            job.refuse(0, Full(f"{len(self.waiting)} jobs wait already (setting queue_jobs)"))
            return False
        if self._max_bytes is not None:
            room_bytes = self._max_bytes - self.held_bytes
            fitting = _fitting(job.sizes, room_bytes)
            if fitting < len(job.keys):
                refusal = Full(
                    f"{format_size(self.held_bytes)} wait to be stored: there is no room for "
                    f"{format_size(sum(job.sizes[fitting:]))} more (queue_bytes)"
                )
                job.refuse(fitting, refusal)
        if not job.admitted:
            return False
        self.held_bytes += job.held_bytes
        self.waiting.append(job)
        return True

    def take(self) -> BaseJob | None:
        """The next job, under way from now on."""
        if not self.waiting:
            return None
        job = self.waiting.popleft()
        self.running.add(job)
        return job

    def remove(self, job: BaseJob) -> bool:
        """It is not to be carried out; False if it does not wait any more."""
        if job not in self.waiting:
            return False
        self.waiting.remove(job)
        self.held_bytes -= job.held_bytes
        return True

    def ended(self, job: BaseJob) -> None:
        """A job that was taken is over."""
        self.running.remove(job)
        self.held_bytes -= job.held_bytes

    def overdue(self, now_ns: int) -> list[BaseJob]:
        """Those whose deadline has passed while they waited; they wait no more."""
        late = [job for job in self.waiting if job.deadline_ns <= now_ns]
        for job in late:
            self.remove(job)
        return late

    def jobs(self) -> Iterator[BaseJob]:
        yield from self.waiting
        yield from self.running

    def check_integrity(self) -> None:
        """What the bounds are held against is what there is."""
        assert self.held_bytes == sum(job.held_bytes for job in self.jobs())


def _fitting(sizes: Sequence[int], room_bytes: int) -> int:
    """How many of the values, from the first on, fit."""
    return next((index for index, total in enumerate(accumulate(sizes)) if total > room_bytes), len(sizes))
