"""Pools of threads where the system may have no thread left to give (pids.max of a container, memory).

A pool of Python's starts its threads as work comes, after it has queued that. Where it cannot start one, `submit` raises and the work is
done all the same, by whichever thread is free next, behind the back of who has been refused: into memory that is another's by then, say. So
either all threads are there before there is any work (`started`), or work that was refused is taken back (`submit_once`).
"""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor

from kvstore.protocol.errors import ConfigError


def started(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool of so many threads, which are there. Raises ConfigError: the system does not give them."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    all_there = threading.Barrier(threads)
    try:
        for _ in range(threads):
            pool.submit(all_there.wait)
    except (RuntimeError, MemoryError) as error:
        all_there.abort()
        pool.shutdown(cancel_futures=True)
        raise not_given(threads, name, error) from error
    return pool


def not_given(threads: int, name: str, error: Exception) -> ConfigError:
    """What comes of `error`, of the start of one of so many threads."""
    return ConfigError(f"{threads} threads ({name}) cannot be had: {error}; raise the limit of processes, pids.max of a container")


def submit_once(pool: Executor, work: Callable[[], object]) -> "Future[None] | None":
    """Have a thread of the pool do `work` in its turn; what that raises is lost. None: the pool is closed, or has no thread, and does
    not do it later either. `cancel` of what is returned takes it back, unless it has begun."""
    turn: Future[None] = Future()
    held = [work]

    def run() -> None:
        if turn.set_running_or_notify_cancel():
            held.pop()()

    try:
        pool.submit(run)
    except RuntimeError:
        if turn.cancel():
            held.clear()  # the pool keeps `run` until it has a thread
            return None
    return turn
