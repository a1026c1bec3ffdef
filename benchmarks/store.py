"""`make bench`: the store against memcpy and Redis, its publication into etcd, and the master's memory a block. One run, one machine.

Client and daemons are different processes. Redis runs without persistence, over a Unix socket. Rows go to benchmarks/out/store.json.
"""

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import redis
from rich.console import Console

from benchmarks import first_writes
from benchmarks.harness import redis_server, write
from kvstore.cli.replay import show_warning
from kvstore.cli.tools.bench import (
    BLOCK_BYTES,
    BLOCKS,
    NEEDED_DRAM_BYTES,
    SMALL_BYTES,
    BenchRow,
    after_sleep,
    at_least,
    at_most,
    measure,
    microseconds,
    table,
)
from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from kvstore.client import Client
from tests.client.local.stress import stress
from tests.etcd_server import EtcdServer

OUT = Path(__file__).parent / "out" / "store.json"
REDIS_ROUNDS = 8
PUBLISH_BLOCKS = 200_000
PUBLISH_BATCH = 4096
PUBLISH_THREADS = 3
MEMORY_BLOCKS = 1_000_000
TINY_BYTES = 64
"""Values of the rows that count blocks, not bytes."""
TINY_DRAM_BYTES = 2560
"""DRAM for each tiny block: the node's own table of them, which has three eighths of it, takes more than their bytes."""
STRESS_SECONDS = 60.0
CLIENTS_SECONDS = 1.0
CLIENTS_ROUNDS = 3


def main() -> int:
    rows: list[BenchRow] = []
    for part in (store_rows, bare_rows, redis_rows, publish_rows, memory_rows, stress_rows):
        for row in part(rows):
            print(f"{row.name}: {row.value:.4g} {row.unit}", file=sys.stderr, flush=True)
            rows.append(row)
    Console().print(table(rows))
    write(rows, OUT)
    return 0


def cluster(*, dram: int, catalog: str = "") -> LocalCluster:
    return LocalCluster(ClusterPlan(is_private=True, dram=str(dram), catalog=catalog), on_log=show_warning)


def store_rows(rows: list[BenchRow]) -> Iterator[BenchRow]:
    with cluster(dram=NEEDED_DRAM_BYTES) as running:
        running.wait_warm()
        with Client(running.address) as client, running.control() as control:
            yield from measure(client, control)
            yield from clients_rows(client, running.address)
    yield from first_writes.rows()


def bare_rows(rows: list[BenchRow]) -> Iterator[BenchRow]:
    """Puts against a bare message to another process and back, which is what the machine takes for them."""
    ours = {row.name: row.value for row in rows}
    near, far = socket.socketpair()
    with near:
        peer = subprocess.Popen([sys.executable, "-m", "benchmarks.bare_child", str(far.fileno())], pass_fds=[far.fileno()])
        far.close()
        try:
            message, room = os.urandom(SMALL_BYTES + 120), bytearray(1 << 10)

            def ask() -> None:
                near.send(message)
                near.recv_into(room)

            ask()
            bare_us, after_sleep_us = microseconds(ask), after_sleep(ask)
        finally:
            near.shutdown(socket.SHUT_RDWR)
            peer.wait()
    yield BenchRow("a bare message of 4 KiB and its answer, p50", bare_us, "us")
    yield BenchRow("the same after 2 ms of sleep, p50", after_sleep_us, "us")
    yield BenchRow("put of 4 KiB / bare message", ours["put of 4 KiB, p50"] / bare_us, "ratio")
    yield BenchRow(
        "put of 4 KiB / bare message, after 2 ms of sleep", ours["put of 4 KiB after 2 ms of sleep, p50"] / after_sleep_us, "ratio"
    )


def clients_rows(client: Client, address: str) -> Iterator[BenchRow]:
    """Two processes that read blocks of 1 MiB at once, against one alone, in turn."""
    keys = [os.urandom(16) for _ in range(BLOCKS)]
    client.put_batch(keys, [os.urandom(BLOCK_BYTES) for _ in keys])
    command = [sys.executable, "-m", "benchmarks.reading_child", address, ",".join(key.hex() for key in keys)]
    readers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    blocks: dict[int, list[int]] = {1: [], 2: []}
    try:
        for reader in readers:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "ready\n"
        for count in [1, 2] * CLIENTS_ROUNDS:
            blocks[count].append(sum(read_for(CLIENTS_SECONDS, readers[:count])))
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()
    client.remove(keys, force=True)
    yield at_least("two clients' gets of 1 MiB / one's", statistics.median(blocks[2]) / statistics.median(blocks[1]), "ratio", 1.5)


def read_for(seconds: float, readers: "Sequence[subprocess.Popen[str]]") -> list[int]:
    """The blocks that each read in that time."""
    for reader in readers:
        assert reader.stdin is not None
        reader.stdin.write(f"{seconds}\n")
        reader.stdin.flush()
    return [int(reader.stdout.readline()) for reader in readers if reader.stdout is not None]


def stress_rows(rows: list[BenchRow]) -> Iterator[BenchRow]:
    """A minute of a node that reuses slots as fast as it can, and a reader in another process."""
    counts = stress(STRESS_SECONDS)
    yield BenchRow("slots reused under a reader, in a minute", counts.reused, "slots")
    yield BenchRow("values read and looked at meanwhile", counts.read + counts.viewed, "values")
    yield at_most("wrong values among them", counts.wrong, "values", 0)


