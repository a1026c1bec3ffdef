"""A standby's memory of a catalog's records, the rate at which it receives them, and the time to become owner when it is elected.

It runs in its own process, without a catalog. Records arrive by shard, as at a catalog's followers, so a block's parent may arrive before
or after it.
"""

import multiprocessing
import random
import time
from collections.abc import Iterator
from typing import Final

import numpy as np

from benchmarks.masters.memory import KEY_BYTES, cut, resident_bytes
from kvstore.cli.tools.bench import BenchRow, at_most
from kvstore.master.catalogs.interface import BlockPuts
from kvstore.master.directory import records
from kvstore.master.directory.bounds import DirectoryLimits
from kvstore.master.directory.directory import Directory
from kvstore.master.directory.followed_records import FollowedRecords

SIZES: Final = (200_000, 10_000_000)
SHARD_BLOCKS: Final = 4096
"""Blocks of one change."""
PROMPT: Final = 16
TAKE_OVER_S: Final = 0.5


def rows() -> Iterator[BenchRow]:
    for blocks in SIZES:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            yield from pool.apply(follow, (blocks,))


def follow(blocks: int) -> list[BenchRow]:
    """Take the blocks in, in an order in which half of all parents come after their children, and be elected."""
    rng, all_keys = np.random.default_rng(1), np.random.default_rng(2).bytes(KEY_BYTES * blocks)
    order = rng.permutation(blocks)
    before, spent_s = resident_bytes(), 0.0
    followed = FollowedRecords()
    followed.take([records.put_node("one", 1, 0)])
    for begin in range(0, blocks, SHARD_BLOCKS):
        numbers = order[begin : begin + SHARD_BLOCKS].tolist()
        count = len(numbers)
        keys = cut(all_keys, numbers)
        parents = [b"" if number % PROMPT == 0 else all_keys[KEY_BYTES * (number - 1) : KEY_BYTES * number] for number in numbers]
        puts = BlockPuts(
            "bench", keys, [1 << 16] * count, numbers, [number + 1 for number in numbers], ["ns"] * count, parents, [(1,)] * count
        )
        begun_s = time.process_time()
        followed.take([puts])
        spent_s += time.process_time() - begun_s
    took_bytes, begun_s = resident_bytes() - before, time.perf_counter()
    directory = Directory(1, followed, DirectoryLimits(), wall_ns=time.time_ns(), now_ns=0, rng=random.Random())
    elected_s = time.perf_counter() - begun_s
    assert directory.blocks_at(1) == blocks
    return [
        BenchRow(f"standby: {blocks:,} blocks taken in", blocks / spent_s / 1e3, "k blocks/s"),
        BenchRow(f"standby: memory a block, at {blocks:,}", took_bytes / blocks, "bytes"),
        at_most(f"standby: to stand on {blocks:,} blocks when elected", elected_s * 1e3, "ms", TAKE_OVER_S * 1e3),
    ]
