"""Thread pools that are safe when the system cannot start a thread (pids.max of a container, memory).

ThreadPoolExecutor queues work before it starts a thread for it. If the start fails, `submit` raises, but the work stays
queued and may run later, for example into memory that was reused. So either start all threads before any work
(`started`), or cancel work whose submit failed (`submit_once`).
"""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor

from kvstore.protocol.errors import ConfigError


def started(threads: int, name: str) -> ThreadPoolExecutor:
    """Return a pool whose threads are all running. Raises ConfigError: the system cannot start them."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    all_there = threading.Barrier(threads)
    try:
        for _ in range(threads):
            pool.submit(all_there.wait)
    except (RuntimeError, MemoryError) as error:
        all_there.abort()
        pool.shutdown(cancel_futures=True)
        raise start_error(threads, name, error) from error
    return pool


def start_error(threads: int, name: str, error: Exception) -> ConfigError:
    """Return the error of a failed start of one of these threads."""
    return ConfigError(f"cannot start {threads} threads ({name}): {error}; raise the limit of processes (pids.max of a container)")


def submit_once(pool: Executor, work: Callable[[], object]) -> "Future[None] | None":
    """Submit `work` to the pool; its exception is lost. None: the pool is closed or has no thread, and never runs it.

    Cancelling the returned future withdraws the work unless it has begun.
    """
    future: Future[None] = Future()
    pending = [work]

    def run() -> None:
        if future.set_running_or_notify_cancel():
            pending.pop()()

    try:
        pool.submit(run)
    except RuntimeError:
        if future.cancel():
            pending.clear()  # the pool keeps `run` until it has a thread
            return None
    return future
