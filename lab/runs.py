"""Process pool for the lab's jobs over one trace: a pipe per worker process, one job at a time.

Workers are spawned, not forked, because the caller may have threads. They ignore SIGINT, which a terminal sends to the whole process group:
the caller is interrupted, and kills them.
"""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from kvstore.kvcache.traces.mooncake import TraceRequest
from kvstore.lab.jobs import Job, Row
from kvstore.protocol.errors import Broken, KVStoreError

SIGNAL_INTERVAL_S: Final = 1.0
"""Longest wait: Python handles a signal that arrives just before a wait only after it."""

STEPS: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def run_jobs(
    jobs: Sequence[Job], requests: Sequence[TraceRequest], *, processes: int = 0, on_done: Callable[[], None] = lambda: None
) -> list[Row]:
    """Run the jobs and return their rows, in the order of the jobs. Block ids are hashed first (`spread`).

    `processes` 0: one per processor; 1: run in the calling process. `on_done` is called in the calling process as jobs end, in any order.
    Raises a job's KVStoreError, and Broken with the job's policy for any other exception or a dead worker. All workers are killed by then.
    """
    requests = spread(requests)
    count = min(processes or len(os.sched_getaffinity(0)), len(jobs))
    return _sequentially(jobs, requests, on_done) if count <= 1 else _in_parallel(jobs, requests, count, on_done)


def _sequentially(jobs: Sequence[Job], requests: Sequence[TraceRequest], on_done: Callable[[], None]) -> list[Row]:
    rows = []
    for job in jobs:
        rows.append(_outcome(job, _attempt(job, requests)))
        on_done()
    return rows


def _in_parallel(jobs: Sequence[Job], requests: Sequence[TraceRequest], count: int, on_done: Callable[[], None]) -> list[Row]:
    rows: dict[int, Row] = {}
    todo = iter(range(len(jobs)))
    with _workers(count, requests) as pipes:
        busy: dict[Connection, int] = {}
        for pipe in pipes:
            _send_next(pipe, jobs, todo, busy)
        while busy:
            for pipe in cast("list[Connection]", wait(list(busy), SIGNAL_INTERVAL_S)):
                index = busy.pop(pipe)
                rows[index] = _outcome(jobs[index], _receive(pipe))
                on_done()
                _send_next(pipe, jobs, todo, busy)
    return [rows[index] for index in range(len(jobs))]


def _send_next(pipe: Connection, jobs: Sequence[Job], todo: Iterator[int], busy: dict[Connection, int]) -> None:
    """Send the next job to a worker, if there is one."""
    index = next(todo, None)
    if index is not None:
        busy[pipe] = index
        with contextlib.suppress(OSError):  # a dead worker: `_receive` reports it
            pipe.send(jobs[index])


def _receive(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return Broken("its worker process died, perhaps out of memory")


def _outcome(job: Job, found: Any) -> Row:
    if isinstance(found, Broken):
        raise Broken(f"the policy {job.policy} failed: {found} ({job})")
    if isinstance(found, KVStoreError):
        raise found
    row: Row = found
    return row


def _attempt(job: Job, requests: Sequence[TraceRequest]) -> Row | KVStoreError:
    try:
        return job.run(requests)
    except KVStoreError as error:
        return error
    except Exception as error:  # any bug of a policy: the lab exists to find these
        return Broken(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


@contextlib.contextmanager
def _workers(count: int, requests: Sequence[TraceRequest]) -> Iterator[list[Connection]]:
    """Worker processes, which are killed at the end of the block."""
    context = multiprocessing.get_context("spawn")
    resource_tracker.ensure_running()  # its start unblocks SIGINT, so it must not happen below
    started: list[tuple[BaseProcess, Connection]] = []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(target=work, args=(theirs, requests), daemon=True)
            # The child inherits the mask from its first instruction on.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                process.start()
                started.append((process, ours))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                theirs.close()
        yield [pipe for _, pipe in started]
    finally:
        for worker, pipe in started:
            worker.kill()
            worker.join()
            worker.close()
            pipe.close()


def work(pipe: Connection, requests: Sequence[TraceRequest]) -> None:
    """Main loop of a worker: reply to each job with its row or its error, until the pipe is closed."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.send(_attempt(pipe.recv(), requests))


def spread(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Replace block ids by a bijective hash of them, so that policies cannot profit from consecutive ids.

    Source: the finalizer of SplitMix64, in Steele, Lea, Flood, Fast splittable pseudorandom number generators, OOPSLA 2014.
    """
    ids: NDArray[np.uint64] = np.fromiter(chain.from_iterable(request.hash_ids for request in requests), dtype=np.uint64)
    for shift, factor in STEPS:
        ids = (ids ^ (ids >> np.uint64(shift))) * np.uint64(factor)
    ids ^= ids >> np.uint64(31)
    found = iter(ids.tolist())
    return [
        TraceRequest(request.timestamp_ms, request.input_length, request.output_length, tuple(next(found) for _ in request.hash_ids))
        for request in requests
    ]
