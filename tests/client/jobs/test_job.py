"""Promises of job.py."""

import pytest

from kvstore.client.jobs.job import JobKind, Result
from kvstore.protocol.errors import Unavailable
from tests.client.jobs.made import job

AWAY = Unavailable("unreachable")


@pytest.mark.parametrize(
    ("kind", "results", "succeeded"),
    [
        (JobKind.LOOKUP, [True, False, AWAY], [True, False, False]),
        (JobKind.PREFIX, [True, True, False], [True, True, False]),
        (JobKind.LOAD, [7, None, AWAY], [True, False, False]),
        (JobKind.STORE, [True, False, AWAY], [True, True, False]),
    ],
)
def test_a_failure_is_a_miss(kind: JobKind, results: list[Result], succeeded: list[bool]) -> None:
    made = job(kind, results=results)
    assert made.succeeded == succeeded
    assert made.leading == succeeded.index(False)
    assert made.error is (AWAY if AWAY in results else None)
