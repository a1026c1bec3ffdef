"""Rows of `benchmarks/small_puts.py`: single puts of 4 KiB by several processes beside Redis, and by more threads than a host has cores.

`processes`: 1, 2, 4 and 8 processes of one thread, the store and Redis in turn: puts a second, and the CPU time of writers and servers a
put. `threads`: 96 and 256 threads of one client with a deadline of 2 s: errors, the slowest thread's share of the mean, puts a
second.
"""

import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import redis

from benchmarks.harness import cpu_ns, redis_server
from kvstore.cli.replay import show_warning
from kvstore.cli.tools.bench import BenchRow, at_least, at_most
from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from kvstore.client import Client

PROCESSES: Final = (1, 2, 4, 8)
THREADS: Final = (96, 256)
TURNS: Final = 2
"""Of the store and of Redis, for each number of processes."""
DRAM: Final = "1GiB"


@dataclass(frozen=True, slots=True)
class _Run:
    """Results of the writers of one turn: puts of each thread of each process."""

    puts: list[int]
    errors: int
    seconds: float
    writers_ns: int
    """CPU time of their processes."""
    servers_ns: int

    @property
    def rate(self) -> float:
        return sum(self.puts) / self.seconds

    def cpu_us(self, taken_ns: int) -> float:
        """A put's part of it."""
        return taken_ns / 1000 / max(1, sum(self.puts))


def process_rows(seconds: float) -> Iterator[BenchRow]:
    turn_s = seconds / TURNS
    with _store() as cluster, redis_server() as (path, pid):
        for count in PROCESSES:
            ours, theirs = [], []
            for _ in range(TURNS):
                ours.append(_store_run(cluster, turn_s, processes=count))
                theirs.append(_run("redis", path, turn_s, [pid], processes=count))
                redis.Redis(unix_socket_path=path).flushall()
            yield from _compared(f"put of 4 KiB, {count} processes", ours, theirs)


def _compared(name: str, ours: list[_Run], theirs: list[_Run]) -> Iterator[BenchRow]:
    """The medians of both, and the ratio of their rates."""
    rates = [statistics.median(run.rate for run in runs) for runs in (ours, theirs)]
    yield BenchRow(name, rates[0], "puts/s")
    yield BenchRow(f"{name}, Redis", rates[1], "puts/s")
    yield at_least(f"{name}: puts/s of Redis'", rates[0] / rates[1], "ratio", 1)
    for runs, servers in ((ours, "node and master"), (theirs, "Redis")):
        writers_us = statistics.median(run.cpu_us(run.writers_ns) for run in runs)
        servers_us = statistics.median(run.cpu_us(run.servers_ns) for run in runs)
        yield BenchRow(f"{name}: CPU a put, {servers}", servers_us, "us")
        yield BenchRow(f"{name}: CPU a put, writers to {servers}", writers_us, "us")
        yield BenchRow(f"{name}: CPU a put, all, {servers}", writers_us + servers_us, "us")


def thread_rows(seconds: float) -> Iterator[BenchRow]:
    with _store() as cluster:
        one = _store_run(cluster, min(seconds, 5.0), processes=1)
        for count in THREADS:
            run = _store_run(cluster, seconds, threads=count)
            name = f"put of 4 KiB, {count} threads of one client"
            yield BenchRow(name, run.rate, "puts/s")
            yield BenchRow(f"{name}: puts/s of one thread's", run.rate / one.rate, "ratio")
            yield at_most(f"{name}: errors", run.errors, "errors", 0)
            yield at_least(f"{name}: slowest thread of the mean", min(run.puts) / statistics.mean(run.puts), "ratio", 0.33)


def _store_run(cluster: LocalCluster, seconds: float, *, processes: int = 1, threads: int = 1) -> _Run:
    pids = [cluster.nodes[0].pid, cluster.master_pid]
    found = _run("kvstore", cluster.address, seconds, pids, processes=processes, threads=threads)
    with Client(cluster.address, deadline_s=60) as client:
        client.remove_matching(namespace="", force=True)
    return found


def _run(store: str, address: str, seconds: float, servers: Sequence[int], *, processes: int, threads: int = 1) -> _Run:
    """Writers of their own processes, started together. Their CPU time is that of their puts, the servers' of as long."""
    arguments = [sys.executable, "-m", "benchmarks.put_child", store, address, str(seconds), str(threads)]
    children = [subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    try:
        for child in children:
            assert _line(child) == "ready\n", "a writer did not start"
        begun_ns = sum(map(cpu_ns, servers))
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        told: list[dict[str, Any]] = [json.loads(_line(child)) for child in children]
        servers_ns = sum(map(cpu_ns, servers)) - begun_ns
    finally:
        for child in children:
            child.kill()
            child.communicate()
    puts = [count for each in told for count in each["puts"]]
    return _Run(puts, sum(each["errors"] for each in told), seconds, sum(each["cpu_ns"] for each in told), servers_ns)


def _line(child: "subprocess.Popen[str]") -> str:
    assert child.stdout is not None
    return child.stdout.readline()


@contextlib.contextmanager
def _store() -> Iterator[LocalCluster]:
    with LocalCluster(ClusterPlan(is_private=True, dram=DRAM), on_log=show_warning) as cluster:
        cluster.wait_warm()
        yield cluster
