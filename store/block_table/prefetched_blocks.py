"""Blocks prefetched into DRAM and not read yet: bounded, and counted as useful or wasted. Sans-I/O; `now_ns` is passed
in.

A read does nothing for this: `check` looks later whether the block's hit count has risen. A block is useful if it was
read before it left DRAM. It is wasted if it left DRAM unread, or was not read within UNREAD_NS.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvstore.store.block_table.block import DRAM, HBM, Block

SHARE: Final = 16
"""1/SHARE of DRAM may hold unread prefetched blocks, so that wrong guesses displace few hot blocks."""
MAX_BLOCKS: Final = 1 << 16
"""Prefetched blocks that are tracked at once: about 10 MB."""
MAX_AWAITED: Final = 1 << 14
"""Requested copies that have not arrived."""
AWAIT_NS: Final = 30_000_000_000
"""Time after which a requested copy counts as failed: the copying node gives up sooner."""
UNREAD_NS: Final = 60_000_000_000
"""Time after which an unread block no longer counts against the limit, so that a caller that never reads does not
stop the prefetches of others."""
MIN_JUDGED: Final = 256
MAX_RECENT: Final = 1024
CHECKED_AT_ONCE: Final = 4096
"""Blocks checked per call: about 2 ms."""


class _Unread(NamedTuple):
    """A prefetched block, and when it arrived."""

    block: Block
    since_ns: int


class PrefetchedBlocks:
    """Prefetches of a node, from their queueing to the first read. Not thread-safe: called from the node's loop.

    The limit counts a block from `reserve` or `admit_copy` until it is read, leaves DRAM, or fails.
    """

    def __init__(self, dram_bytes: int) -> None:
        self._most_bytes = dram_bytes // SHARE
        self._charged_bytes = self._charged_blocks = 0
        self._unread: deque[_Unread] = deque()
        self._awaited: OrderedDict[tuple[str, bytes], list[int]] = OrderedDict()
        """By tenant and key of a requested copy: its size once it is ordered (0 before), and when it counts as failed."""
        self.brought_blocks = self.brought_bytes = 0
        """Blocks that a prefetch brought into DRAM."""
        self.useful = 0
        self.wasted = 0
        self._recent = [0, 0]
        """Blocks that were useful and wasted lately: halved at MAX_RECENT together."""
        self.late = 0
        """Blocks that were read before their prefetch was complete."""
        self.refused = 0
        """Blocks that were not prefetched because of a limit, a drain, or a lack of space."""

    # --- blocks of this node ---

    def reserve(self, size_bytes: int) -> bool:
        """Charge a block to be brought; return False if it exceeds the limit. `add` or `release` must follow."""
        if self._charged_bytes + size_bytes > self._most_bytes or self._charged_blocks >= MAX_BLOCKS:
            return False
        self._charge(size_bytes, 1)
        return True

    def release(self, size_bytes: int) -> None:
        """End the charge of a block that was not brought."""
        self._charge(size_bytes, -1)

    def add(self, block: Block, now_ns: int) -> None:
        """Track a charged block whose copy in DRAM is complete, with a hit count of 0."""
        self.brought_blocks += 1
        self.brought_bytes += block.size_bytes
        self._unread.append(_Unread(block, now_ns))

    # --- copies from other nodes ---

    def await_copies(self, tenant: str, keys: Sequence[bytes], now_ns: int) -> list[bytes]:
        """Return those of the keys that are not awaited yet, and expect their copies. Those beyond MAX_AWAITED are
        refused."""
        new = [key for key in keys if (tenant, key) not in self._awaited]
        taken = new[: MAX_AWAITED - len(self._awaited)]
        self.refused += len(new) - len(taken)
        for key in taken:
            self._awaited[tenant, key] = [0, now_ns + AWAIT_NS]
        return taken

    def forget_copies(self, tenant: str, keys: Sequence[bytes]) -> None:
        """Stop expecting copies that will not come."""
        for key in keys:
            if (awaited := self._awaited.pop((tenant, key), None)) is not None and awaited[0]:
                self.release(awaited[0])

    def admit_copy(self, tenant: str, key: bytes, size_bytes: int) -> bool:
        """Charge an ordered copy if it is awaited. Return False, and expect it no longer, if it exceeds the limit; True
        for a copy that is no prefetch."""
        awaited = self._awaited.get((tenant, key))
        if awaited is None or awaited[0]:
            return True
        if not self.reserve(size_bytes):
            del self._awaited[tenant, key]
            self.refused += 1
            return False
        awaited[0] = size_bytes
        return True

    def copied(self, block: Block, now_ns: int) -> None:
        """Track a visible copy if it was awaited."""
        if self._awaited and (awaited := self._awaited.pop((block.tenant, block.key), None)) is not None and awaited[0]:
            self.add(block, now_ns)

    # --- outcome ---

    def check(self, now_ns: int) -> None:
        """Count the blocks that were read or have left DRAM, among CHECKED_AT_ONCE of the tracked ones."""
        while self._awaited and (oldest := next(iter(self._awaited.items())))[1][1] <= now_ns:
            self.forget_copies(oldest[0][0], [oldest[0][1]])
        for _ in range(min(CHECKED_AT_ONCE, len(self._unread))):
            entry = self._unread.popleft()
            block = entry.block
            if block.hits or block.is_in(HBM):  # copies to HBM are made of blocks that are read, and reset the count
                self.useful += 1
                self._judge(0)
            elif block.is_dropped or not block.is_in(DRAM) or now_ns >= entry.since_ns + UNREAD_NS:
                self.wasted += 1
                self._judge(1)
            else:
                self._unread.append(entry)
                continue
            self.release(block.size_bytes)

    @property
    def are_wasted(self) -> bool:
        """True if more blocks were wasted than useful lately, of MIN_JUDGED at least."""
        useful, wasted = self._recent
        return wasted > useful and useful + wasted >= MIN_JUDGED

    @property
    def unread_bytes(self) -> int:
        """Bytes that count against the limit."""
        return self._charged_bytes

    @property
    def awaited(self) -> int:
        """Number of requested copies that have not arrived."""
        return len(self._awaited)

    def _judge(self, outcome: int) -> None:
        self._recent[outcome] += 1
        if sum(self._recent) >= MAX_RECENT:
            self._recent = [count // 2 for count in self._recent]

    def _charge(self, size_bytes: int, times: int) -> None:
        self._charged_bytes += times * size_bytes
        self._charged_blocks += times
