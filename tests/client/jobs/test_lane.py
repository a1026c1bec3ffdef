"""Promises of lane.py."""

import random

from kvstore.client.jobs.job import Lane
from kvstore.protocol.errors import Full
from tests.client.jobs.made import job


def test_first_come_first_served() -> None:
    lane = Lane(max_jobs=10, max_bytes=None)
    jobs = [job() for _ in range(5)]
    assert all(map(lane.add, jobs))
    assert [lane.take() for _ in range(6)] == [*jobs, None]


def test_keys_over_the_bound_are_refused_the_last_ones_first() -> None:
    lane = Lane(max_jobs=10, max_bytes=100)
    first, second, third = job(sizes=[40, 30]), job(sizes=[20, 10, 1]), job(sizes=[1])
    assert lane.add(first)
    assert lane.add(second)
    assert not lane.add(third)
    assert (first.admitted, second.admitted, third.admitted) == (2, 2, 0)
    assert second.results[:2] == [None, None]
    assert isinstance(second.results[2], Full)
    assert "1 B more" in str(second.error)
    assert lane.held_bytes == 100
    lane.check_integrity()


def test_room_is_there_again_when_a_job_is_over_not_when_it_is_taken() -> None:
    lane = Lane(max_jobs=10, max_bytes=10)
    first = job(sizes=[10])
    assert lane.add(first)
    assert lane.take() is first
    assert not lane.add(job(sizes=[1]))
    lane.ended(first)
    assert lane.add(job(sizes=[10]))
    lane.check_integrity()


def test_so_many_jobs_wait() -> None:
    lane = Lane(max_jobs=2, max_bytes=None)
    assert lane.add(job())
    assert lane.add(job())
    late = job()
    assert not lane.add(late)
    assert all(isinstance(result, Full) for result in late.results)
    lane.take()
    assert lane.add(job())


def test_a_job_without_keys_has_nothing_to_wait_for() -> None:
    assert not Lane(max_jobs=1, max_bytes=1).add(job(sizes=[]))


def test_overdue_jobs_wait_no_more() -> None:
    lane = Lane(max_jobs=10, max_bytes=1000)
    late, in_time = job(deadline_ns=5), job(deadline_ns=6)
    assert lane.add(late)
    assert lane.add(in_time)
    assert lane.overdue(4) == []
    assert lane.overdue(5) == [late]
    assert list(lane.jobs()) == [in_time]
    lane.check_integrity()


def test_what_is_removed_waits_no_more_and_what_runs_cannot_be() -> None:
    lane = Lane(max_jobs=10, max_bytes=1000)
    running, waiting = job(), job()
    assert lane.add(running)
    assert lane.add(waiting)
    assert lane.take() is running
    assert lane.remove(waiting)
    assert not lane.remove(waiting)
    assert not lane.remove(running)
    assert list(lane.jobs()) == [running]
    lane.check_integrity()


def test_bytes_are_counted_right_whatever_happens() -> None:
    chance, lane, running = random.Random(1), Lane(max_jobs=8, max_bytes=500), []
    for _ in range(2000):
        step = chance.randrange(4)
        if step == 0:
            lane.add(job(sizes=[chance.randrange(100) for _ in range(chance.randrange(5))]))
        elif step == 1 and (taken := lane.take()) is not None:
            running.append(taken)
        elif step == 2 and running:
            lane.ended(running.pop(chance.randrange(len(running))))
        elif step == 3 and lane.waiting:
            lane.remove(chance.choice(list(lane.waiting)))
        lane.check_integrity()
        assert lane.held_bytes <= 500
        assert len(lane.waiting) <= 8
