"""What jobs have come to since they began."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

from kvstore.client.jobs.circuit_breaker import BreakerStats
from kvstore.client.jobs.job import Job, JobKind, Result
from kvstore.protocol.errors import Cancelled, DeadlineExceeded, KVStoreError, Unavailable

_NAMES: Final = {Unavailable: "unreachable", DeadlineExceeded: "expired", Cancelled: "cancelled"}


@dataclass(frozen=True, slots=True)
class KindStats:
    """Of jobs of one kind that are over; all but `jobs` and `moved_bytes` in keys, which add up to `keys`."""

    jobs: int = 0
    keys: int = 0
    succeeded: int = 0
    """Found, loaded, stored or stored before."""
    missed: int = 0
    """The store said that it has them not."""
    refused: int = 0
    """No room in the queue: of stores, what was dropped."""
    skipped: int = 0
    """The breaker was open, and they are not on this host."""
    unreachable: int = 0
    expired: int = 0
    """The deadline was over, in the queue or in the call."""
    cancelled: int = 0
    failed: int = 0
    """For any other error."""
    moved_bytes: int = 0
    """Of the values loaded; of the values stored, those that were there before included."""


@dataclass(frozen=True, slots=True)
class JobStats:
    """Counters of jobs that are over, by kind, and what there is now. Guarded calls count as jobs."""

    kinds: Mapping[JobKind, KindStats]
    waiting: int
    running: int
    held_bytes: int
    """Of stores that wait or run."""
    reads: BreakerStats
    """Of the breaker before lookups and loads."""
    writes: BreakerStats


class JobCounters:
    """The live form of KindStats. Not thread-safe."""

    def __init__(self) -> None:
        self._counts = {kind: dict.fromkeys((each.name for each in fields(KindStats)), 0) for kind in JobKind}

    def ended(self, job: Job, *, is_skipped: bool = False) -> None:
        """A job is over; `is_skipped`: it was answered without asking, with an error for each key that is not on this host."""
        counts = self._counts[job.kind]
        counts["jobs"] += 1
        counts["keys"] += len(job.keys)
        if is_skipped:
            here = sum(job.succeeded)
            counts["succeeded"] += here
            counts["skipped"] += len(job.keys) - here
            return
        found, missed = job.results.count(True), job.results.count(False)
        if job.kind in (JobKind.LOOKUP, JobKind.PREFIX) and found + missed == len(job.keys):  # as a rule, and much faster
            counts["succeeded"] += found
            counts["missed"] += missed
            return
        for index, (has_succeeded, result) in enumerate(zip(job.succeeded, job.results, strict=True)):
            if has_succeeded:
                counts["succeeded"] += 1
                counts["moved_bytes"] += _moved_bytes(job, index)
            elif index >= job.admitted:
                counts["refused"] += 1
            elif index in job.left_out:
                counts["skipped"] += 1
            else:
                counts[_name(result)] += 1

    def snapshot(self) -> dict[JobKind, KindStats]:
        return {kind: KindStats(**counts) for kind, counts in self._counts.items()}


def _moved_bytes(job: Job, index: int) -> int:
    """Of a key that has succeeded."""
    if job.kind is JobKind.LOAD:
        size = job.results[index]
        assert isinstance(size, int)
        return size
    return job.sizes[index] if job.kind is JobKind.STORE else 0


def _name(result: Result) -> str:
    """The counter of a key that was asked for and has not succeeded."""
    for kind, name in _NAMES.items():
        if isinstance(result, kind):
            return name
    return "failed" if isinstance(result, KVStoreError) else "missed"
