"""`make bench-local-puts`: single puts of 64 KiB to 16 MiB on this host against Mooncake and memcpy, also beside a thread that computes.

Both stores keep values in a process of their own, and have one client process each (puts_child.py). They take turns in one run. Rows go to
benchmarks/out/local_puts.json. Without Mooncake its rows, and the ratios, are missing.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.engines.mooncake import mooncake_master, mooncake_segment
from benchmarks.harness import report
from benchmarks.transfer_peers import Trouble, mooncake_python
from kvstore.cli.replay import show_warning
from kvstore.cli.tools.bench import BenchRow, at_least, at_most
from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster

ROOT: Final = Path(__file__).resolve().parents[1]
OUT: Final = Path(__file__).parent / "out" / "local_puts.json"
DRAM: Final = "1GiB"
TURNS: Final = 4
"""Before the first that counts there is one more, in which memory is touched and mapped."""
ODD_BYTES: Final = (11 << 20) // 10 + 13
"""1.1 MiB, a multiple of nothing."""
LARGE_BYTES: Final = 2 << 20
CALLS: Final = {(64 << 10) + 1: 200, 256 << 10: 200, ODD_BYTES: 150, LARGE_BYTES: 80, 16 << 20: 12}
COMPUTING_CALLS: Final = 60
AIM: Final = 3


@dataclass(frozen=True, slots=True)
class Task:
    """Work of a child: a number of puts of one size.

    `computes`: a thread computes meanwhile. `repeats`: all puts have the same value, which is then in the processor's cache."""

    size_bytes: int
    calls: int
    computes: int = 0
    repeats: int = 0


TASKS: Final = [
    *(Task(size_bytes, calls) for size_bytes, calls in CALLS.items()),
    Task(ODD_BYTES, CALLS[ODD_BYTES], repeats=1),
    Task(LARGE_BYTES, COMPUTING_CALLS, computes=1),
]


def main() -> int:
    return report(all_rows(), OUT)


def all_rows() -> Iterator[BenchRow]:
    with ExitStack() as stack:
        clients = {"kvstore": stack.enter_context(kvstore_client())}
        try:
            clients["Mooncake"] = stack.enter_context(mooncake_client())
        except Trouble as error:
            print(f"Mooncake is left out: {error}", file=sys.stderr)
        found = take_turns(clients)
    for task in TASKS:
        yield from rows_of(task, {name: seconds[task] for name, seconds in found.items()})


def take_turns(clients: "Mapping[str, subprocess.Popen[str]]") -> dict[str, dict[Task, list[float]]]:
    """Seconds of each call of each client and of memcpy, by task."""
    found: dict[str, dict[Task, list[float]]] = {name: {task: [] for task in TASKS} for name in (*clients, "memcpy")}
    for turn in range(TURNS + 1):
        for task in TASKS:
            seconds = {name: ask(client, task) for name, client in clients.items()} | {"memcpy": copied(task)}
            for name, of_turn in seconds.items():
                found[name][task] += of_turn if turn else []
    return found


def rows_of(task: Task, seconds: Mapping[str, Sequence[float]]) -> Iterator[BenchRow]:
    what = f"put of {said(task.size_bytes)}" + ", one value again and again" * task.repeats
    if task.computes:
        means_ms = {name: 1000 * statistics.mean(seconds[name]) for name in seconds if name != "memcpy"}
        for name, mean_ms in means_ms.items():
            yield BenchRow(f"{name}: {what} beside a computing thread, mean", mean_ms, "ms")
            yield BenchRow(f"{name}: {what} beside a computing thread, p50", 1000 * statistics.median(seconds[name]), "ms")
        if "Mooncake" in means_ms:
            yield at_most(f"kvstore / Mooncake: {what} beside a computing thread", means_ms["kvstore"] / means_ms["Mooncake"], "ratio", 1)
        return
    rates = {name: task.size_bytes / statistics.median(taken) / 1e9 for name, taken in seconds.items()}
    for name, rate in rates.items():
        yield BenchRow(f"{name}: {what}, single", rate, "GB/s")
    yield BenchRow(f"kvstore / memcpy: {what}, single", rates["kvstore"] / rates["memcpy"], "ratio")
    if "Mooncake" in rates:
        name, ratio = f"kvstore / Mooncake: {what}, single", rates["kvstore"] / rates["Mooncake"]
        yield at_least(name, ratio, "ratio", AIM) if task.size_bytes == ODD_BYTES else BenchRow(name, ratio, "ratio")


def said(size_bytes: int) -> str:
    mib = size_bytes / (1 << 20)
    return f"{mib:.3g} MiB" if mib >= 1 else f"{size_bytes >> 10} KiB"


def copied(task: Task) -> list[float]:
    """Seconds of copies from memory that is in no cache into memory that was used before."""
    source = np.ones((max(2, (64 << 20) // task.size_bytes), task.size_bytes), np.uint8)
    target = np.zeros_like(source)
    seconds = []
    for number in range(task.calls):
        at = number % len(source)
        begun = time.perf_counter()
        np.copyto(target[at], source[0 if task.repeats else at])
        seconds.append(time.perf_counter() - begun)
    return seconds


# --- clients ---


def ask(client: "subprocess.Popen[str]", task: Task) -> list[float]:
    """Raises RuntimeError: the client has ended."""
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(json.dumps(asdict(task)) + "\n")
    client.stdin.flush()
    line = client.stdout.readline()
    if not line:
        raise RuntimeError(f"{client.args!r} has ended")
    seconds: list[float] = json.loads(line)
    return seconds


@contextmanager
def kvstore_client() -> "Iterator[subprocess.Popen[str]]":
    with LocalCluster(ClusterPlan(dram=DRAM, is_private=True), on_log=show_warning) as cluster:
        cluster.wait_warm()
        with child([sys.executable, "-m", "benchmarks.puts_child", "kvstore", cluster.address]) as client:
            yield client


@contextmanager
def mooncake_client() -> "Iterator[subprocess.Popen[str]]":
    """Raises Trouble."""
    python = mooncake_python()
    with (
        mooncake_master() as master,
        mooncake_segment(master),
        child([python, "-m", "benchmarks.puts_child", "mooncake", master]) as client,
    ):
        yield client


@contextmanager
def child(command: list[str]) -> "Iterator[subprocess.Popen[str]]":
    """A client that is ready. Raises Trouble: it was not."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, text=True, env=environment) as client:
        assert client.stdout is not None
        try:
            while (line := client.stdout.readline()) != "ready\n":
                if not line:
                    raise Trouble(f"{' '.join(command)} has ended")
            yield client
        finally:
            client.kill()


if __name__ == "__main__":
    sys.exit(main())
