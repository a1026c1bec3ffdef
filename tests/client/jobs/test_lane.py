"""Promises of request_stream.py."""

import random

from kvstore.client.jobs.job import JobQueue
from tests.client.jobs.made import job


def test_bytes_are_counted_right_whatever_happens() -> None:
    chance, queue, running = random.Random(1), JobQueue(max_jobs=8, max_bytes=500), []
    for _ in range(2000):
        step = chance.randrange(4)
        if step == 0:
            queue.add(job(sizes=[chance.randrange(100) for _ in range(chance.randrange(5))]))
        elif step == 1 and (taken := queue.take()) is not None:
            running.append(taken)
        elif step == 2 and running:
            queue.ended(running.pop(chance.randrange(len(running))))
        elif step == 3 and queue.waiting:
            queue.remove(chance.choice(list(queue.waiting)))
        queue.check_integrity()
        assert queue.held_bytes <= 500
        assert len(queue.waiting) <= 8
