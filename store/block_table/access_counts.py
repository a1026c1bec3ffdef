"""Access statistics of a node: hits and evictions by tier, ages of accesses, last reads of namespaces, and hot blocks.

Hot blocks are counted only while a master polls them, in bounded memory: the Misra-Gries algorithm, in batches. At 2
`MAX_COUNTED` counters the `MAX_COUNTED`th largest count is subtracted from all, and counters at 0 are dropped. A count
is never too high, and too low by at most 1/`MAX_COUNTED` of all reads; a read costs O(1) amortized. Each poll ages the
counts, so that they cover the last `SPAN_S`. Reads from other hosts have separate counts. Sans-I/O; `now_ns` is passed
in.

Source: J. Misra and D. Gries, "Finding Repeated Elements", 1982; in batches: D. Anderson et al., "A High-Performance
Algorithm for Identifying Frequent Items in Data Streams", 2017.
"""

import heapq
import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvstore.store.block_table.block import Block, BlockColumns

MAX_TENANTS: Final = 64
"""Tenants with separate hit counts. Those with the fewest are summed under OTHERS."""

OTHERS: Final = "(others)"

MAX_SAMPLES: Final = 1024

FIRST_INTERVAL_NS: Final = 1_000_000_000

MAX_NAMESPACES: Final = 256
"""Namespaces that are remembered and reported: those read last."""

MAX_COUNTED: Final = 1024
"""Counters kept after a cut, and half of those before it: 300 kB, and as much for reads from other hosts."""

SPAN_S: Final = 60.0
"""Time constant: a read counts for 1/e after this."""

IDLE_S: Final = 30.0
"""Counting stops after this time without a poll."""


