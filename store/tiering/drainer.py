"""Drain of a node: it takes no new blocks and writes blocks that are only in memory to NVMe.

Started by a master's command (`drain`), which can be revoked, or by a signal (`end`), with a deadline. Reads are served
meanwhile. Moves are planned a few at a time, most recently read blocks first. No block is evicted for it.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from kvstore.protocol.catalog_messages import DRAIN_OFF, DRAIN_SAVE
from kvstore.protocol.errors import Draining
from kvstore.protocol.settings import format_size
from kvstore.store.block_table.block import DRAM, HBM, NVME, Block, BlockColumns
from kvstore.store.block_table.rows import Numbers, is_in, read, rows_of
from kvstore.store.block_table.table import BlockTable
from kvstore.store.block_table.uncommitted import UNCOMMITTED
from kvstore.telemetry.logs import named

MAX_PLANNED: Final = 1024
"""Moves planned at once: some milliseconds of the loop."""

WAITING_LOOK_NS: Final = 1_000_000_000
"""Interval of table walks while blocks may still become savable."""

WALK_SHARE: Final = 20
"""The interval is at least this many times the duration of a walk."""

log = logging.getLogger("kvstore.store")


class NvmeSaver:
    """Writes memory blocks to NVMe. Not thread-safe: called from the node's loop."""

    def __init__(
        self, table: BlockTable, *, batch_bytes: int, has_master_link: Callable[[], bool], clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        """`batch_bytes` are planned at once, or one block. `has_master_link`: uncommitted blocks may be committed soon;
        until then they are not written to NVMe."""
        self._table = table
        self._batch_bytes = batch_bytes
        self._has_master_link = has_master_link
        self._clock_ns = clock_ns
        self._todo: deque[Block] | None = None
        self._planned: deque[Block] = deque()
        self._planned_bytes = 0
        self._fitting_bytes = 0
        """NVMe capacity not taken by blocks that are in memory too."""
        self._next_walk_ns = 0
        self._tried: set[Block] = set()
        self.saved_blocks = 0
        self.saved_bytes = 0
        self.is_done = False
        """True if no block is left that could be written."""

    def begin(self) -> None:
        """Start, or restart, writing all blocks until done."""
        self._tried.clear()
        self._planned.clear()
        self._planned_bytes = 0
        self.saved_blocks = self.saved_bytes = 0
        self.is_done = False
        self._next_walk_ns = 0
        capacity_bytes = next((tier.capacity_bytes for index, tier, _, _ in self._table.levels() if index == NVME), 0)
        found = self._all()
        self._fitting_bytes = max(0, capacity_bytes - _saved_already(*found))
        self._todo = self._found(*found)

    def stop(self) -> None:
        """Plan no more moves; planned ones complete."""
        self._todo = None

    def step(self) -> None:
        """Plan the next moves as earlier ones complete. Called after each round of events."""
        if self._todo is None:
            return
        while self._planned and not self._planned[0].moving:
            self._count(self._planned.popleft())
        while self._todo and len(self._planned) < MAX_PLANNED and (self._planned_bytes < self._batch_bytes or not self._planned):
            block = self._todo.popleft()
            if block.is_dropped or block.moving:
                continue  # a move in progress is not counted
            self._tried.add(block)
            if self._table.evictor.save(block):
                self._planned.append(block)
                self._planned_bytes += block.size_bytes

    def run_due(self, *, now_ns: int) -> None:
        """Search for more blocks once all found ones are written. Called periodically; walks the table."""
        if self._todo is None or self._todo or self._planned:
            return
        is_waiting = self._is_waiting()
        if is_waiting and now_ns < self._next_walk_ns:
            return
        begun_ns = self._clock_ns()
        self._todo = self._found(*self._all())
        self._next_walk_ns = now_ns + max(WAITING_LOOK_NS, WALK_SHARE * (self._clock_ns() - begun_ns))
        if not self._todo and not is_waiting:
            self._todo, self.is_done = None, True

    def lost(self) -> tuple[int, int]:
        """Number and bytes of blocks that are only in memory."""
        _, columns, rows = self._all()
        sizes = read(columns.sizes, rows[~is_in(columns, rows, NVME)])
        return len(sizes), int(sizes.sum())

    def _all(self) -> tuple[list[Block], BlockColumns, Numbers]:
        """Return all visible blocks, their columns and rows."""
        blocks = list(self._table.blocks())
        return blocks, self._table.rows.columns, rows_of(blocks)

    def _found(self, blocks: Sequence[Block], columns: BlockColumns, rows: Numbers) -> deque[Block]:
        """Return blocks to write, most recently read first, as many as fit: a block beyond that would evict an earlier
        one. Works on columns, in one loop iteration."""
        wanted = np.flatnonzero(~is_in(columns, rows, NVME) & (read(columns.generations, rows) != UNCOMMITTED))
        if self._tried:
            wanted = wanted[[blocks[place] not in self._tried for place in wanted.tolist()]]
        wanted = wanted[np.argsort(~read(columns.last_accesses, rows[wanted]))]  # a stable sort takes four times as long
        ends = np.cumsum(read(columns.sizes, rows[wanted]))
        count = int(np.searchsorted(ends, self._fitting_bytes, side="right"))
        self._fitting_bytes -= int(ends[count - 1]) if count else 0
        return deque(map(blocks.__getitem__, wanted[:count].tolist()))

    def _is_waiting(self) -> bool:
        """Return True if blocks may still become savable: uncommitted ones, open puts, moves in progress."""
        is_uncommitted = bool(self._table.uncommitted) and self._has_master_link()
        return is_uncommitted or self._table.open_puts > 0 or self._table.evictor.under_way > 0

    def _count(self, block: Block) -> None:
        self._planned_bytes -= block.size_bytes
        if block.is_in(NVME):
            self.saved_blocks += 1
            self.saved_bytes += block.size_bytes


def _saved_already(_blocks: Sequence[Block], columns: BlockColumns, rows: Numbers) -> int:
    """Bytes of blocks in both memory and NVMe. An earlier pass wrote the most valuable ones, which must not be evicted
    for the rest."""
    above = is_in(columns, rows, HBM) | is_in(columns, rows, DRAM)
    return int(read(columns.sizes, rows[is_in(columns, rows, NVME) & above]).sum())


class Drainer:
    """State of the drain. Not thread-safe: called from the node's loop."""

    def __init__(self, saver: NvmeSaver, *, has_nvme: bool, clock_ns: Callable[[], int]) -> None:
        self._saver = saver
        self._has_nvme = has_nvme
        self._clock_ns = clock_ns
        self._mode = DRAIN_OFF
        self._modes: dict[int, int] = {}
        """By partition: the master's mode. The strictest applies."""
        self._then: Callable[[], None] | None = None
        """Set once the node stops."""
        self._began_ns = 0
        self._until_ns = 0

    @property
    def is_closed(self) -> bool:
        """True if the node takes no new blocks."""
        return self._mode != DRAIN_OFF or self._then is not None

    def check_open(self) -> None:
        """Raises Draining if the node takes no new blocks."""
        if self.is_closed:
            raise Draining("this node is draining and takes no new blocks: put them on another node")

    def drain(self, mode: int, partition: int = 0) -> None:
        """Apply a mode of the partition's master. A new registration resets it to DRAIN_OFF; its master repeats the
        mode."""
        self._modes[partition] = mode
        mode = max(self._modes.values())
        if mode == self._mode:
            return
        self._mode = mode
        if self._then is not None:
            return
        if mode == DRAIN_SAVE:
            self._saver.begin()
        else:
            self._saver.stop()

    def end(self, drain_s: float, then: Callable[[], None]) -> None:
        """Write all that can be written, then call `then`, at most after `drain_s`. At once without NVMe or with
        `drain_s` 0."""
        if self._then is not None:
            return
        self._then = then
        self._began_ns = self._clock_ns()
        self._until_ns = self._began_ns + int(drain_s * 1e9)
        if not self._has_nvme or not drain_s:
            self._finish()
            return
        self._saver.begin()

    def step(self) -> None:
        """Plan the next moves. Called after each round of events."""
        self._saver.step()

    def run_due(self) -> None:
        """Search for more blocks, and finish at the deadline. Called periodically."""
        now_ns = self._clock_ns()
        self._saver.run_due(now_ns=now_ns)
        if self._then is not None and self._until_ns and (self._saver.is_done or now_ns >= self._until_ns):
            self._finish()

    def _finish(self) -> None:
        assert self._then is not None
        self._until_ns = 0
        self._saver.stop()
        lost_blocks, lost_bytes = self._saver.lost()
        saved = f"{self._saver.saved_blocks} blocks ({format_size(self._saver.saved_bytes)}) were written to NVMe"
        took_s = (self._clock_ns() - self._began_ns) / 1e9
        lost = f"{lost_blocks} blocks ({format_size(lost_bytes)}) are lost"
        if lost_blocks and self._has_nvme:
            log.warning(
                "the node stops: %s in %.1f s; %s: the drain ran out of time or NVMe space, or they were uncommitted",
                saved,
                took_s,
                lost,
                extra=named("node_ends", saved=saved, lost=lost),
            )
        else:
            log.info("the node stops: %s in %.1f s; %s", saved, took_s, lost, extra=named("node_ends", saved=saved, lost=lost))
        self._then()
