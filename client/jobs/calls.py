"""Carries out a job by calls of a client: part by part, so that it can be cancelled between two, and with a result a key."""

import logging
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any, Final

from kvstore.client.jobs.job import Job, Kind, Result
from kvstore.client.sync import Client
from kvstore.protocol.errors import DeadlineExceeded, KVStoreError, Unavailable, typed

log = logging.getLogger("kvstore.client")

UNREACHABLE: Final = (Unavailable, DeadlineExceeded)
"""What a call raises whose store cannot be reached, or does not answer in time."""
Ask = Callable[[float], object]
"""Asks the store something, within so many seconds."""


class Outcome(Enum):
    """What carrying out a job says about the store."""

    ANSWERED = "answered"
    UNREACHABLE = "unreachable"
    UNKNOWN = "unknown"
    """It was not asked, or not given the time that the job asked for."""


class Calls:
    """Thread-safe, as its client is. Raises nothing: what is not an error of the tree is somebody's mistake, becomes one, and is logged."""

    def __init__(self, client: Client, *, batch_bytes: int, clock_ns: Callable[[], int]) -> None:
        self._client = client
        self._batch_bytes = batch_bytes
        self._clock_ns = clock_ns

    def carry_out(self, job: Job) -> Outcome:
        """Fill in the results of all its keys."""
        outcome = Outcome.UNKNOWN
        for start, stop in self._parts(job):
            now_ns = self._clock_ns()
            error = job.reason_to_stop(now_ns)
            if error is None:
                answer = self.ask(lambda: self._call(job, start, stop))  # noqa: B023  (called here and now)
                error = job.answer(start, answer, UNREACHABLE) if not isinstance(answer, KVStoreError) else answer
                outcome = _outcome(job, error, now_ns)
            if error is not None:
                job.fail(job.answered, job.admitted, error)
                break
        return outcome

    def here(self, job: Job) -> list[bool]:
        """Which of its keys can be read on this host without asking anybody."""
        answer = self.ask(lambda: self._client.exists_here(job.keys))
        return [False] * len(job.keys) if isinstance(answer, KVStoreError) else answer

    def ask(self, call: Callable[[], Any]) -> Any:
        """What `call` returns, or the error that it raises, typed."""
        try:
            return call()
        except KVStoreError as error:
            return error
        except Exception as error:
            log.exception("a job of a client failed")
            return typed(error)

    def _call(self, job: Job, start: int, stop: int) -> Sequence[Result]:
        left_s = (job.deadline_ns - self._clock_ns()) / 1e9
        keys = job.keys[start:stop]
        match job.kind:
            case Kind.LOOKUP:
                return self._client.exists_batch(keys, deadline_s=left_s)
            case Kind.PREFIX:
                matched = self._client.match_prefix(keys, deadline_s=left_s)
                return [True] * matched + [False] * (len(keys) - matched)
            case Kind.LOAD:
                return self._client.get_each_into(keys, job.values[start:stop], deadline_s=left_s)
            case Kind.STORE:
                return self._client.put_batch_from(
                    keys,
                    job.values[start:stop],
                    namespace=job.namespace,
                    parents=None if job.parents is None else job.parents[start:stop],
                    ack=job.ack,
                    deadline_s=left_s,
                )

    def _parts(self, job: Job) -> Iterator[tuple[int, int]]:
        """The admitted keys, cut where a part's values would be more than a batch."""
        if job.kind in (Kind.LOOKUP, Kind.PREFIX):
            yield 0, job.admitted
            return
        start = part_bytes = 0
        for index in range(job.admitted):
            if index > start and part_bytes + job.sizes[index] > self._batch_bytes:
                yield start, index
                start, part_bytes = index, 0
            part_bytes += job.sizes[index]
        yield start, job.admitted

    def probe(self, job: Job) -> Ask:
        """What finds out whether the store can be reached again that could not be by this job: its question once more; of a load, without
        the caller's memory, whether the first block that was not loaded can be read."""
        client, keys = self._client, job.keys[: job.admitted]
        if job.kind is Kind.LOOKUP:
            return lambda deadline_s: client.exists_batch(keys, deadline_s=deadline_s)
        if job.kind is Kind.PREFIX:
            return lambda deadline_s: client.match_prefix(keys, deadline_s=deadline_s)
        key = next(key for key, result in zip(keys, job.results, strict=False) if isinstance(result, UNREACHABLE))

        def look(deadline_s: float) -> None:
            with client.view(key, deadline_s=deadline_s):
                pass

        return look


def _outcome(job: Job, error: KVStoreError | None, began_ns: int) -> Outcome:
    """Of a call. One that had less than half the job's time for itself is no proof of a store that does not answer."""
    if not isinstance(error, UNREACHABLE):
        return Outcome.ANSWERED
    is_pressed = 2 * (job.deadline_ns - began_ns) < job.deadline_s * 1e9
    return Outcome.UNKNOWN if is_pressed and isinstance(error, DeadlineExceeded) else Outcome.UNREACHABLE


def sizes_of(values: Any) -> list[int]:
    """Bytes of each value or buffer; of one array or tensor its rows are the values. 0 for what is none: the client refuses it."""
    whole = getattr(values, "nbytes", None)
    if isinstance(whole, int) and len(values):
        return [whole // len(values)] * len(values)
    return [_size_of(value) for value in values]


def _size_of(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(map(_size_of, value))
    for name in ("nbytes", "size_bytes"):
        size = getattr(value, name, None)
        if isinstance(size, int):
            return size
    return len(value) if isinstance(value, (bytes, bytearray)) else 0