@dataclass(slots=True)
class TierCounts:
    """Counters of one tier since the node started."""

    hits: int = 0
    evictions: int = 0
    """Blocks dropped from the node by an eviction from this tier."""
    table_evictions: int = 0
    """Those because of the block limit."""
    quota_evictions: int = 0
    """Those because of the tenant's quota."""
    not_written: int = 0
    """Those of blocks that were not worth a write to NVMe. Without those because of a quota."""
    secondary_evictions: int = 0
    """Those of secondary copies: the block's home keeps it. Without those because of a limit or quota."""
    demotions: int = 0
    promotions: int = 0
    tenant_hits: MutableMapping[str, int] = field(default_factory=dict)
    evicted: list[int] = field(default_factory=list)
    """Last access of each block evicted since `NodeMetrics.sample` cleared the list."""

    def by_reason(self) -> dict[str, int]:
        """Return the evictions by reason; "room" is all that have no other."""
        others = {
            "worth": self.not_written,
            "secondary": self.secondary_evictions,
            "table": self.table_evictions,
            "quota": self.quota_evictions,
        }
        return {"room": self.evictions - sum(others.values())} | others

    def hit(self, tenant: str, count: int = 1) -> None:
        self.hits += count
        self.tenant_hits[tenant] = self.tenant_hits.get(tenant, 0) + count

    def evict(self, last_access: int) -> None:
        self.evictions += 1
        self.evicted.append(last_access)

    def evict_all(self, last_accesses: Sequence[int]) -> None:
        self.evictions += len(last_accesses)
        self.evicted += last_accesses

    def merge_rare_tenants(self) -> None:
        """Keep at most MAX_TENANTS tenants, so that invented names cannot grow the table."""
        if len(self.tenant_hits) <= MAX_TENANTS:
            return
        fewest = sorted((name for name in self.tenant_hits if name != OTHERS), key=self.tenant_hits.__getitem__)
        for name in fewest[: len(fewest) - MAX_TENANTS // 2]:
            self.tenant_hits[OTHERS] = self.tenant_hits.get(OTHERS, 0) + self.tenant_hits.pop(name)


class AccessClock:
    """Maps the access counter to time. At MAX_SAMPLES samples every other one is dropped and the interval doubles:
    1,024 samples cover 17 minutes by seconds, or 12 days by 17 minutes."""

    def __init__(self) -> None:
        self._accesses: list[int] = []
        self._times_ns: list[int] = []
        self._interval_ns = FIRST_INTERVAL_NS

    def sample(self, accesses: int, now_ns: int) -> None:
        """Record the counter's value now. Call it more often than once a second."""
        if self._times_ns and now_ns - self._times_ns[-1] < self._interval_ns:
            return
        self._accesses.append(accesses)
        self._times_ns.append(now_ns)
        if len(self._times_ns) >= MAX_SAMPLES:
            del self._accesses[1::2], self._times_ns[1::2]
            self._interval_ns *= 2

    def age_ns(self, access: int, now_ns: int) -> int:
        """Age of that access, from the sample before it."""
        at = max(0, bisect_right(self._accesses, access) - 1)
        return max(0, now_ns - self._times_ns[at]) if self._times_ns else 0


class NamespaceAccess(NamedTuple):
    """Time since the last read of a namespace."""

    tenant: str
    namespace: str
    age_s: float


class NamespaceReads:
    """Last reads by namespace. Not thread-safe: called from the node's loop."""

    def __init__(self) -> None:
        self._noted: set[BlockColumns] = set()
        self._last_ns: OrderedDict[tuple[str, str], int] = OrderedDict()
        """By tenant and namespace, the most recent last."""

    def note(self, block: Block) -> None:
        """Record a read, without its time."""
        self._noted.add(block.columns)

    def stamp(self, now_ns: int) -> None:
        """Assign the time `now_ns` to the reads since the last call."""
        for columns in self._noted:
            self._last_ns[columns.tenant, columns.namespace] = now_ns
            self._last_ns.move_to_end((columns.tenant, columns.namespace))
        self._noted.clear()
        while len(self._last_ns) > MAX_NAMESPACES:
            self._last_ns.popitem(last=False)

    def recent(self, now_ns: int) -> Iterator[NamespaceAccess]:
        """Iterate over namespaces by recency, the latest first."""
        return (NamespaceAccess(*name, max(0, now_ns - last_ns) / 1e9) for name, last_ns in reversed(self._last_ns.items()))


class BlockReads(NamedTuple):
    """Read rate of a block, and of it that of clients on other hosts."""

    block: Block
    reads_per_s: float
    remote_reads_per_s: float


class HotBlocks:
    """Misra-Gries counters of the most read blocks. Not thread-safe: called from the node's loop."""

    def __init__(self) -> None:
        self.is_counting = False
        self._counts: dict[Block, float] = {}
        self._far: dict[Block, float] = {}
        self._counted_s = 0.0
        """Aged time span that `_counts` covers, up to `_counted_to_ns`."""
        self._counted_to_ns = 0

    def read(self, blocks: Iterable[Block], *, is_far: bool) -> None:
        """Count reads, of other hosts if `is_far`. Call it only while `is_counting`."""
        self._counts = _counted(self._counts, blocks)
        if is_far:
            self._far = _counted(self._far, blocks)

    def hottest(self, most: int, now_ns: int) -> list[BlockReads]:
        """Return the `most` hottest blocks that still exist, the hottest first. The first call starts counting and
        returns none. `most` 0 is no poll."""
        elapsed_s = (now_ns - self._counted_to_ns) / 1e9
        if not most:
            if elapsed_s > IDLE_S:
                self._stop()
            return []
        if not self.is_counting:
            self.is_counting, self._counted_to_ns = True, now_ns
            return []
        if elapsed_s <= 0:
            return []
        self._counted_s += elapsed_s
        self._counted_to_ns = now_ns
        here = ((count, block) for block, count in self._counts.items() if not block.is_dropped)
        found = [
            BlockReads(block, count / self._counted_s, self._far.get(block, 0.0) / self._counted_s)
            for count, block in heapq.nlargest(most, here, key=lambda one: one[0])
        ]
        self._age(math.exp(-elapsed_s / SPAN_S))
        return found

    def _age(self, share: float) -> None:
        self._counted_s *= share
        self._counts = _aged(self._counts, share)
        self._far = _aged(self._far, share)

    def _stop(self) -> None:
        self.is_counting, self._counted_s = False, 0.0
        self._counts, self._far = {}, {}


def _counted(counts: dict[Block, float], blocks: Iterable[Block]) -> dict[Block, float]:
    """Return the counts with these reads, cut if there are too many."""
    for block in blocks:
        counts[block] = counts.get(block, 0.0) + 1.0
    if len(counts) <= 2 * MAX_COUNTED:
        return counts
    least = heapq.nlargest(MAX_COUNTED, counts.values())[-1]
    return {block: count - least for block, count in counts.items() if count > least}


def _aged(counts: dict[Block, float], share: float) -> dict[Block, float]:
    return {block: count * share for block, count in counts.items() if not block.is_dropped}
