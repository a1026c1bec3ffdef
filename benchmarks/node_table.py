"""Cost of a node's block table alone: memory for each block, and processor time to add a block, with and without an eviction.

The table over a DRAM tier, in a process of its own for each series, without a client, an index or a master: batches are opened, committed
and decided as a node does for one message. Blocks come in prompts of 16 or without parents; all of one size, one tenant.
"""

import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from kvstore.cli.tools.bench import BenchRow, at_most
from kvstore.rpc.daemon import map_large_arrays
from kvstore.store.block_table.block import DRAM
from kvstore.store.block_table.event_log import BlockEventLog
from kvstore.store.block_table.holds import Holds
from kvstore.store.block_table.partition_map import PartitionMap
from kvstore.store.block_table.table import BlockTable, TableRules
from kvstore.store.block_table.uncommitted import UNCOMMITTED
from kvstore.store.shared_index.index_writer import SharedIndexWriter
from kvstore.tiers.dram import DramTier
from kvstore.tiers.policies.by_name import make_family

BLOCKS: Final = 300_000
BATCH: Final = 4096
SINGLES: Final = 20_000
VALUE_BYTES: Final = 64
KEY_BYTES: Final = 16
PROMPT: Final = 16
AIM_BYTES: Final = 400
SERIES: Final = {"in prompts of 16": ("prefix", PROMPT), "without parents": ("prefix", 0), "without parents, lru": ("lru", 0)}


def rows() -> Iterator[BenchRow]:
    for name, (policy, prompt) in SERIES.items():
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            yield from pool.apply(fill, (name, policy, prompt))


def fill(name: str, policy: str, prompt: int) -> list[BenchRow]:
    """Fill the tier, then once more, when for each new block an old one leaves; batches first, then puts one by one."""
    gc.set_threshold(100_000, 50, 100)  # as in a daemon
    map_large_arrays()
    with_room = Filling(policy, prompt)
    before = private_bytes()
    spent = [with_room.batch() for _ in range(BLOCKS // BATCH)]
    took = (private_bytes() - before) / (len(spent) * BATCH)
    turned_over = [with_room.batch() for _ in range(BLOCKS // BATCH)]
    single = statistics.median(with_room.single() for _ in range(SINGLES))
    return [
        at_most(f"table: memory a block, {name}", took, "bytes", AIM_BYTES),
        BenchRow(f"table: a block of a batch, {name}", statistics.median(spent) / BATCH, "us"),
        BenchRow(f"table: a block of a batch for which another leaves, {name}", statistics.median(turned_over) / BATCH, "us"),
        BenchRow(f"table: a single put for which another block leaves, {name}", single, "us"),
    ]


class Filling:
    """A table with room for BLOCKS, and what a node does with it for its writers."""

    def __init__(self, policy: str, prompt: int) -> None:
        self._dram = DramTier(BLOCKS * VALUE_BYTES)
        holds = Holds({DRAM: BLOCKS * VALUE_BYTES}, max_ns=0)
        self._table = BlockTable(
            {DRAM: self._dram},
            TableRules(make_family=lambda: make_family(policy), put_ttl_ns=10**9),
            emit=lambda kind, block: None,
            events=BlockEventLog(lambda: 0),
            shared_index=SharedIndexWriter(self._dram, holds, max_hazard_ns=10**9),
            partition_map=PartitionMap(),
            holds=holds,
        )
        self._prompt = prompt
        self._rng = np.random.default_rng(1)
        self._number = 0

    def batch(self) -> float:
        """Put so many blocks by one message; how long it takes, in us."""
        drawn = self._rng.bytes(KEY_BYTES * BATCH)
        keys = [drawn[at : at + KEY_BYTES] for at in range(0, len(drawn), KEY_BYTES)]
        parents = [keys[at - 1] if self._prompt and at % self._prompt else b"" for at in range(BATCH)]
        checksums = np.frombuffer(self._rng.bytes(8 * BATCH), np.uint64).tolist()
        first = self._number = self._number + BATCH
        generations = list(range(first, first + BATCH))
        return spent_us(lambda: self._put_batch(keys, parents, checksums, generations))

    def _put_batch(self, keys: list[bytes], parents: list[bytes], checksums: list[int], generations: list[int]) -> None:
        table = self._table
        assert table.are_new("bench", keys)
        slots = table.slots.free_slots("bench", VALUE_BYTES, BATCH)
        assert len(slots) == BATCH
        blocks = table.rows.make_all("bench", keys, VALUE_BYTES, [UNCOMMITTED] * BATCH, "", parents, slots)
        batch = table.puts.add_batch(blocks, self, now_ns=1)
        table.store_batch_uncommitted(batch, checksums)
        table.uncommitted.end(table.uncommitted.take(BATCH))
        table.mark_all_committed(blocks, generations)
        table.expire(now_ns=1)

    def single(self) -> float:
        """Put one block; how long it takes, in us."""
        key = self._rng.bytes(KEY_BYTES)
        self._number += 1
        return spent_us(lambda: self._put_single(key, self._number + (1 << 40)))

    def _put_single(self, key: bytes, generation: int) -> None:
        table = self._table
        assert table.find("bench", key) is None
        block = table.rows.make("bench", key, VALUE_BYTES, UNCOMMITTED, "", b"", generation)
        slot = table.place(block)
        assert slot is not None
        table.copies.make_placed_visible(block, self._dram.locate(slot))
        table.enter_placed(block)
        table.uncommitted.end(table.uncommitted.take(BATCH))
        table.mark_committed(block, generation)


def spent_us(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return (time.process_time() - begun) * 1e6


def private_bytes() -> int:
    """Resident memory of this process that is not shared, as the tier is."""
    with open("/proc/self/status") as status:
        return int(status.read().split("RssAnon:")[1].split()[0]) * 1024
