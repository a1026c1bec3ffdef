"""Shutdown of a node: it takes no new blocks, and writes to NVMe what only its memory holds.

By its master's command (`drain`), which may be taken back, or by a signal (`end`), for as long as it has. It serves reads meanwhile. Copies
are planned as the mover takes them, a few at a time, what was read last first. No block leaves the memory for it.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from kvstore.protocol.catalog_messages import DRAIN_OFF, DRAIN_SAVE
from kvstore.protocol.errors import Draining
from kvstore.protocol.settings import format_size
from kvstore.store.block_table.block import DRAM, HBM, NVME, Block, BlockColumns
from kvstore.store.block_table.rows import Numbers, is_in, read, rows_of
from kvstore.store.block_table.table import BlockTable
from kvstore.store.block_table.uncommitted import UNDECIDED
from kvstore.telemetry.logs import named

MAX_PLANNED: Final = 1024
"""Blocks whose copies are planned at once, however small: planning them takes some milliseconds of the loop."""

WAITING_LOOK_NS: Final = 1_000_000_000
"""How often the table is walked while others may still bring something to be written."""

WALK_SHARE: Final = 20
"""And no sooner than so many times as long after a walk as it took."""

log = logging.getLogger("kvstore.store")


class NvmeSaver:
    """See the module. Not thread-safe: the node's loop is the only caller."""

    def __init__(
        self, table: BlockTable, *, batch_bytes: int, may_be_decided: Callable[[], bool], clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        """`batch_bytes` are planned at once, or one block. `may_be_decided`: there is a master, which decides soon about what was put last;
        before that nothing of it goes to NVMe."""
        self._table = table
        self._batch_bytes = batch_bytes
        self._may_be_decided = may_be_decided
        self._clock_ns = clock_ns
        self._todo: deque[Block] | None = None
        self._planned: deque[Block] = deque()
        self._planned_bytes = 0
        self._fitting_bytes = 0
        """Of NVMe's capacity, what is not taken by blocks that are written, and are in memory, too."""
        self._look_ns = 0
        self._tried: set[Block] = set()
        self.saved_blocks = 0
        self.saved_bytes = 0
        self.is_done = False
        """Nothing is left that could be written down."""

    def begin(self) -> None:
        """Write down what there is, and what comes until it is done; anew, if that was done before."""
        self._tried.clear()
        self._planned.clear()
        self._planned_bytes = 0
        self.saved_blocks = self.saved_bytes = 0
        self.is_done = False
        self._look_ns = 0
        capacity_bytes = next((tier.capacity_bytes for index, tier, _, _ in self._table.levels() if index == NVME), 0)
        self._fitting_bytes = max(0, capacity_bytes - self._saved_already())
        self._todo = self._found()

    def stop(self) -> None:
        """Plan no more; what is planned is still written."""
        self._todo = None

    def step(self) -> None:
        """Plan the next copies as those before are made. Called after every round of events."""
        if self._todo is None:
            return
        while self._planned and not self._planned[0].moving:
            self._count(self._planned.popleft())
        while self._todo and len(self._planned) < MAX_PLANNED and (self._planned_bytes < self._batch_bytes or not self._planned):
            block = self._todo.popleft()
            if block.is_gone or block.moving:
                continue  # one that is on its way there already is counted by nobody
            self._tried.add(block)
            if self._table.room.save(block):
                self._planned.append(block)
                self._planned_bytes += block.size_bytes

    def tick(self, *, now_ns: int) -> None:
        """Look for more once all that was found is written. Called now and then; it walks the table, seldom while it waits for others."""
        if self._todo is None or self._todo or self._planned:
            return
        is_waiting = self._is_waiting()
        if is_waiting and now_ns < self._look_ns:
            return
        begun_ns = self._clock_ns()
        self._todo = self._found()
        self._look_ns = now_ns + max(WAITING_LOOK_NS, WALK_SHARE * (self._clock_ns() - begun_ns))
        if not self._todo and not is_waiting:
            self._todo, self.is_done = None, True

    def lost(self) -> tuple[int, int]:
        """(blocks, bytes) that only memory holds."""
        _, columns, rows = self._all()
        sizes = read(columns.sizes, rows[~is_in(columns, rows, NVME)])
        return len(sizes), int(sizes.sum())

    def _all(self) -> tuple[list[Block], BlockColumns, Numbers]:
        """All visible blocks, their columns and rows."""
        blocks = list(self._table.blocks())
        return blocks, self._table.rows.columns, rows_of(blocks)

    def _found(self) -> deque[Block]:
        """What was read last comes first: it is worth the most, should time not do for all. What would not fit is not written, for each
        of the last to come would have one of the first leave again. By columns: it is one turn of the loop."""
        blocks, columns, rows = self._all()
        wanted = np.flatnonzero(~is_in(columns, rows, NVME) & (read(columns.generations, rows) != UNDECIDED))
        if self._tried:
            wanted = wanted[[blocks[place] not in self._tried for place in wanted.tolist()]]
        wanted = wanted[np.argsort(~read(columns.last_accesses, rows[wanted]), kind="stable")]
        ends = np.cumsum(read(columns.sizes, rows[wanted]))
        count = int(np.searchsorted(ends, self._fitting_bytes, side="right"))
        self._fitting_bytes -= int(ends[count - 1]) if count else 0
        return deque(map(blocks.__getitem__, wanted[:count].tolist()))

    def _saved_already(self) -> int:
        """Bytes of what memory and NVMe hold both: an earlier pass wrote what was worth most, which is not to leave for the rest."""
        _, columns, rows = self._all()
        above = is_in(columns, rows, HBM) | is_in(columns, rows, DRAM)
        return int(read(columns.sizes, rows[is_in(columns, rows, NVME) & above]).sum())

    def _is_waiting(self) -> bool:
        """Something may still come: what the master has not decided about, what is being put, or is being copied already."""
        is_undecided = bool(self._table.undecided) and self._may_be_decided()
        return is_undecided or self._table.open_puts > 0 or self._table.room.under_way > 0

    def _count(self, block: Block) -> None:
        self._planned_bytes -= block.size_bytes
        if block.is_in(NVME):
            self.saved_blocks += 1
            self.saved_bytes += block.size_bytes


class Drainer:
    """See the module. Not thread-safe: the node's loop is the only caller."""

    def __init__(self, saver: NvmeSaver, *, has_nvme: bool, clock_ns: Callable[[], int]) -> None:
        self._saver = saver
        self._has_nvme = has_nvme
        self._clock_ns = clock_ns
        self._mode = DRAIN_OFF
        self._said: dict[int, int] = {}
        """What the master of each partition has said: the strictest holds."""
        self._then: Callable[[], None] | None = None
        """Set once the node ends."""
        self._began_ns = 0
        self._until_ns = 0

    @property
    def is_closed(self) -> bool:
        """It takes no new blocks."""
        return self._mode != DRAIN_OFF or self._then is not None

    def check_open(self) -> None:
        """Raises Draining: the node takes no new blocks."""
        if self.is_closed:
            raise Draining("this node is to be stopped and takes no new blocks: put them elsewhere")

    def drain(self, mode: int, partition: int = 0) -> None:
        """The partition's master says so, as often as it likes. DRAIN_OFF, too, of a new registration: it says the rest anew."""
        self._said[partition] = mode
        mode = max(self._said.values())
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
        """Call `then` once all is written that can be, or after `drain_s`. At once where there is no NVMe, or no time."""
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
        """Called after every round of events."""
        self._saver.step()

    def tick(self) -> None:
        """Called now and then."""
        now_ns = self._clock_ns()
        self._saver.tick(now_ns=now_ns)
        if self._then is not None and self._until_ns and (self._saver.is_done or now_ns >= self._until_ns):
            self._finish()

    def _finish(self) -> None:
        assert self._then is not None
        self._until_ns = 0
        self._saver.stop()
        lost_blocks, lost_bytes = self._saver.lost()
        saved = f"{self._saver.saved_blocks} blocks ({format_size(self._saver.saved_bytes)}) were written to NVMe"
        took_s = (self._clock_ns() - self._began_ns) / 1e9
        lost = f"{lost_blocks} blocks ({format_size(lost_bytes)}) end with it"
        if lost_blocks and self._has_nvme:
            log.warning(
                "the node ends: %s in %.1f s; %s: no time, room or decision of the master for them",
                saved,
                took_s,
                lost,
                extra=named("node_ends", saved=saved, lost=lost),
            )
        else:
            log.info("the node ends: %s in %.1f s; %s", saved, took_s, lost, extra=named("node_ends", saved=saved, lost=lost))
        self._then()
