"""Promises of job.py."""

import pytest

from kvstore.client.jobs.job import JobKind, Result
from kvstore.protocol.errors import Unavailable
from tests.client.jobs.made import job

NOT_RUNNING = Unavailable("unreachable")


@pytest.mark.parametrize(
    ("kind", "results", "succeeded"),
    [
        (JobKind.LOOKUP, [True, False, NOT_RUNNING], [True, False, False]),
        (JobKind.PREFIX, [True, True, False], [True, True, False]),
        (JobKind.LOAD, [7, None, NOT_RUNNING], [True, False, False]),
        (JobKind.STORE, [True, False, NOT_RUNNING], [True, True, False]),
    ],
)
def test_a_failure_is_a_miss(kind: JobKind, results: list[Result], succeeded: list[bool]) -> None:
    made = job(kind, results=results)
    assert made.succeeded == succeeded
    assert made.leading == succeeded.index(False)
    assert made.error is (NOT_RUNNING if NOT_RUNNING in results else None)
