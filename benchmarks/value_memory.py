"""Memory of the processes a value of 64 bytes, beside the value itself: by role, and by what of the node it is.

A master and a node of one host, filled through a client in batches, or value by value. The client reads as well: so the node keeps an index
for it in shared memory. Growth over what the same processes take while they hold next to nothing.
"""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np

from kvstore.cli.replay import show_warning
from kvstore.cli.tools.bench import BenchRow, at_most
from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from kvstore.client import Client

BLOCKS: Final = 1_000_000
BATCH: Final = 4096
SINGLES: Final = 200_000
VALUE_BYTES: Final = 64
KEY_BYTES: Final = 16
DRAM_BYTES: Final = 128 << 20
"""Twice what the values take: none leaves."""
TABLE_SHARE: Final = "8"
AIM_BYTES: Final = 500
_MEMFD: Final = re.compile(r"/memfd:kvstore-(\S+)")
_SHARED: Final = {"index": "shared index", "desk": "reader slots"}
"""The node's memfds beside its slabs, by their names."""


def rows() -> Iterator[BenchRow]:
    grown = _grown(BLOCKS, _put_batches)
    name = f"{BLOCKS:,} values of {VALUE_BYTES} bytes: memory a value beside it"
    yield at_most(f"{name}, in all", sum(grown.values()), "bytes", AIM_BYTES)
    for part, took in grown.items():
        yield BenchRow(f"{name}, {part}", took, "bytes")
    alone = sum(_grown(SINGLES, _put_singles).values())
    yield BenchRow(f"{SINGLES:,} of them, put one by one: memory a value beside it, in all", alone, "bytes")


def _grown(count: int, put: Callable[[Client, int], None]) -> dict[str, float]:
    """Bytes a value by role, of so many values that are put into a cluster of their own."""
    plan = ClusterPlan(is_private=True, dram=str(DRAM_BYTES), table_share=TABLE_SHARE)
    with LocalCluster(plan, on_log=show_warning) as cluster, Client(cluster.address) as client:
        cluster.wait_ready()
        client.put(b"first", b"value")
        client.get(b"first")
        before = _memory(cluster)
        put(client, count)
        client.flush()
        after = _memory(cluster)
        assert client.exists(b"first"), "nothing may leave"
    return {name: (after[name] - before[name]) / count for name in after}


def _put_batches(client: Client, count: int) -> None:
    rng = np.random.default_rng(1)
    for begin in range(0, count, BATCH):
        rows = rng.integers(0, 256, (min(BATCH, count - begin), VALUE_BYTES), dtype=np.uint8)
        drawn = rng.bytes(KEY_BYTES * len(rows))
        keys = [drawn[at : at + KEY_BYTES] for at in range(0, len(drawn), KEY_BYTES)]
        assert all(client.put_batch(keys, rows)), "a new key was there already"


def _put_singles(client: Client, count: int) -> None:
    rng = np.random.default_rng(1)
    for _ in range(count):
        assert client.put(rng.bytes(KEY_BYTES), rng.bytes(VALUE_BYTES)), "a new key was there already"


def _memory(cluster: LocalCluster) -> dict[str, int]:
    """Resident bytes by role: anonymous memory of master and node, and what of the node's memfds is no slab."""
    node = cluster.nodes[0].pid
    found = {"master": _anonymous(cluster.master_pid), "node": _anonymous(node)}
    return found | dict.fromkeys(_SHARED.values(), 0) | _shared(node)


def _anonymous(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().split("RssAnon:")[1].split()[0]) * 1024


def _shared(pid: int) -> dict[str, int]:
    """Return the memory of the node's memfds, mapped or not, each counted once, by kind."""
    found: dict[tuple[int, int], tuple[str, int]] = {}
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        named = _MEMFD.match(os.readlink(fd))
        if named is not None and named[1] in _SHARED:
            status = fd.stat()
            found[status.st_dev, status.st_ino] = _SHARED[named[1]], status.st_blocks * 512
    return {name: sum(size for other, size in found.values() if other == name) for name in _SHARED.values()}
