"""A few threads that do the reads and writes of a batch at once."""

from collections import deque
from collections.abc import Callable, Iterable

from kvstore.rpc.workers import started

Job = Callable[[], None]


class IoThreads:
    """Threads that all batches share. Any thread may call `run`."""

    def __init__(self, threads: int) -> None:
        """Raises ConfigError: there are not so many threads to be had."""
        self._threads = threads
        self._pool = started(threads, "nvme-io")

    def run(self, jobs: Iterable[Job]) -> None:
        """Do all jobs, in this order and several at once; return when the last one is done. A job raises nothing.

        The caller's thread does some of them itself: a batch ends even while others have all threads.
        """
        waiting = deque(jobs)

        def work() -> None:
            while True:
                try:
                    job = waiting.popleft()
                except IndexError:
                    return
                job()

        helpers = [self._pool.submit(work) for _ in range(min(len(waiting) - 1, self._threads))]
        work()
        for helper in helpers:
            if not helper.cancel():
                helper.result()

    def close(self) -> None:
        """Wait for the jobs under way. A second close is a no-op."""
        self._pool.shutdown()
