"""Counters of jobs."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

from kvstore.client.jobs.circuit_breaker import BreakerStats
from kvstore.client.jobs.job import Job, JobKind, Result
from kvstore.protocol.errors import Cancelled, DeadlineExceeded, KVStoreError, Unavailable

_NAMES: Final = {Unavailable: "unreachable", DeadlineExceeded: "expired", Cancelled: "cancelled"}


@dataclass(frozen=True, slots=True)
class KindStats:
    """Counters of finished jobs of one kind. All but `jobs` and `moved_bytes` count keys, and add up to `keys`."""

    jobs: int = 0
    keys: int = 0
    succeeded: int = 0
    """Found, loaded, stored, or present already."""
    missed: int = 0
    """Absent, by the store's answer."""
    refused: int = 0
    """Refused because the queue was full; for stores, dropped."""
    skipped: int = 0
    """Not sent because the breaker was open, and not local."""
    unreachable: int = 0
    expired: int = 0
    """Past the deadline, in the queue or in the call."""
    cancelled: int = 0
    failed: int = 0
    """Any other error."""
    moved_bytes: int = 0
    """Bytes of values loaded, or stored (including those present already)."""


@dataclass(frozen=True, slots=True)
class JobStats:
    """Counters of finished jobs by kind, and current state. Calls in the caller's thread count as jobs."""

    kinds: Mapping[JobKind, KindStats]
    waiting: int
    running: int
    held_bytes: int
    """Bytes of stores that wait or run."""
    reads: BreakerStats
    """Breaker of lookups and loads."""
    writes: BreakerStats


class JobCounters:
    """Mutable form of KindStats. Not thread-safe."""

    def __init__(self) -> None:
        self._counts = {kind: dict.fromkeys((each.name for each in fields(KindStats)), 0) for kind in JobKind}

    def ended(self, job: Job, *, is_skipped: bool = False) -> None:
        """Count a finished job; `is_skipped`: it was not sent, and every key that is not local has an error."""
        counts = self._counts[job.kind]
        counts["jobs"] += 1
        counts["keys"] += len(job.keys)
        if is_skipped:
            here = sum(job.succeeded)
            counts["succeeded"] += here
            counts["skipped"] += len(job.keys) - here
            return
        found, missed = job.results.count(True), job.results.count(False)
        if job.kind in (JobKind.LOOKUP, JobKind.PREFIX) and found + missed == len(job.keys):  # the common case, and much faster
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
    if job.kind is JobKind.LOAD:
        size = job.results[index]
        assert isinstance(size, int)
        return size
    return job.sizes[index] if job.kind is JobKind.STORE else 0


def _name(result: Result) -> str:
    """Counter of a key that was run and did not succeed."""
    for kind, name in _NAMES.items():
        if isinstance(result, kind):
            return name
    return "failed" if isinstance(result, KVStoreError) else "missed"
