"""Jobs during outages of daemons: misses at once, and never a wrong byte."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.client import Client
from kvstore.client.config import ClientSettings
from kvstore.client.jobs.circuit_breaker import BreakerStats, CircuitState
from kvstore.client.jobs.config import JobSettings
from kvstore.client.jobs.job import Job
from kvstore.client.jobs.jobs import Jobs
from kvstore.testing.transfer.awaited import eventually
from tests.client.processes import Cluster, cluster

SETTINGS = JobSettings(lookup_deadline_s=60, load_deadline_s=60, store_deadline_s=60, probe_interval_s=0.02, probe_deadline_s=1)
ASKS_THE_NODE = ClientSettings(use_index=False)
KEYS = [b"block %d" % i for i in range(32)]
VALUES = [key.ljust(100_000, b"-") for key in KEYS]
SHORT_S = 0.5
"""For what cannot succeed."""


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path) as started:
        started.start_node("--dram", "64MiB")
        yield started


def over(job: Job) -> Job:
    assert job.wait(120)
    return job


def load(jobs: Jobs, deadline_s: float | None = None) -> tuple[Job, list[bytearray]]:
    buffers = [bytearray(len(value)) for value in VALUES]
    return jobs.load(KEYS, buffers, deadline_s=deadline_s), buffers


def is_right(job: Job, buffers: list[bytearray]) -> bool:
    """Return whether every value that the job reports as loaded is the one that was put."""
    loaded = zip(job.succeeded, buffers, VALUES, strict=True)
    return all(buffer == value for has_succeeded, buffer, value in loaded if has_succeeded)


def until_closed(jobs: Jobs, side: str) -> BreakerStats:
    while True:
        breaker: BreakerStats = getattr(jobs.stats(), side)
        if breaker.state is CircuitState.CLOSED:
            return breaker
        if side == "writes":
            jobs.store([b"trial"], [b"x"], deadline_s=SHORT_S)


def test_stopped_node_costs_one_deadline(running: Cluster) -> None:
    with Client(running.address, settings=ASKS_THE_NODE) as client, Jobs(client, SETTINGS) as jobs:
        assert over(jobs.store(KEYS, VALUES, ack="cluster")).succeeded == [True] * len(KEYS)
        running.nodes[0].send(signal.SIGSTOP)
        while jobs.stats().reads.state is CircuitState.CLOSED:  # as a rule once: a worker may begin too late to blame the store
            late, _ = load(jobs, SHORT_S)
            assert over(late).error is not None
        for _ in range(100):
            missed, _ = load(jobs)
            assert missed.is_over
            assert jobs.match_prefix(KEYS) == 0
        running.nodes[0].send(signal.SIGCONT)
        reads = until_closed(jobs, "reads")
        assert (reads.opened, reads.skipped) == (1, 200)
        found, buffers = load(jobs)
        assert over(found).leading == len(KEYS)
        assert is_right(found, buffers)


def test_stores_to_a_stopped_node_are_skipped(running: Cluster) -> None:
    with Client(running.address) as client, Jobs(client, SETTINGS) as jobs:
        assert over(jobs.store(KEYS, VALUES, ack="cluster")).succeeded == [True] * len(KEYS)
        running.nodes[0].send(signal.SIGSTOP)
        while jobs.stats().writes.state is CircuitState.CLOSED:
            assert over(jobs.store([b"new"], [b"x" * 100_000], deadline_s=SHORT_S)).error is not None
        assert jobs.stats().reads.state is CircuitState.CLOSED
        running.nodes[0].send(signal.SIGCONT)
        until_closed(jobs, "writes")
        assert over(jobs.store([b"newer"], [b"x" * 100_000])).succeeded == [True]
        found, buffers = load(jobs)
        assert over(found).leading == len(KEYS)
        assert is_right(found, buffers)


def test_local_blocks_are_found_without_a_master(running: Cluster) -> None:
    with Client(running.address) as client, Jobs(client, SETTINGS) as jobs:
        assert over(jobs.store(KEYS, VALUES, ack="cluster")).succeeded == [True] * len(KEYS)
        first, _ = load(jobs)
        assert over(first).leading == len(KEYS)  # its memory is mapped
        running.master.stop(signal.SIGKILL)
        assert jobs.match_prefix([KEYS[0], b"elsewhere"]) <= 1
        # A node that is starved of time counts as away, too: as long as it is.
        eventually(lambda: jobs.match_prefix([*KEYS, b"elsewhere"]) == len(KEYS), "a prefix of this host to be found")
        eventually(lambda: jobs.exists([b"elsewhere", KEYS[5]]) == [False, True], "a block of this host to be found")
        eventually(lambda: over(jobs.lookup_prefix([*KEYS[:3], b"elsewhere", KEYS[3]])).leading == 3, "a prefix to be found by a job")
        eventually(lambda: over(load(jobs)[0]).leading == len(KEYS), "blocks of this host to be loaded")
        found, buffers = load(jobs)
        assert is_right(over(found), buffers)
        buffers = [bytearray(100_000) for _ in range(3)]
        eventually(
            lambda: over(jobs.load([KEYS[0], b"elsewhere", KEYS[1]], buffers)).succeeded == [True, False, True],
            "what is there of a load to be loaded",
        )
        assert buffers == [VALUES[0], bytes(100_000), VALUES[1]]
        elsewhere = jobs.load([b"elsewhere"], [bytearray(100_000)])
        assert elsewhere.is_over
        assert elsewhere.succeeded == [False]
        assert jobs.stats().reads.opened == 1
        running.start_master()
        until_closed(jobs, "reads")
        while jobs.match_prefix(KEYS) < len(KEYS):  # the node is not back yet
            pass


def test_killed_node_causes_misses_only(running: Cluster) -> None:
    with Client(running.address, settings=ASKS_THE_NODE) as client, Jobs(client, SETTINGS) as jobs:
        assert over(jobs.store(KEYS, VALUES, ack="cluster")).succeeded == [True] * len(KEYS)
        loads = [load(jobs) for _ in range(20)]
        stores = [jobs.store([b"more %d" % i], [b"x" * 100_000]) for i in range(20)]
        over(loads[3][0])
        running.nodes[0].stop(signal.SIGKILL)
        for job, buffers in loads:
            assert is_right(over(job), buffers)
        for store in stores:
            over(store)
        running.start_node("--dram", "64MiB")
        until_closed(jobs, "reads")
        until_closed(jobs, "writes")
        while not over(jobs.store(KEYS, VALUES, ack="cluster")).leading:
            pass  # the master still counts on the node that is gone
        found, buffers = load(jobs)
        assert is_right(over(found), buffers)
        assert jobs.stats().held_bytes == 0
