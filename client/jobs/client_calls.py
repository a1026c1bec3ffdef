"""Runs a job by calls of a client, in parts, so that it can be cancelled between two; with a result per key."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from functools import partial
from typing import Any, Final

from kvstore.client.core.buffers import nbytes_of
from kvstore.client.holds import Hold
from kvstore.client.jobs.job import Job, JobKind, Result
from kvstore.client.sync import Client
from kvstore.protocol.errors import Closed, DeadlineExceeded, Forked, InvalidArgument, KVStoreError, Unavailable, typed

log = logging.getLogger("kvstore.client")

UNREACHABLE: Final = (Unavailable, DeadlineExceeded)
"""Errors of a call whose store cannot be reached or does not answer in time."""
NOT_ASKED: Final = (InvalidArgument, Closed, Forked)
"""Errors that a client raises without sending anything."""
Ask = Callable[[float], Any]
"""Sends one request, with a timeout in seconds."""


class JobOutcome(Enum):
    """Evidence about the store from one job."""

    ANSWERED = "answered"
    UNREACHABLE = "unreachable"
    UNKNOWN = "unknown"
    """Nothing was sent, or with less time than the job's budget."""


class Calls:
    """Runs jobs by calls of a client and classifies their outcome. Thread-safe, as the client is. Raises nothing: an
    error outside the error tree is logged and wrapped."""

    def __init__(self, client: Client, *, batch_bytes: int, clock_ns: Callable[[], int]) -> None:
        self._client = client
        self._batch_bytes = batch_bytes
        self._clock_ns = clock_ns

    def carry_out(self, job: Job) -> JobOutcome:
        """Run the job: fills in the results of all keys."""
        outcome = JobOutcome.UNKNOWN
        for start, stop in self._parts(job):
            now_ns = self._clock_ns()
            error = job.reason_to_stop(now_ns)
            if error is None:
                with self._within(job):
                    answer = self.ask(partial(self._call, job, start, stop))
                is_failure = isinstance(answer, KVStoreError)
                results = [answer] if is_failure else _results(job, answer, stop - start)
                error = answer if is_failure else job.answer(start, results, UNREACHABLE)
                if not all(isinstance(result, NOT_ASKED) for result in results):
                    outcome = _outcome(job, error, now_ns)
            if error is not None:
                job.fail(job.answered, job.admitted, error)
                break
        return outcome

    def ask(self, call: Callable[[], Any]) -> Any:
        """Result of `call`, or the typed error that it raised."""
        try:
            return call()
        except Exception as error:
            return _failure(error)

    def release(self, hold: Hold) -> None:
        """End a hold of the client."""
        self.ask(lambda: self._client.release(hold))

    def note_trace(self, job: Job) -> None:
        """Save the caller's trace context: the job's calls, made by another thread, become parts of it."""
        if self._client.tracing is not None:
            job.trace = self._client.tracing.here()

    def _within(self, job: Job) -> AbstractContextManager[None]:
        tracing = self._client.tracing
        return tracing.within(job.trace) if tracing is not None and job.trace is not None else nullcontext()

    def here(self, job: Job) -> list[bool]:
        """Return which of the job's keys are readable on this host, without a request."""
        try:
            return self._client.exists_here(job.keys)
        except Exception as error:
            _failure(error)
            return [False] * len(job.keys)

    def probe(self, job: Job) -> Ask:
        """A request that tests whether the store is reachable after this job failed.

        Lookups are repeated. A load, whose buffers are the caller's again, becomes a view of the first key that failed.
        """
        client, keys = self._client, job.keys[: job.admitted]
        if job.kind is JobKind.LOOKUP:
            return lambda deadline_s: client.exists_batch(keys, deadline_s=deadline_s)
        if job.kind is JobKind.PREFIX:
            return lambda deadline_s: client.match_prefix(keys, deadline_s=deadline_s)
        return partial(
            self._read_view, next(key for key, result in zip(keys, job.results, strict=False) if isinstance(result, UNREACHABLE))
        )

    def _read_view(self, key: bytes, deadline_s: float) -> None:
        with self._client.view(key, deadline_s=deadline_s):
            pass

    def _call(self, job: Job, start: int, stop: int) -> Any:
        client, left_s = self._client, (job.deadline_ns - self._clock_ns()) / 1e9
        keys = job.keys[start:stop]
        match job.kind:
            case JobKind.LOOKUP:
                return client.exists_batch(keys, hold=job.hold, deadline_s=left_s)
            case JobKind.PREFIX:
                return client.match_prefix(keys, hold=job.hold, deadline_s=left_s)
            case JobKind.LOAD:
                return client.get_each_into(keys, job.values[start:stop], retention=job.retention, deadline_s=left_s)
            case JobKind.STORE:
                return client.put_batch_from(
                    keys,
                    job.values[start:stop],
                    namespace=job.namespace,
                    parents=None if job.parents is None else job.parents[start:stop],
                    ack=job.ack,
                    retention=job.retention,
                    deadline_s=left_s,
                )

    def _parts(self, job: Job) -> Iterator[tuple[int, int]]:
        """Split the admitted keys at `batch_bytes`, and at keys that are left out: (start, stop) each."""
        if job.kind in (JobKind.LOOKUP, JobKind.PREFIX):
            yield 0, job.admitted
            return
        start = part_bytes = 0
        for index in range(job.admitted):
            is_out = index in job.left_out
            if index > start and (is_out or part_bytes + job.sizes[index] > self._batch_bytes):
                yield start, index
                start, part_bytes = index, 0
            if is_out:
                start = index + 1
            else:
                part_bytes += job.sizes[index]
        if start < job.admitted or not job.admitted:
            yield start, job.admitted


def _failure(error: Exception) -> KVStoreError:
    """The typed form of an error; one outside the error tree is a bug, and logged."""
    if isinstance(error, KVStoreError):
        return error
    log.error("a job of a client failed", exc_info=error)
    return typed(error)


def _results(job: Job, answer: Any, count: int) -> Sequence[Result]:
    """Results per key from the client's answer for `count` keys."""
    results: Sequence[Result] = [True] * answer + [False] * (count - answer) if job.kind is JobKind.PREFIX else answer
    return results


def _outcome(job: Job, error: KVStoreError | None, began_ns: int) -> JobOutcome:
    """Classify a call. A timeout with less than half of the job's budget does not count against the store."""
    if not isinstance(error, UNREACHABLE):
        return JobOutcome.ANSWERED
    is_pressed = 2 * (job.deadline_ns - began_ns) < job.budget_s * 1e9
    return JobOutcome.UNKNOWN if is_pressed and isinstance(error, DeadlineExceeded) else JobOutcome.UNREACHABLE


def sizes_of(values: Any) -> list[int]:
    """Bytes of each value or buffer; rows of one array or tensor are its values. 0 for an object that the client will
    refuse."""
    whole = nbytes_of(values)
    if whole is not None and len(values):
        return [whole // len(values)] * len(values)
    return [_size_of(value) for value in values]


def _size_of(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(map(_size_of, value))
    size = nbytes_of(value)
    if size is None:
        size = getattr(value, "size_bytes", None)
    if isinstance(size, int):
        return size
    return len(value) if isinstance(value, (bytes, bytearray)) else 0
