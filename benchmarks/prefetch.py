"""`make bench-prefetch`: time to load a prompt's blocks from NVMe and from another node, with and without a prefetch before.

The figure is the time of one `get_batch_into`, which an engine adds to its first token. With a prefetch the blocks are
requested LEADS_S before, as by a scheduler's decision while the request waits in the engine's queue. Client, nodes and master
are processes of this host. The other node is reached over TCP on loopback: clients and nodes do not find its Unix socket. Each
prompt is read once; prompts with and without a prefetch take turns. Every byte is checked. Rows go to benchmarks/out/prefetch.json.
FOLDER (default: build/bench-prefetch) names the disk.
"""

import contextlib
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks.harness import report
from kvstore.cli.replay import show_warning
from kvstore.cli.tools.bench import BenchRow, at_most
from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from kvstore.client import Client

ROOT: Final = Path(__file__).parent
OUT: Final = ROOT / "out" / "prefetch.json"
BLOCK_BYTES: Final = 1 << 20
PROMPT_BLOCKS: Final = (16, 64)
"""A sixteenth of DRAM has room for the longer one."""
PROMPTS: Final = 6
"""Of each length and lead."""
DRAM_BYTES: Final = 2 << 30
FILL_BYTES: Final = 128 << 20
"""DRAM while prompts are put: most of them are on NVMe before the node stops, and the stop writes the rest."""
NVME_BYTES: Final = 4 << 30
LEADS_S: Final = (0.0, 0.05, 0.2)
"""From the prefetch to the load. Loads without a prefetch take turns with them."""
SETTLED_S: Final = 0.3
"""Time after a load in which late copies arrive."""
COUNTERS_S: Final = 3.0
"""Time after which counters of reads are in a heartbeat."""
RATIO_AIM: Final = 0.5


class Prompt:
    """Keys and values of a prompt's blocks. All values come from one array, shifted, so that they differ."""

    _bytes: Final = np.random.default_rng(7).integers(0, 256, 2 * BLOCK_BYTES, np.uint8)

    def __init__(self, blocks: int) -> None:
        self.keys = [os.urandom(16) for _ in range(blocks)]

    def values(self) -> list[npt.NDArray[np.uint8]]:
        return [self._bytes[self._shift(key) :][:BLOCK_BYTES] for key in self.keys]

    def put(self, client: Client) -> None:
        parents = [None, *self.keys[:-1]]
        assert all(client.put_batch(self.keys, self.values(), parents=parents, ack="cluster"))

    @staticmethod
    def _shift(key: bytes) -> int:
        return int.from_bytes(key[:2], "little")


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT.parent / "build" / "bench-prefetch")
    folder.mkdir(parents=True)
    try:
        return report(measured(folder), OUT)
    finally:
        shutil.rmtree(folder)


def measured(folder: Path) -> Iterator[BenchRow]:
    yield from nvme_rows(folder)
    yield from node_rows()


def nvme_rows(folder: Path) -> Iterator[BenchRow]:
    """The node has restarted, so that its DRAM is empty. Large values are read past the page cache."""
    prompts = _prompts()
    plan = ClusterPlan(is_private=True, dram=str(FILL_BYTES), nvme=f"{folder}:{NVME_BYTES}", demotion_wait_s="60")
    with LocalCluster(plan, on_log=show_warning) as cluster:
        cluster.wait_warm()
        with Client(cluster.address, deadline_s=60.0) as client:
            for prompt in (one for some in prompts.values() for one in some):
                prompt.put(client)
    with LocalCluster(replace(plan, dram=str(DRAM_BYTES)), on_log=show_warning) as cluster:
        cluster.wait_warm()
        yield from _rows("NVMe", cluster, prompts)


