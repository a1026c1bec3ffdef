"""`make bench-nvme`: reads from NVMe, puts above it and what it writes, against fio on the same disk, in one run.

One client, one node and one master on this host. DRAM is small, so that most blocks are on NVMe. Cold reads follow a restart of the
node, with the page cache of its files dropped; the client remembers which node has the blocks. Rows go to benchmarks/out/nvme.json. FOLDER
(default: build/bench-nvme) names the disk.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.harness import report
from kvstore.cli.replay import show_warning
from kvstore.cli.tools.bench import BenchRow, at_least, at_most
from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from kvstore.client import Client

ROOT: Final = Path(__file__).parent
OUT: Final = ROOT / "out" / "nvme.json"
DRAM_BYTES: Final = 256 << 20
NVME_BYTES: Final = 2 << 30
LARGE_BYTES: Final = 2 << 20
SMALL_BYTES: Final = 4 << 10
TURNS: Final = 3
"""Restarts, each with cold reads of blocks that were not read since the one before."""
CALLS: Final = {1: 48, 8: 12, 32: 6}
"""Cold reads of a turn, by batch size."""
LARGE_BLOCKS: Final = sum(batch * calls for batch, calls in CALLS.items())
SMALL_CALLS: Final = {1: 400, 32: 40}
SMALL_BLOCKS: Final = 1 + sum(batch * calls for batch, calls in SMALL_CALLS.items())
PUTS: Final = 400
FIO_BYTES: Final = 1 << 30
FIO_S: Final = 1
MIXED_BYTES: Final = 256 << 10
MIXED_KEYS: Final = 2048
MIXED_CALLS: Final = 3000
READ_AIMS: Final = {1: 0.6, 8: 0.8, 32: 0.8}


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT.parent / "build" / "bench-nvme")
    folder.mkdir(parents=True)
    try:
        return report(measured(folder), OUT)
    finally:
        shutil.rmtree(folder)


def measured(folder: Path) -> Iterator[BenchRow]:
    yield from read_rows(folder)
    yield from put_rows(folder)
    yield from mixed_rows(folder)


# --- the disk ---


class Disk:
    """Direct I/O by fio on one file, which is written first. Each figure is a median of several, measured beside ours in turn."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "fio"
        self._figures: dict[str, list[float]] = {}
        self.write()

    def write(self) -> None:
        self._add("write of 2 MiB, direct, fsync at the end", self._run("write", LARGE_BYTES, 8, "--end_fsync=1")["bw_bytes"] / 1e9)

    def read(self, block_bytes: int, depth: int) -> None:
        found = self._run("randread", block_bytes, depth, "--time_based", f"--runtime={FIO_S}")
        if block_bytes == LARGE_BYTES:
            self._add(f"random read of 2 MiB, depth {depth}", found["bw_bytes"] / 1e9)
        else:
            self._add(f"random read of 4 KiB, depth {depth}", found["iops"])

    def __getitem__(self, name: str) -> float:
        return statistics.median(self._figures[name])

    def row(self, name: str) -> BenchRow:
        return BenchRow(f"fio: {name}", self[name], "reads/s" if "4 KiB" in name else "GB/s")

    def _add(self, name: str, figure: float) -> None:
        self._figures.setdefault(name, []).append(figure)

    def _run(self, kind: str, block_bytes: int, depth: int, *more: str) -> dict[str, Any]:
        arguments = [f"--filename={self._path}", f"--rw={kind}", f"--bs={block_bytes}", f"--iodepth={depth}", f"--size={FIO_BYTES}", *more]
        command = ["fio", "--name=disk", "--ioengine=libaio", "--direct=1", "--output-format=json", *arguments]
        job = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["jobs"][0]
        result: dict[str, Any] = job["write" if kind == "write" else "read"]
        return result


# --- reads ---


