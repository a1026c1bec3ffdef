"""Many jobs over one trace, in processes of their own: a pipe each, one job at a time. It knows nothing of what a job does.

Processes are spawned, not forked: the caller may have threads. They get no SIGINT (Ctrl-C goes to the whole group of a terminal): whoever
waits here is interrupted, and ends them.
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
"""A signal that comes in just before a wait begins is looked at after it: none is longer."""

STEPS: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def run_jobs(
    jobs: Sequence[Job], requests: Sequence[TraceRequest], *, processes: int = 0, on_done: Callable[[], None] = lambda: None
) -> list[Row]:
    """The jobs' rows, in the order of the jobs, over the requests with their ids spread (keys.py).

    With 0 processes as many as there are processors, with 1 in the caller's own. `on_done` is called in the caller's process as jobs
    end, in any order. Raises what a job raises of kvstore's errors, and Broken, with the job's
    policy, for any other exception or a process that died. All processes are gone then.
    """
    requests = spread(requests)
    count = min(processes or len(os.sched_getaffinity(0)), len(jobs))
    return _in_turn(jobs, requests, on_done) if count <= 1 else _in_parallel(jobs, requests, count, on_done)


def _in_turn(jobs: Sequence[Job], requests: Sequence[TraceRequest], on_done: Callable[[], None]) -> list[Row]:
    rows = []
    for job in jobs:
        rows.append(_outcome(job, _attempt(job, requests)))
        on_done()
    return rows


def _in_parallel(jobs: Sequence[Job], requests: Sequence[TraceRequest], count: int, on_done: Callable[[], None]) -> list[Row]:
    rows: dict[int, Row] = {}
    todo = iter(range(len(jobs)))
    with _workers(count, requests) as pipes:
        at_work: dict[Connection, int] = {}
        for pipe in pipes:
            _give(pipe, jobs, todo, at_work)
        while at_work:
            for pipe in cast("list[Connection]", wait(list(at_work), SIGNAL_INTERVAL_S)):
                index = at_work.pop(pipe)
                rows[index] = _outcome(jobs[index], _answer(pipe))
                on_done()
                _give(pipe, jobs, todo, at_work)
    return [rows[index] for index in range(len(jobs))]


def _give(pipe: Connection, jobs: Sequence[Job], todo: Iterator[int], at_work: dict[Connection, int]) -> None:
    """The next job, if there is one."""
    index = next(todo, None)
    if index is not None:
        at_work[pipe] = index
        with contextlib.suppress(OSError):  # it died: its end of the pipe says so when it is asked
            pipe.send(jobs[index])


def _answer(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return Broken("the process that ran it died, perhaps for want of memory")


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
    except Exception as error:  # a policy's own fault, of whatever kind: it is what the lab is there to find
        return Broken(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


@contextlib.contextmanager
def _workers(count: int, requests: Sequence[TraceRequest]) -> Iterator[list[Connection]]:
    """Processes that answer jobs until the end of the block, then are ended, whatever they do."""
    context = multiprocessing.get_context("spawn")
    resource_tracker.ensure_running()  # starting it unblocks SIGINT: not between the lines below
    started: list[tuple[BaseProcess, Connection]] = []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(target=work, args=(theirs, requests), daemon=True)
            # What is blocked here is blocked there, from its first instruction on.
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
    """In a process of its own: answer each job with its row or its error, until the other end is closed."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.send(_attempt(pipe.recv(), requests))


def spread(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """The same requests with other ids: equal where they were equal, different where they were different.

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
