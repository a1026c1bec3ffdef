"""Memory of a directory's rows, pauses of the loop by their growth, the rate of lookups, and the cost of many sets of holders.

The rows are alone in a process of their own; `make bench` has the memory of a whole master for each block. Times are processor time, so
other load on the machine has little effect.
"""

import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from kvstore.cli.tools.bench import BenchRow, at_most
from kvstore.master.catalogs.interface import BlockPuts
from kvstore.master.directory.index.holders import HINT, HolderSets
from kvstore.master.directory.index.queries import DirectoryQueries
from kvstore.master.directory.index.rows import Rows
from kvstore.master.directory.index.tenants import Tenants

BLOCKS: Final = 10_000_000
PUBLISHED: Final = 4096
"""Blocks of one message of a node."""
PROMPT: Final = 16
"""Blocks of one prompt: all but the first have a parent."""
KEY_BYTES: Final = 16
PAGE_BYTES: Final = 4096
QUESTIONS: Final = 200
PAIRED_BLOCKS: Final = 1_000_000
PAIRED_NODES: Final = 200
PAUSE_MS: Final = 50


def rows() -> Iterator[BenchRow]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield from pool.apply(fill)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield from pool.apply(pair)


def fill() -> list[BenchRow]:
    """Take in the blocks as a node publishes them, then ask for keys all over."""
    tenants = Tenants()
    table, owner = Rows(tenants), tenants.of("bench")
    table.sets.set_live([1])
    all_keys, pauses = np.random.default_rng(1).bytes(KEY_BYTES * BLOCKS), []
    before = resident_bytes()
    for begin in range(0, BLOCKS, PUBLISHED):
        keys = cut(all_keys, range(begin, min(begin + PUBLISHED, BLOCKS)))
        parents = [b"" if number % PROMPT == 0 else keys[number - 1] for number in range(len(keys))]
        count = len(keys)
        checksums = [hash(key) & (1 << 64) - 1 for key in keys]
        puts = BlockPuts("bench", keys, [1 << 16] * count, checksums, [begin + 1] * count, ["bench"] * count, parents, [(1,)] * count)
        pauses.append(spent_ms(partial(table.insert_new, owner, puts, ((1, 2),))))
    found = [
        at_most(f"rows: memory a block, at {BLOCKS:,}", (resident_bytes() - before) / BLOCKS, "bytes", 150),
        at_most(f"rows: the longest of {len(pauses):,} messages of {PUBLISHED:,} blocks", max(pauses), "ms", PAUSE_MS),
        BenchRow("rows: the median of them", statistics.median(pauses), "ms"),
    ]
    queries, rng = DirectoryQueries(table, tenants), random.Random(1)
    for count in (1, 64, 1024):
        times = []
        for _ in range(QUESTIONS):
            keys = cut(all_keys, [rng.randrange(BLOCKS) for _ in range(count)])
            times.append(spent_ms(partial(queries.exists, "bench", keys)))
        found.append(BenchRow(f"rows: exists of {count:,} keys, at {BLOCKS:,}", count / statistics.median(times) / 1e3, "M keys/s"))
    return found


def pair() -> list[BenchRow]:
    """Blocks at random pairs of nodes, and what happens to one of the nodes."""
    sets, rng, nodes = HolderSets(), random.Random(1), range(1, PAIRED_NODES + 1)
    sets.set_live(nodes)
    before = resident_bytes()
    for _ in range(PAIRED_BLOCKS):
        sets.enter(tuple((node_id, 2) for node_id in sorted(rng.sample(nodes, 2))))
    took = (resident_bytes() - before) / PAIRED_BLOCKS
    name = f"{PAIRED_BLOCKS:,} blocks at random pairs of {PAIRED_NODES} nodes"
    return [
        BenchRow(f"{name}: holders' sets, memory a block", took, "bytes"),
        at_most(f"{name}: a node dies", spent_ms(lambda: sets.set_live(nodes[1:])), "ms", PAUSE_MS),
        at_most(f"{name}: it registers again", spent_ms(lambda: sets.rewrite(1, lambda state: state | HINT)), "ms", PAUSE_MS),
        at_most(f"{name}: it is forgotten", spent_ms(lambda: sets.rewrite(1, lambda _state: None)), "ms", PAUSE_MS),
    ]


def cut(all_keys: bytes, numbers: "range | list[int]") -> list[bytes]:
    return [all_keys[KEY_BYTES * number : KEY_BYTES * (number + 1)] for number in numbers]


def spent_ms(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return (time.process_time() - begun) * 1e3


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
