"""Promises of runs.py, with real processes: rows in order, every failure named, nothing left behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.kvcache.traces.mooncake import TraceRequest
from kvstore.lab.jobs import Job, PolicyJob, PolicyRow
from kvstore.lab.runs import run_jobs, spread
from kvstore.protocol.errors import Broken, ConfigError
from tests.lab.prompts import requests

TALK = requests([[1, 2], [1, 2, 3], [4], [1, 2, 3, 5]])
JOBS: list[Job] = [PolicyJob(policy, capacity) for policy in ("lru", "sieve") for capacity in (9, 3, 1)]

ids = st.lists(st.lists(st.integers(0, 5) | st.integers(0, 2**64 - 1), max_size=5), max_size=10)


@dataclass(frozen=True)
class Faulty:
    """A job of a policy that fails in a way of one's choice."""

    policy: str
    way: str

    def run(self, requests: Sequence[TraceRequest]) -> PolicyRow:
        if self.way == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.way == "waits":
            signal.pause()
        if self.way == "raises":
            raise KeyError("a key of its own")
        raise AssertionError


def faulty(way: str) -> Job:
    return cast("Job", Faulty("odd", way))


@pytest.fixture(autouse=True)
def nothing_stays() -> Any:
    yield
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("processes", [0, 1, 3])
def test_rows_come_in_the_order_of_jobs_whatever_the_processes(processes: int) -> None:
    done: list[bool] = []
    rows = run_jobs(JOBS, TALK, processes=processes, on_done=lambda: done.append(True))
    assert rows == [job.run(TALK) for job in JOBS]
    assert len(done) == len(JOBS)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_policy_that_raises_is_named(processes: int) -> None:
    with pytest.raises(Broken, match=r"the policy odd failed: KeyError: 'a key of its own' \(.*way='raises'\)"):
        run_jobs([JOBS[0], faulty("raises"), *JOBS], TALK, processes=processes)


def test_a_process_that_dies_is_an_error_and_not_a_wait_for_ever() -> None:
    with pytest.raises(Broken, match="the policy odd failed: its worker process died"):
        run_jobs([faulty("dies"), faulty("dies"), JOBS[0]], TALK, processes=2)


@pytest.mark.parametrize("processes", [1, 2])
def test_misuse_stays_what_it_is(processes: int) -> None:
    with pytest.raises(ConfigError, match="'fifo'"):
        run_jobs([PolicyJob("fifo", 1), JOBS[0]], TALK, processes=processes)


def test_an_interrupt_ends_every_process() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_jobs(JOBS, TALK, processes=2, on_done=interrupt)


INTERRUPTED = """
import sys
from tests.lab.test_runs import JOBS, TALK, faulty, run_jobs
try:
    run_jobs([JOBS[0], faulty("waits"), faulty("waits")], TALK, processes=2, on_done=lambda: print("done", flush=True))
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_runs_ctrl_c_is_handled_by_the_caller_only() -> None:
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"done\n"
        os.killpg(process.pid, signal.SIGINT)
        # The streams end when the last process that has them does.
        assert process.communicate(timeout=120) == (b"", b"")
        assert process.returncode == 130
    finally:
        process.kill()
        process.wait()


@given(ids)
def test_blocks_are_the_same_ones_under_other_ids(found: list[list[int]]) -> None:
    old, new = requests(found), spread(requests(found))
    assert [replace(request, hash_ids=()) for request in old] == [replace(request, hash_ids=()) for request in new]
    assert [len(request.hash_ids) for request in old] == [len(request.hash_ids) for request in new]
    pairs = {
        (one, other) for before, after in zip(old, new, strict=True) for one, other in zip(before.hash_ids, after.hash_ids, strict=True)
    }
    assert len({one for one, _ in pairs}) == len({other for _, other in pairs}) == len(pairs)
