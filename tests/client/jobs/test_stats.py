"""Promises of stats.py."""

import dataclasses

import pytest

from kvstore.client.jobs.job import JobKind, Result
from kvstore.client.jobs.stats import JobCounters, KindStats
from kvstore.protocol.errors import Cancelled, Corrupt, DeadlineExceeded, Full, Unavailable, Unreachable
from tests.client.jobs.made import job


def tallied(kind: JobKind, results: list[Result], *, admitted: int = 3, is_skipped: bool = False) -> KindStats:
    tally = JobCounters()
    tally.ended(job(kind, results=results, admitted=admitted), is_skipped=is_skipped)
    stats = tally.snapshot()[kind]
    assert (stats.jobs, stats.keys) == (1, 3)
    counts = dataclasses.asdict(stats)
    assert sum(counts.values()) - stats.jobs - stats.keys - stats.moved_bytes == stats.keys  # each key counts once
    return dataclasses.replace(stats, jobs=0, keys=0)


@pytest.mark.parametrize(
    ("kind", "results", "counted"),
    [
        (JobKind.LOOKUP, [True, False, False], KindStats(succeeded=1, missed=2)),
        (JobKind.PREFIX, [True, True, False], KindStats(succeeded=2, missed=1)),
        (JobKind.LOOKUP, [True, False, Corrupt("a")], KindStats(succeeded=1, missed=1, failed=1)),
        (JobKind.LOAD, [7, None, 5], KindStats(succeeded=2, missed=1, moved_bytes=12)),
        (JobKind.STORE, [True, False, True], KindStats(succeeded=3, moved_bytes=60)),
        (JobKind.LOAD, [Unreachable("a"), Unavailable("b"), DeadlineExceeded("c")], KindStats(unreachable=2, expired=1)),
        (JobKind.STORE, [Cancelled("a"), Corrupt("b"), Full("c")], KindStats(cancelled=1, failed=2)),
    ],
)
def test_each_key_is_counted_by_what_became_of_it(kind: JobKind, results: list[Result], counted: KindStats) -> None:
    assert tallied(kind, results) == counted


def test_keys_that_were_answered_without_asking_were_skipped() -> None:
    store_unavailable = Unavailable("unreachable")
    assert tallied(JobKind.LOAD, [store_unavailable] * 3, is_skipped=True) == KindStats(skipped=3)
    assert tallied(JobKind.PREFIX, [True, store_unavailable, store_unavailable], is_skipped=True) == KindStats(succeeded=1, skipped=2)
