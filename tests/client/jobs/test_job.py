"""Promises of job.py."""

import pytest

from kvstore.client.jobs.job import Kind, Result
from kvstore.protocol.errors import Cancelled, DeadlineExceeded, Unavailable
from tests.client.jobs.made import job

AWAY = Unavailable("away")


@pytest.mark.parametrize(
    ("kind", "results", "succeeded"),
    [
        (Kind.LOOKUP, [True, False, AWAY], [True, False, False]),
        (Kind.PREFIX, [True, True, False], [True, True, False]),
        (Kind.LOAD, [7, None, AWAY], [True, False, False]),
        (Kind.STORE, [True, False, AWAY], [True, True, False]),
    ],
)
def test_a_failure_is_a_miss(kind: Kind, results: list[Result], succeeded: list[bool]) -> None:
    made = job(kind, results=results)
    assert made.succeeded == succeeded
    assert made.leading == succeeded.index(False)
    assert made.error is (AWAY if AWAY in results else None)


def test_it_says_why_it_is_not_to_be_carried_out() -> None:
    made = job(deadline_ns=10)
    assert made.reason_to_stop(9) is None
    assert isinstance(made.reason_to_stop(10), DeadlineExceeded)
    made.is_cancelled = True
    assert isinstance(made.reason_to_stop(9), Cancelled)
