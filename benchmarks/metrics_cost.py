"""Cost of metrics to puts of 4 KiB, in processor time: `python -m benchmarks.metrics_cost`.

Times are the sum over all threads of client, node and master; other load on the machine changes it less than wall time. Fresh clusters of
each variant run side by side and take turns. The cost of a variant is the mean over the rounds with its standard error. Busy polling
(`busy_poll_us`) is off, since its time depends on other load. The background work of daemons (console, heartbeats) has its own rows: the
processor time of an idle second, beside that of a second of puts. Scrapes are timed separately. So is a daemon's first scrape, for which it
loads its HTTP server.
Rows go to benchmarks/out/metrics_cost.json.
"""

import contextlib
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.harness import run
from kvstore.cli.replay import show_warning
from kvstore.cli.tools.bench import BenchRow
from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from kvstore.client import Client
from kvstore.client.config import ClientSettings

OUT: Final = Path(__file__).parent / "out" / "metrics_cost.json"
ROUNDS: Final = 8
TURNS: Final = 10
OPERATIONS: Final = 200
IDLE_S: Final = 5.0
"""Of each round, for all its clusters at once."""
SCRAPES: Final = 5
VALUE: Final = bytes(4096)
BASE: Final = "no HTTP ports"
WAYS: Final[Mapping[str, str]] = {
    BASE: '[master]\nhttp = ""\n[node]\nhttp = ""\n',
    "the node's port": '[master]\nhttp = ""\n[node]\n',
    "both ports": "[node]\n",
    "both ports, scraped before": "[node]\n",
}
SCRAPED: Final = "both ports, scraped before"


def main() -> int:
    return run({"puts": rows}, OUT)


@dataclass(frozen=True, slots=True)
class Running:
    """A cluster with its client, and where it is scraped."""

    client: Client
    pids: tuple[int, ...]
    scraped: tuple[str, ...]

    def daemons_s(self) -> float:
        """Processor time of its daemons so far."""
        return sum(map(_processor_s, self.pids))


def rows() -> Iterator[BenchRow]:
    put_us: dict[str, list[float]] = {way: [] for way in WAYS}
    idle_ms: dict[str, list[float]] = {way: [] for way in WAYS}
    scrape_ms: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as opened:
            running = {way: _start(opened, Path(folder, f"{number}.toml"), text) for number, (way, text) in enumerate(WAYS.items())}
            for name, scraped_ms in _scrapes(running[SCRAPED]):
                scrape_ms.setdefault(name, []).append(scraped_ms)
            for way, taken_us in _puts(running).items():
                put_us[way].append(taken_us)
            for way, a_second_ms in _idle(running).items():
                idle_ms[way].append(a_second_ms)
    yield BenchRow(f"put of 4 KiB, {BASE}: processor time of client, node and master", statistics.mean(put_us[BASE]), "us")
    yield BenchRow(f"a second of nothing, {BASE}: of node and master", statistics.mean(idle_ms[BASE]), "ms")
    for way in WAYS:
        if way != BASE:
            ratios = [100 * (one / other - 1) for one, other in zip(put_us[way], put_us[BASE], strict=True)]
            yield from _with_error(f"a put, {way} beside {BASE}", ratios, "%")
            added_ms = [one - other for one, other in zip(idle_ms[way], idle_ms[BASE], strict=True)]
            yield from _with_error(f"a second of nothing, {way}: more than {BASE}", added_ms, "ms")
    for name, taken_ms in scrape_ms.items():
        yield BenchRow(name, statistics.median(taken_ms), "ms")


def _with_error(name: str, values: list[float], unit: str) -> Iterator[BenchRow]:
    yield BenchRow(f"{name}, mean of {len(values)} rounds", statistics.mean(values), unit)
    yield BenchRow(f"{name}: its standard error", statistics.stdev(values) / len(values) ** 0.5, unit)


def _start(opened: contextlib.ExitStack, config: Path, text: str) -> Running:
    config.write_text(f"{text}busy_poll_us = 0\n")
    plan = ClusterPlan(is_private=True, dram="64MiB", config=str(config))
    cluster = opened.enter_context(LocalCluster(plan, on_log=show_warning))
    cluster.wait_warm()
    with cluster.control() as control:
        status = control.status()
    client = opened.enter_context(Client(cluster.address, settings=ClientSettings(busy_poll_us=0)))
    return Running(client, (cluster.master_pid, cluster.nodes[0].pid), (status.http, status.nodes[0].http))


def _scrapes(running: Running) -> Iterator[tuple[str, float]]:
    """Processor time of the daemon that is scraped, by what it is."""
    for role, pid, place in zip(("master", "node"), running.pids, running.scraped, strict=True):
        for number in range(1 + SCRAPES):
            began_s = _processor_s(pid)
            with urllib.request.urlopen(f"http://{place}/metrics", timeout=30) as answer:
                answer.read()
            yield f"{'first' if not number else 'later'} scrape of a {role}", 1e3 * (_processor_s(pid) - began_s)


def _puts(running: Mapping[str, Running]) -> dict[str, float]:
    """Processor time of a put, us: the median of turns, the first of which warms up."""
    taken_us: dict[str, list[float]] = {way: [] for way in running}
    for turn in range(1 + TURNS):
        for way in random.sample(list(running), len(running)):
            one = running[way]
            keys = [f"{way} {turn} {number}".encode() for number in range(OPERATIONS)]
            began_s = time.process_time() + one.daemons_s()
            for key in keys:
                one.client.put(key, VALUE)
            one.client.flush()
            taken_us[way].append(1e6 * (time.process_time() + one.daemons_s() - began_s) / OPERATIONS)
    return {way: statistics.median(taken[1:]) for way, taken in taken_us.items()}


def _idle(running: Mapping[str, Running]) -> dict[str, float]:
    """Processor time that the daemons of each cluster take in a second by themselves, ms."""
    began_s, before = time.monotonic(), {way: one.daemons_s() for way, one in running.items()}
    time.sleep(IDLE_S)
    elapsed_s = time.monotonic() - began_s
    return {way: 1e3 * (one.daemons_s() - before[way]) / elapsed_s for way, one in running.items()}


def _processor_s(pid: int) -> float:
    """Of all threads that the process has or had: its clock, by the number that clock_getcpuclockid(3) gives it."""
    return time.clock_gettime((~pid << 3) | 2)


if __name__ == "__main__":
    sys.exit(main())
