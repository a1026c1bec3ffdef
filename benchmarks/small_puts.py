"""`make bench-small-puts`: cost of puts of 4 KiB to each process, in CPU time a block, which is meaningful on a loaded machine, too.

One client, one node, one master. A series ends with a flush, so that it includes the later work of node and master.

- `batches`: arrays of 4,096 blocks, into a node with space for them.
- `full`: the same into a full node, which evicts as many.
- `single`: one block a call, acknowledged by the node or by the cluster.
- `table`: a node's block table alone (node_table.py).
- `memory`: memory of the processes for each value of 64 bytes (value_memory.py).
- `processes`, `threads`: many concurrent writers, beside Redis (many_writers.py), for 5 s each or `--seconds`.

Rows go to benchmarks/out/small_puts.json.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import node_table, value_memory
from benchmarks.harness import cpu_ns, run
from benchmarks.many_writers import process_rows, thread_rows
from kvstore.cli.replay import show_warning
from kvstore.cli.tools.bench import SMALL_BLOCKS, SMALL_BYTES, BenchRow, at_least, at_most
from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from kvstore.client import Client

OUT: Final = Path(__file__).parent / "out" / "small_puts.json"
SERIES: Final = 5
BATCHES: Final = 4
"""Of a series."""
CALLS: Final = 500
"""Single puts of a series."""
WRITERS_SECONDS: Final = 5.0
"""Of many writers, each number of them."""
ROOMY_BYTES: Final = 640 << 20
FULL_BYTES: Final = 256 << 20

Put = Callable[[bytes], object]


def main() -> int:
    seconds = _seconds(sys.argv)
    parts: dict[str, Callable[[], Iterable[BenchRow]]] = {
        "batches": batch_rows,
        "full": full_rows,
        "single": single_rows,
        "table": node_table.rows,
        "memory": value_memory.rows,
        "processes": partial(process_rows, seconds),
        "threads": partial(thread_rows, seconds),
    }
    return run(parts, OUT)


def _seconds(arguments: list[str]) -> float:
    """The value of `--seconds`, which is taken out of `arguments`."""
    if "--seconds" not in arguments:
        return WRITERS_SECONDS
    at = arguments.index("--seconds")
    _, value = arguments[at : at + 2]
    del arguments[at : at + 2]
    return float(value)


def batch_rows() -> Iterator[BenchRow]:
    """Into memory that has been used before."""
    with _cluster(ROOMY_BYTES) as cluster, Client(cluster.address) as client:
        rows, cpu = _values(client), _Cpu(cluster)
        _forget(client, [_batch(client, rows)[0] for _ in range(2 * BATCHES)])
        puts_s: list[float] = []
        for _ in range(SERIES):
            with cpu:
                put = [_batch(client, rows) for _ in range(BATCHES)]
                client.flush()
            puts_s += [taken_s for _, taken_s in put]
            _forget(client, [keys for keys, _ in put])
    yield at_least("put_batch 4,096 x 4 KiB", SMALL_BLOCKS / statistics.median(puts_s), "blocks/s", 300_000)
    yield from cpu.rows("put_batch 4,096 x 4 KiB", BATCHES * SMALL_BLOCKS)


def full_rows() -> Iterator[BenchRow]:
    """Into a node from which as many blocks leave."""
    with _cluster(FULL_BYTES) as cluster, Client(cluster.address) as client:
        rows, cpu = _values(client), _Cpu(cluster)
        for _ in range(2 * FULL_BYTES // (SMALL_BLOCKS * SMALL_BYTES)):
            _batch(client, rows)
        client.flush()
        puts_s: list[float] = []
        for _ in range(SERIES):
            with cpu:
                puts_s += [_batch(client, rows)[1] for _ in range(BATCHES)]
                client.flush()
    yield BenchRow("put_batch 4,096 x 4 KiB, the cache full", SMALL_BLOCKS / statistics.median(puts_s), "blocks/s")
    yield from cpu.rows("put_batch 4,096 x 4 KiB, the cache full", BATCHES * SMALL_BLOCKS)


def single_rows() -> Iterator[BenchRow]:
    """The two ways take turns."""
    with _cluster(ROOMY_BYTES) as cluster, Client(cluster.address) as client:
        _values(client)
        value = os.urandom(SMALL_BYTES)
        cpu = {ack: _Cpu(cluster) for ack in ("node", "cluster")}
        taken_s: dict[str, list[float]] = {ack: [] for ack in cpu}
        for _ in range(SERIES):
            for ack, measured in cpu.items():
                keys = [os.urandom(16) for _ in range(CALLS)]
                with measured:
                    for key in keys:
                        begun_s = time.perf_counter()
                        client.put(key, value, ack=ack)
                        taken_s[ack].append(time.perf_counter() - begun_s)
                    client.flush()
                client.remove(keys, force=True)
    for ack, aim_us in (("node", 60), ("cluster", 300)):
        name = f'put of 4 KiB, ack="{ack}"'
        yield at_most(f"{name}, p50", 1e6 * statistics.median(taken_s[ack]), "us", aim_us)
        yield from cpu[ack].rows(name, CALLS)


class _Cpu:
    """A reusable context manager: the CPU time of client, node and master inside it."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._pids = {"client": os.getpid(), "node": cluster.nodes[0].pid, "master": cluster.master_pid}
        self._begun_ns: dict[str, int] = {}
        self._taken_ns: dict[str, list[int]] = {name: [] for name in self._pids}

    def __enter__(self) -> None:
        self._begun_ns = {name: cpu_ns(pid) for name, pid in self._pids.items()}

    def __exit__(self, *_: object) -> None:
        for name, pid in self._pids.items():
            self._taken_ns[name].append(cpu_ns(pid) - self._begun_ns[name])

    def rows(self, what: str, blocks: int) -> Iterator[BenchRow]:
        """The medians, each by so many blocks."""
        for name, taken_ns in self._taken_ns.items():
            yield BenchRow(f"{what}: CPU a block, {name}", statistics.median(taken_ns) / blocks / 1000, "us")


def _cluster(dram_bytes: int) -> LocalCluster:
    return _Ready(ClusterPlan(is_private=True, dram=str(dram_bytes)), on_log=show_warning)


class _Ready(LocalCluster):
    """Inside, its memory has been touched, too."""

    def __enter__(self) -> "LocalCluster":
        super().__enter__()
        self.wait_warm()
        return self


def _values(client: Client) -> Any:
    """A batch's values; and the client has read something, so that its node keeps an index for it."""
    rows = np.random.default_rng(2).integers(0, 256, (SMALL_BLOCKS, SMALL_BYTES), dtype=np.uint8)
    client.put(b"read", b"before")
    client.get(b"read")
    return rows


def _batch(client: Client, rows: Any) -> tuple[list[bytes], float]:
    """Put a batch under new keys: they, and the seconds."""
    random = os.urandom(16 * SMALL_BLOCKS)
    keys = [random[at : at + 16] for at in range(0, len(random), 16)]
    begun_s = time.perf_counter()
    stored = client.put_batch(keys, rows)
    taken_s = time.perf_counter() - begun_s
    assert all(stored), "a new key was there already"
    return keys, taken_s


def _forget(client: Client, batches: list[list[bytes]]) -> None:
    for keys in batches:
        client.remove(keys, force=True)


if __name__ == "__main__":
    sys.exit(main())
