"""Threads for work beside a node's loop, all started before there is any: what they are given is done.

A pool of Python's starts its threads as work comes, after it has queued that. Where the system has no thread to give (pids.max, memory) the
caller is told so, and what it gave is done later all the same: into slots that are another block's by then.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

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
        raise ConfigError(
            f"{threads} threads ({name}) cannot be had: {error}; raise the limit of processes, pids.max of a container"
        ) from error
    return pool