def redis_rows(rows: list[BenchRow]) -> Iterator[BenchRow]:
    """The same calls against Redis; ratios say how much more (or less) the store does."""
    ours = {row.name: row.value for row in rows}
    with redis_server() as (path, _pid):
        found = measure_redis(redis.Redis(unix_socket_path=path))
    for name, value, unit in found:
        yield BenchRow(f"Redis: {name}", value, unit)
    by_name = {name: value for name, value, _ in found}
    put, get = by_name["put 32 x 1 MiB"], by_name["get 32 x 1 MiB"]
    yield BenchRow("put_batch / Redis", ours["put_batch 32 x 1 MiB, used memory"] / put, "ratio")
    yield BenchRow("get_batch_into / Redis", ours["get_batch_into 32 x 1 MiB"] / get, "ratio")
    yield BenchRow("put of 4 KiB, Redis / us", by_name["put of 4 KiB, p50"] / ours["put of 4 KiB, p50"], "ratio")
    yield at_least("get of 4 KiB, Redis / us", by_name["get of 4 KiB, p50"] / ours["get_into of 4 KiB, p50"], "ratio", 10)
    yield BenchRow("exists of 1,024 keys, Redis / us", by_name["exists of 1,024 keys, p50"] / ours["exists of 1,024 keys, p50"], "ratio")


def measure_redis(peer: "redis.Redis") -> list[tuple[str, float, str]]:
    values = [os.urandom(BLOCK_BYTES) for _ in range(BLOCKS)]
    keys = [os.urandom(16) for _ in range(BLOCKS)]
    gigabytes = BLOCKS * BLOCK_BYTES / 1e9
    put_s, get_s = [], []
    for _ in range(REDIS_ROUNDS):
        begun = time.perf_counter()
        peer.mset(dict(zip(keys, values, strict=True)))
        put_s.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        assert peer.mget(keys) == values
        get_s.append(time.perf_counter() - begun)
    small = [os.urandom(16) for _ in range(2000)]
    value, todo = os.urandom(SMALL_BYTES), iter(small)
    found = [
        ("put 32 x 1 MiB", gigabytes / statistics.median(put_s), "GB/s"),
        ("get 32 x 1 MiB", gigabytes / statistics.median(get_s), "GB/s"),
        ("put of 4 KiB, p50", microseconds(lambda: peer.set(next(todo), value)), "us"),
    ]
    todo = iter(small)
    found.append(("get of 4 KiB, p50", microseconds(lambda: peer.get(next(todo))), "us"))
    found.append(("exists of 1 key, p50", microseconds(lambda: peer.exists(small[0])), "us"))
    found.append(("exists of 1,024 keys, p50", microseconds(lambda: peer.exists(*small[:1024]), calls=500), "us"))
    return found


def publish_rows(rows: list[BenchRow]) -> Iterator[BenchRow]:
    """Blocks a second that are put, published and durable in a real etcd, end to end."""
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        etcd = EtcdServer(Path(folder))
        etcd.start()
        try:
            with cluster(dram=PUBLISH_BLOCKS * TINY_DRAM_BYTES, catalog=f"etcd://{etcd.host_port}") as running:
                running.wait_warm()
                seconds = put_many(running.address, PUBLISH_BLOCKS, threads=PUBLISH_THREADS)
        finally:
            etcd.stop()
    yield at_least("blocks put and published into etcd", PUBLISH_BLOCKS / seconds, "blocks/s", 30_000)


def memory_rows(rows: list[BenchRow]) -> Iterator[BenchRow]:
    """The master's and the node's resident memory for a million blocks, over what they had before; a node's without its tiers."""
    with cluster(dram=MEMORY_BLOCKS * TINY_DRAM_BYTES) as running:
        running.wait_warm()
        with running.control() as control:
            before, node_before = control.status().rss_bytes, private_bytes(running.nodes[0].pid)
            seconds = put_many(running.address, MEMORY_BLOCKS, threads=2)
            status, node_after = control.status(), private_bytes(running.nodes[0].pid)
    assert status.blocks == MEMORY_BLOCKS, status.blocks
    yield at_most("master's memory a block, at 1,000,000", (status.rss_bytes - before) / MEMORY_BLOCKS, "bytes", 150)
    yield at_most("node's memory a block, at 1,000,000", (node_after - node_before) / MEMORY_BLOCKS, "bytes", 400)
    yield BenchRow("blocks put and published in memory", MEMORY_BLOCKS / seconds, "blocks/s")


def private_bytes(pid: int) -> int:
    """Resident memory of a process that is not shared, as tiers and indexes are."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def put_many(address: str, count: int, *, threads: int) -> float:
    """Put `count` tiny blocks in batches, from several threads of one client; the seconds until the cluster knew all of them."""
    value = bytes(TINY_BYTES)
    batches = iter([min(PUBLISH_BATCH, count - start) for start in range(0, count, PUBLISH_BATCH)])
    lock = threading.Lock()
    with Client(address, deadline_s=60) as client:

        def work() -> None:
            while True:
                with lock:
                    size = next(batches, 0)
                if not size:
                    return
                random = os.urandom(16 * size)
                keys: Sequence[bytes] = [random[at : at + 16] for at in range(0, 16 * size, 16)]
                assert all(client.put_batch(keys, [value] * size))

        workers = [threading.Thread(target=work) for _ in range(threads)]
        begun = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        client.flush()  # a put alone is answered by the node
        return time.perf_counter() - begun


if __name__ == "__main__":
    sys.exit(main())