def read_rows(folder: Path) -> Iterator[BenchRow]:
    """Cold reads after each restart, each beside fio's, and warm ones."""
    disk = Disk(folder)
    large, small = _keys(LARGE_BLOCKS), _keys(SMALL_BLOCKS)
    _fill(folder, large, small)
    cold: dict[int, list[float]] = {batch: [] for batch in CALLS}
    cold_small: dict[int, list[float]] = {batch: [] for batch in SMALL_CALLS}
    cpu_s: dict[int, float] = dict.fromkeys(CALLS, 0.0)
    with _cluster(folder) as cluster, Client(cluster.address) as client:
        _read(client, [large[at : at + 32] for at in range(0, len(large), 32)], LARGE_BYTES)
        _read(client, [small[at : at + 32] for at in range(0, len(small), 32)], SMALL_BYTES)
        for _ in range(TURNS):
            _restart(cluster, folder)
            client.get(small[0])  # it has connected to the new process then
            todo, todo_small = iter(large), iter(small[1:])
            for batch, calls in CALLS.items():
                disk.read(LARGE_BYTES, batch)
                begun_s = _cpu_s(cluster)
                cold[batch] += _read(client, [[next(todo) for _ in range(batch)] for _ in range(calls)], LARGE_BYTES)
                cpu_s[batch] += _cpu_s(cluster) - begun_s
            for batch, calls in SMALL_CALLS.items():
                disk.read(SMALL_BYTES, batch)
                cold_small[batch] += _read(client, [[next(todo_small) for _ in range(batch)] for _ in range(calls)], SMALL_BYTES)
        warm = _warm(client)
    for batch, taken_s in cold.items():
        yield from _cold_rows(batch, statistics.fmean(taken_s), cpu_s[batch] / (TURNS * CALLS[batch]), disk)
    for batch, taken_s in cold_small.items():
        name, rate = f"random read of 4 KiB, depth {batch}", batch / statistics.fmean(taken_s)
        yield disk.row(name)
        yield BenchRow(f"cold get of 4 KiB, batch {batch}", rate, "reads/s")
        yield at_least(f"cold get of 4 KiB, batch {batch} / fio", rate / disk[name], "ratio", 0.5)
    for batch, taken_s in warm.items():
        yield BenchRow(f"warm get of 2 MiB, batch {batch}", batch * LARGE_BYTES / 1e9 / statistics.median(taken_s), "GB/s")


def _cold_rows(batch: int, taken_s: float, cpu_s: float, disk: Disk) -> Iterator[BenchRow]:
    """Of one call, its time and the CPU time of client and node."""
    name, rate = f"cold get of 2 MiB, batch {batch}", batch * LARGE_BYTES / 1e9 / taken_s
    fio = f"random read of 2 MiB, depth {batch}"
    yield disk.row(fio)
    yield BenchRow(name, rate, "GB/s")
    yield BenchRow(f"{name}: time a block", 1e3 * taken_s / batch, "ms")
    yield at_least(f"{name} / fio", rate / disk[fio], "ratio", READ_AIMS[batch])
    yield at_most(f"{name}: CPU of client and node", cpu_s / (batch * LARGE_BYTES / (1 << 30)), "s/GiB", 0.5)


def _fill(folder: Path, large: list[bytes], small: list[bytes]) -> None:
    """Have all blocks on NVMe: puts wait for the disk, and what is in DRAM at the end is written when the node stops."""
    with _cluster(folder, demotion_wait_s=60) as cluster, Client(cluster.address, deadline_s=60.0) as client:
        for keys, size_bytes in ((small, SMALL_BYTES), (large, LARGE_BYTES)):
            value = _random(size_bytes)
            for key in keys:
                client.put(key, value)
        client.flush()


def _read(client: Client, batches: list[list[bytes]], size_bytes: int) -> list[float]:
    """Seconds of each call, into memory that was written before."""
    rooms = [np.ones(size_bytes, np.uint8) for _ in batches[0]]
    taken_s = []
    for keys in batches:
        begun_s = time.perf_counter()
        sizes = [client.get_into(keys[0], rooms[0])] if len(keys) == 1 else client.get_batch_into(keys, rooms[: len(keys)])
        taken_s.append(time.perf_counter() - begun_s)
        assert sizes == [size_bytes] * len(keys), "blocks are lost"
    return taken_s


def _warm(client: Client) -> dict[int, list[float]]:
    """Of blocks that were just put."""
    keys, value = _keys(32), _random(LARGE_BYTES)
    for key in keys:
        client.put(key, value)
    _read(client, [keys], LARGE_BYTES)
    return {batch: _read(client, [keys[:batch]] * 20, LARGE_BYTES) for batch in CALLS}


# --- writes ---


