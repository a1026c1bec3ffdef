"""Removing pinned blocks with force: how long a caller waits, and the CPU time a block that master and node take for it."""

import time
from collections.abc import Iterator
from typing import Final

import numpy as np

from benchmarks.harness import cpu_ns
from kvstore.cli.replay import show_warning
from kvstore.cli.tools.bench import BenchRow, at_most
from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from kvstore.client import Client

BLOCKS: Final = 100_000
BATCH: Final = 4096
PROMPT_BLOCKS: Final = 16
VALUE: Final = b"v" * 64
AIM_S: Final = 2.0
DEADLINE_S: Final = 60.0


def rows() -> Iterator[BenchRow]:
    with LocalCluster(ClusterPlan(is_private=True, dram="64MiB"), on_log=show_warning) as cluster:
        cluster.wait_warm()
        with Client(cluster.address, deadline_s=DEADLINE_S) as client:
            keys = _put_pinned(client)
            pids = {"master": cluster.master_pid, "node": cluster.nodes[0].pid}
            before = {role: cpu_ns(pid) for role, pid in pids.items()}
            begun_s = time.perf_counter()
            removed = client.remove(keys, force=True)
            took_s = time.perf_counter() - begun_s
            assert removed == BLOCKS, "a block stayed"
            name = f"{BLOCKS:,} pinned blocks in prompts of {PROMPT_BLOCKS} removed with force"
            yield at_most(name, took_s, "s", AIM_S)
            for role, pid in pids.items():
                yield BenchRow(f"{name}: CPU time of the {role} a block", (cpu_ns(pid) - before[role]) / BLOCKS / 1e3, "us")


def _put_pinned(client: Client) -> list[bytes]:
    drawn = np.random.default_rng(1).bytes(16 * BLOCKS)
    keys = [drawn[at : at + 16] for at in range(0, len(drawn), 16)]
    for begin in range(0, BLOCKS, BATCH):
        part = keys[begin : begin + BATCH]
        parents = [part[number - 1] if number % PROMPT_BLOCKS else None for number in range(len(part))]
        client.put_batch(part, [VALUE] * len(part), parents=parents)
    client.flush()
    for begin in range(0, BLOCKS, BATCH):
        client.pin(keys[begin : begin + BATCH])
    return keys
