"""Promises of request_stream.py."""

import random

from kvstore.client.jobs.job import Lane
from kvstore.protocol.errors import Full
from tests.client.jobs.made import job


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
