"""Promises of job.py."""

import asyncio

import pytest

from kvstore.client.jobs.job import AsyncJob, Kind, Result
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


def test_tasks_that_wait_are_woken_by_its_end_and_may_be_cancelled() -> None:
    async def play() -> None:
        made = AsyncJob(Kind.LOOKUP, None, [b"key"], deadline_ns=1 << 62, budget_s=1.0)
        waiting = [asyncio.ensure_future(made.wait()) for _ in range(3)]
        assert not await made.wait(0.01)
        assert not await made.wait(-1)
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
        assert waiting[0].cancelled()
        made.end()
        assert await asyncio.gather(*waiting[1:]) == [True, True]
        assert await made.wait(0)

    asyncio.run(play())