def put_rows(folder: Path) -> Iterator[BenchRow]:
    """Puts into memory that is full, between two writes by fio."""
    disk, fio = Disk(folder), "write of 2 MiB, direct, fsync at the end"
    with _cluster(folder) as cluster, Client(cluster.address) as client:
        value = _random(LARGE_BYTES)
        for key in _keys(2 * DRAM_BYTES // LARGE_BYTES):
            client.put(key, value)
        node, taken_s = cluster.nodes[0].pid, []
        begun_s, begun_bytes, begun_cpu_s = time.perf_counter(), _written_bytes(node), _cpu_s(cluster)
        keys = _keys(PUTS)
        for key in keys:
            at_s = time.perf_counter()
            client.put(key, value)
            taken_s.append(time.perf_counter() - at_s)
        whole_s, written_bytes, cpu_s = time.perf_counter() - begun_s, _written_bytes(node) - begun_bytes, _cpu_s(cluster) - begun_cpu_s
        client.flush()
        kept = sum(client.exists_batch(keys))
    disk.write()
    yield disk.row(fio)
    percent = statistics.quantiles(taken_s, n=100)
    rate = PUTS * LARGE_BYTES / 1e9 / whole_s
    yield BenchRow("put of 2 MiB, memory full, NVMe below", rate, "GB/s")
    yield at_least("put of 2 MiB, memory full, NVMe below / fio's write", rate / disk[fio], "ratio", 0.7)
    yield BenchRow("put of 2 MiB, memory full, NVMe below: p50", 1e3 * percent[49], "ms")
    yield BenchRow("put of 2 MiB, memory full, NVMe below: p99", 1e3 * percent[98], "ms")
    yield at_most("put of 2 MiB, memory full, NVMe below: p99 / p50", percent[98] / percent[49], "ratio", 5)
    yield BenchRow("put of 2 MiB, memory full, NVMe below: still there after all", kept / PUTS, "share")
    yield BenchRow("put of 2 MiB, memory full, NVMe below: CPU of client and node", cpu_s / (PUTS * LARGE_BYTES / (1 << 30)), "s/GiB")
    yield BenchRow("write-behind", written_bytes / 1e9 / whole_s, "GB/s")
    yield at_least("write-behind / fio's write", written_bytes / 1e9 / whole_s / disk[fio], "ratio", 0.7)


def mixed_rows(folder: Path) -> Iterator[BenchRow]:
    """A working set of twice DRAM, read by Zipf's law; what is missing is put."""
    random = np.random.default_rng(5)
    keys, value, hits = _keys(MIXED_KEYS), _random(MIXED_BYTES), 0
    with _cluster(folder) as cluster, Client(cluster.address) as client:
        room, node = np.ones(MIXED_BYTES, np.uint8), cluster.nodes[0].pid
        begun_bytes, begun_s = _written_bytes(node), time.perf_counter()
        for number in random.zipf(1.1, MIXED_CALLS).tolist():
            key = keys[number % MIXED_KEYS]
            if client.get_into(key, room) is None:
                client.put(key, value)
            else:
                hits += 1
        taken_s, written_bytes = time.perf_counter() - begun_s, _written_bytes(node) - begun_bytes
    yield BenchRow("get or put of 256 KiB, by Zipf's law", MIXED_CALLS / taken_s, "calls/s")
    yield BenchRow("get or put of 256 KiB: hits", hits / MIXED_CALLS, "share")
    yield BenchRow("get or put of 256 KiB: written to NVMe a hit", written_bytes / 1024 / hits, "KiB")


# --- parts ---


@contextmanager
def _cluster(folder: Path, **settings: float) -> Iterator[LocalCluster]:
    """On the tier in the folder, its DRAM touched. `settings` are the node's."""
    config = folder / "settings.toml"
    config.write_text("\n".join(["[node]", *(f"{name} = {value}" for name, value in settings.items())]) + "\n")
    plan = ClusterPlan(is_private=True, dram=str(DRAM_BYTES), nvme=f"{folder / 'tier'}:{NVME_BYTES}", config=str(config))
    with LocalCluster(plan, on_log=show_warning) as cluster:
        cluster.wait_warm()
        yield cluster


def _restart(cluster: LocalCluster, folder: Path) -> None:
    """Its DRAM is empty then, and nothing of the tier is in the page cache."""
    cluster.kill_node(0)
    _drop_page_cache(folder)
    cluster.restart_node(0)
    cluster.wait_warm()


def _drop_page_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _put(client: Client, key: bytes, value: bytes) -> None:
    client.put(key, value)


def _keys(count: int) -> list[bytes]:
    return [os.urandom(16) for _ in range(count)]


def _random(size_bytes: int) -> bytes:
    return np.random.default_rng(3).bytes(size_bytes)


def _written_bytes(pid: int) -> int:
    """Bytes that the process had written to disks."""
    text = Path(f"/proc/{pid}/io").read_text()
    return int(text.split("\nwrite_bytes: ")[1].split()[0])


def _cpu_s(cluster: LocalCluster) -> float:
    """CPU time of this process and the node."""
    tasks = (path for pid in (os.getpid(), cluster.nodes[0].pid) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(path.read_text().split()[0]) for path in tasks) / 1e9


if __name__ == "__main__":
    sys.exit(main())
