"""What only a node's memory holds is written down in its NVMe, once, because the node is to be stopped.

It plans copies as the mover takes them, a few at a time: the loop serves readers meanwhile, and what is stopped in the middle has written
what was read last. It moves no bytes itself, and no block leaves the memory for it.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from kvstore.store.blocks.block import NVME, Block
from kvstore.store.blocks.table import BlockTable
from kvstore.store.blocks.undecided import UNDECIDED

MAX_PLANNED: Final = 1024
"""Blocks whose copies are planned at once, however small: planning them takes some milliseconds of the loop."""
WAITING_LOOK_NS: Final = 1_000_000_000
"""How often the table is walked while others may still bring something to be written."""


class Saver:
    """See the module. Not thread-safe: the node's loop is the only caller."""

    def __init__(self, table: BlockTable, *, batch_bytes: int, may_be_decided: Callable[[], bool]) -> None:
        """`batch_bytes` are planned at once, or one block. `may_be_decided`: there is a master, which decides soon about what was put last;
        before that nothing of it goes to NVMe."""
        self._table = table
        self._batch_bytes = batch_bytes
        self._may_be_decided = may_be_decided
        self._todo: deque[Block] | None = None
        self._planned: deque[Block] = deque()
        self._planned_bytes = 0
        self._fitting_bytes = 0
        """Of NVMe's capacity, what is not taken by blocks that are written."""
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
        self._fitting_bytes = next((tier.capacity_bytes for index, tier, _, _ in self._table.levels() if index == NVME), 0)
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
        self._look_ns = now_ns + WAITING_LOOK_NS
        self._todo = self._found()
        if not self._todo and not is_waiting:
            self._todo, self.is_done = None, True

    def lost(self) -> tuple[int, int]:
        """(blocks, bytes) that only memory holds."""
        found = [block.size_bytes for block in self._table.blocks() if block.nvme is None]
        return len(found), sum(found)

    def _found(self) -> deque[Block]:
        """What was read last comes first: it is worth the most, should time not do for all. What would not fit is not written, for each
        of the last to come would have one of the first leave again."""
        wanted = [block for block in self._table.blocks() if self._is_wanted(block)]
        wanted.sort(key=lambda block: block.last_access, reverse=True)
        fitting: deque[Block] = deque()
        for block in wanted:
            if block.size_bytes > self._fitting_bytes:
                break
            self._fitting_bytes -= block.size_bytes
            fitting.append(block)
        return fitting

    def _is_wanted(self, block: Block) -> bool:
        return block.nvme is None and block.generation != UNDECIDED and block not in self._tried

    def _is_waiting(self) -> bool:
        """Something may still come: what the master has not decided about, what is being put, or is being copied already."""
        is_undecided = bool(self._table.undecided) and self._may_be_decided()
        return is_undecided or self._table.open_puts > 0 or self._table.room.under_way > 0

    def _count(self, block: Block) -> None:
        self._planned_bytes -= block.size_bytes
        if block.is_in(NVME):
            self.saved_blocks += 1
            self.saved_bytes += block.size_bytes