def node_rows() -> Iterator[BenchRow]:
    """Blocks in another node's DRAM."""
    prompts = _prompts()
    whole_bytes = sum(len(some) * blocks * BLOCK_BYTES for blocks, some in prompts.items())
    with LocalCluster(ClusterPlan(is_private=True, dram=str(whole_bytes + (512 << 20)), nodes=2), on_log=show_warning) as cluster:
        cluster.wait_warm()
        here, there = (Path(cluster.nodes[index].facts("ready", deadline_s=0)["unix"]) for index in range(2))
        with _hidden(here), Client(cluster.address, deadline_s=60.0) as client:
            for prompt in (one for some in prompts.values() for one in some):
                prompt.put(client)
        with _hidden(there):
            yield from _rows("another node", cluster, prompts)


def _prompts() -> dict[int, list[Prompt]]:
    """By length: PROMPTS without a prefetch, and as many of each lead."""
    return {blocks: [Prompt(blocks) for _ in range((1 + len(LEADS_S)) * PROMPTS)] for blocks in PROMPT_BLOCKS}


def _rows(source: str, cluster: LocalCluster, prompts: dict[int, list[Prompt]]) -> Iterator[BenchRow]:
    calls_s: list[float] = []
    with Client(cluster.address, deadline_s=60.0) as client:
        client.put(b"warm", b"up", ack="cluster")
        client.get(b"warm")
        for blocks, some in prompts.items():
            room, todo = np.ones((blocks, BLOCK_BYTES), np.uint8), iter(some)
            without_s: list[float] = []
            with_s: dict[float, list[float]] = {lead_s: [] for lead_s in LEADS_S}
            for _ in range(PROMPTS):
                without_s.append(_load(client, next(todo), room, SETTLED_S))
                for lead_s, taken_s in with_s.items():
                    ahead = next(todo)
                    begun_s = time.perf_counter()
                    queued = client.prefetch(ahead.keys)
                    calls_s.append(time.perf_counter() - begun_s)
                    assert queued == blocks, f"{queued} of {blocks} blocks are queued"
                    time.sleep(lead_s)
                    taken_s.append(_load(client, ahead, room, SETTLED_S))
            name, before = f"load of {blocks} x 1 MiB from {source}", statistics.median(without_s)
            yield BenchRow(f"{name}, p50", 1e3 * before, "ms")
            for lead_s, taken_s in with_s.items():
                after, lead = statistics.median(taken_s), f"prefetched {1e3 * lead_s:g} ms before"
                yield BenchRow(f"{name}, {lead}, p50", 1e3 * after, "ms")
                if lead_s:
                    yield at_most(f"{name}, {lead} / without", after / before, "ratio", RATIO_AIM)
                else:
                    yield BenchRow(f"{name}, {lead} / without", after / before, "ratio")
        yield BenchRow(f"prefetch of blocks from {source}, p50 of the call", 1e6 * statistics.median(calls_s), "us")
        time.sleep(COUNTERS_S)
        counters = next(node.counters for node in cluster.control().status().nodes if node.counters["prefetched_bytes"])
        judged = sum(counters[f"prefetches_{outcome}"] for outcome in ("useful", "wasted", "late"))
        yield BenchRow(f"prefetches from {source}: late", counters["prefetches_late"] / max(1, judged), "share")
        yield BenchRow(f"prefetches from {source}: wasted", counters["prefetches_wasted"] / max(1, judged), "share")


def _load(client: Client, prompt: Prompt, room: npt.NDArray[np.uint8], settled_s: float) -> float:
    """Seconds of one load into memory that was written before. The blocks are removed afterwards, so that those that came too
    late do not count against the limit of the next prompts."""
    begun_s = time.perf_counter()
    sizes = client.get_batch_into(prompt.keys, room)
    taken_s = time.perf_counter() - begun_s
    assert sizes == [BLOCK_BYTES] * len(prompt.keys), "blocks are lost"
    assert all((row == value).all() for row, value in zip(room, prompt.values(), strict=True)), "wrong bytes"
    time.sleep(settled_s)
    client.remove(prompt.keys, force=True)
    return taken_s


@contextlib.contextmanager
def _hidden(socket: Path) -> Iterator[None]:
    """Clients that are made, and copies that begin, meanwhile take the node to be on another host."""
    away = socket.with_suffix(".away")
    socket.rename(away)
    try:
        yield
    finally:
        away.rename(socket)


if __name__ == "__main__":
    sys.exit(main())
