"""Threads that submit, cancel, fetch and wait at random: each job is delivered once, with a result per key, and
counted."""

import dataclasses
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from kvstore.client.jobs.config import JobSettings
from kvstore.client.jobs.job import Job, JobKind
from kvstore.client.jobs.jobs import Jobs
from kvstore.client.jobs.stats import KindStats
from kvstore.protocol.errors import Unavailable
from kvstore.protocol.settings import Size
from tests.client.jobs.faulty import FaultyClient, raises

THREADS, STEPS = 4, 150
SETTINGS = JobSettings(
    read_workers=2,
    write_workers=2,
    queue_bytes=Size(20_000),
    queue_jobs=8,
    batch_bytes=Size(4000),
    lookup_deadline_s=60,
    load_deadline_s=60,
    store_deadline_s=60,
    probe_interval_s=0.001,
)


class User:
    """One thread's share of the work."""

    def __init__(self, number: int, jobs: Jobs, client: FaultyClient) -> None:
        self._number = number
        self._jobs, self._client = jobs, client
        self._random = random.Random(number)
        self.submitted: list[Job] = []
        self.told: Counter[int] = Counter()
        self._lock = threading.Lock()

    def on_done(self, job: Job) -> None:
        with self._lock:
            self.told[id(job)] += 1

    def run(self) -> None:
        for step in range(STEPS):
            keys = [b"stress %d" % self._random.randrange(200) for _ in range(self._random.randrange(6))]
            keys = list(dict.fromkeys(keys))
            request, on_done = f"{self._number} {step % 7}", self.on_done if step % 2 else None
            what = self._random.randrange(6)
            if what == 0:
                self.submitted.append(self._jobs.store(keys, [key * 200 for key in keys], request=request, on_done=on_done))
            elif what == 1:
                self.submitted.append(self._jobs.load(keys, [bytearray(2600) for _ in keys], request=request, on_done=on_done))
            elif what == 2:
                self.submitted.append(self._jobs.lookup(keys, request=request, on_done=on_done))
            elif what == 3:
                self._jobs.cancel(request)
                assert self._jobs.poll(request)
            elif what == 4 and self.submitted:
                assert self._random.choice(self.submitted).wait(60)
            elif self._random.randrange(10) == 0:
                self._client.faults.append(raises(Unavailable("unreachable")))


def test_each_job_is_told_once_and_all_is_accounted_for(client: FaultyClient) -> None:
    with Jobs(client, SETTINGS) as jobs:
        users = [User(number, jobs, client) for number in range(THREADS)]
        fetched: list[Job] = []
        with ThreadPoolExecutor(THREADS) as threads:
            running = [threads.submit(user.run) for user in users]
            while not all(each.done() for each in running):
                fetched += jobs.finished()
            for each in running:
                each.result()
        jobs.close(drain_s=60)
        fetched += jobs.finished()
        submitted = [job for user in users for job in user.submitted]
        told = Counter(map(id, fetched))
        for user in users:
            told += user.told
        assert told == Counter(map(id, submitted))
        assert all(job.is_over and len(job.results) == len(job.keys) for job in submitted)
        stats = jobs.stats()
        assert (stats.waiting, stats.running, stats.held_bytes) == (0, 0, 0)
        for kind in (JobKind.STORE, JobKind.LOAD, JobKind.LOOKUP):
            of_kind = [job for job in submitted if job.kind is kind]
            counted = dataclasses.asdict(stats.kinds[kind])
            assert (counted["jobs"], counted["keys"]) == (len(of_kind), sum(len(job.keys) for job in of_kind))
            assert counted["succeeded"] == sum(sum(job.succeeded) for job in of_kind)
            assert sum(counted.values()) - counted["jobs"] - counted["keys"] - counted["moved_bytes"] == counted["keys"]
        assert stats.kinds[JobKind.PREFIX] == KindStats()
