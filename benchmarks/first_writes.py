"""First writes of a client: it maps each of the node's slabs at its first use. Part of `make bench` and of `make bench-start`."""

import os
import statistics
from collections.abc import Iterator
from functools import partial
from typing import Final

import numpy as np

from kvstore.cli.replay import show_warning
from kvstore.cli.tools.bench import BLOCK_BYTES, NEEDED_DRAM_BYTES, BenchRow, at_least, copy_all, of_size, put_all, seconds
from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from kvstore.client import Client

FIRST_BATCHES: Final = 4
"""Of 8 x 4 MiB: 128 MiB."""
FIRST_CLIENTS: Final = 6


def rows() -> Iterator[BenchRow]:
    """First writes of new clients, connecting included, against memcpy in turn. The node has touched its memory; the first client has new
    slabs, the others map those that the one before wrote."""
    size_bytes, count = 4 * BLOCK_BYTES, FIRST_BATCHES * 8
    sources = [np.random.default_rng(1).integers(0, 256, size_bytes, dtype=np.uint8) for _ in range(8)]
    arena = [np.ones(size_bytes, np.uint8) for _ in range(count)]
    ratios: list[float] = []
    with LocalCluster(ClusterPlan(is_private=True, dram=str(NEEDED_DRAM_BYTES)), on_log=show_warning) as running:
        running.wait_warm()
        for _ in range(FIRST_CLIENTS):
            keys = [os.urandom(16) for _ in range(count)]
            put_s = copied_s = 0.0
            with Client(running.address) as client:
                for at in range(0, count, 8):
                    put_s += seconds(partial(put_all, client, keys[at : at + 8], sources))
                    copied_s += seconds(partial(copy_all, arena[at : at + 8], sources))
                client.remove(keys, force=True)
            ratios.append(copied_s / put_s)
    yield at_least(f"the first client's first {of_size(count * size_bytes)} / memcpy", ratios[0], "ratio", 0.4)
    yield at_least(f"a new client's first {of_size(count * size_bytes)} / memcpy", statistics.median(ratios[1:]), "ratio", 0.4)
