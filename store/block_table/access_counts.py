"""Counters of a node: hits and evictions by tier, ages of accesses, last reads of namespaces, and the blocks that are read most.

The hottest blocks are counted only while a master asks, in bounded memory: Misra and Gries' counters, a batch at a time. When twice
`MAX_COUNTED` blocks have one, the count of the `MAX_COUNTED`th goes off all of them, and a block that has nothing left goes. So a count is
never too high, and too low by one in `MAX_COUNTED` of all reads at most; a read costs O(1) on average. With each question counts are aged,
so that they stand for the last `SPAN_S`. Reads from other hosts are counted by themselves as well. Sans-I/O; `now_ns` is passed in.

Source: J. Misra and D. Gries, "Finding Repeated Elements", 1982; in batches: D. Anderson et al., "A High-Performance Algorithm for
Identifying Frequent Items in Data Streams", 2017.
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
"""Told apart in the counts of hits; those with the fewest go together under OTHERS."""

OTHERS: Final = "(others)"

MAX_SAMPLES: Final = 1024

FIRST_INTERVAL_NS: Final = 1_000_000_000

MAX_TOLD: Final = 256
"""Namespaces that are known and told: those that were read last."""

MAX_COUNTED: Final = 1024
"""Blocks that keep a counter; twice as many have one between two cuts: 300 kB, and as much for reads from other hosts."""

SPAN_S: Final = 60.0
"""A read counts for 1/e after this."""

IDLE_S: Final = 30.0
"""Nobody has asked for so long: nothing is counted any more."""


@dataclass(slots=True)
class TierCounts:
    """Since the node started."""

    hits: int = 0
    evictions: int = 0
    """Blocks that left the node from this tier."""
    table_evictions: int = 0
    """Of these, those that left because no more blocks may be known."""
    quota_evictions: int = 0
    """Of these, those that left because their tenant has all that its quota gives it."""
    demotions: int = 0
    promotions: int = 0
    tenant_hits: MutableMapping[str, int] = field(default_factory=dict)
    evicted: list[int] = field(default_factory=list)
    """When each block that was evicted lately had been read last, in accesses: for whoever counts ages, who takes them."""

    def hit(self, tenant: str, count: int = 1) -> None:
        self.hits += count
        self.tenant_hits[tenant] = self.tenant_hits.get(tenant, 0) + count

    def evict(self, last_access: int) -> None:
        self.evictions += 1
        self.evicted.append(last_access)

    def evict_all(self, last_accesses: Sequence[int]) -> None:
        self.evictions += len(last_accesses)
        self.evicted += last_accesses

    def tidy(self) -> None:
        """Keep no more than MAX_TENANTS tenants: inventing names is to grow nothing for long."""
        if len(self.tenant_hits) <= MAX_TENANTS:
            return
        fewest = sorted((name for name in self.tenant_hits if name != OTHERS), key=self.tenant_hits.__getitem__)
        for name in fewest[: len(fewest) - MAX_TENANTS // 2]:
            self.tenant_hits[OTHERS] = self.tenant_hits.get(OTHERS, 0) + self.tenant_hits.pop(name)


class AccessClock:
    """From a count of accesses to the time when there were so many, to within an interval that grows with what is remembered: each time
    MAX_SAMPLES are reached every other one is dropped, so that 1024 of them reach back 17 minutes by seconds, or 12 days by 17 minutes."""

    def __init__(self) -> None:
        self._accesses: list[int] = []
        self._times_ns: list[int] = []
        self._interval_ns = FIRST_INTERVAL_NS

    def sample(self, accesses: int, now_ns: int) -> None:
        """There are so many accesses now. To be called more often than each second."""
        if self._times_ns and now_ns - self._times_ns[-1] < self._interval_ns:
            return
        self._accesses.append(accesses)
        self._times_ns.append(now_ns)
        if len(self._times_ns) >= MAX_SAMPLES:
            del self._accesses[1::2], self._times_ns[1::2]
            self._interval_ns *= 2

    def age_ns(self, access: int, now_ns: int) -> int:
        """How long ago that access was: from the sample before it on."""
        at = max(0, bisect_right(self._accesses, access) - 1)
        return max(0, now_ns - self._times_ns[at]) if self._times_ns else 0


class NamespaceAccess(NamedTuple):
    tenant: str
    namespace: str
    age_s: float


class NamespaceReads:
    """Not thread-safe: the node's loop is the only caller."""

    def __init__(self) -> None:
        self._noted: set[BlockColumns] = set()
        self._last_ns: OrderedDict[tuple[str, str], int] = OrderedDict()
        """By tenant and namespace, the one read last behind the others."""

    def note(self, block: Block) -> None:
        """A reader was given the block."""
        self._noted.add(block.columns)

    def stamp(self, now_ns: int) -> None:
        """What was noted was read now."""
        for columns in self._noted:
            self._last_ns[columns.tenant, columns.namespace] = now_ns
            self._last_ns.move_to_end((columns.tenant, columns.namespace))
        self._noted.clear()
        while len(self._last_ns) > MAX_TOLD:
            self._last_ns.popitem(last=False)

    def told(self, now_ns: int) -> Iterator[NamespaceAccess]:
        """The namespaces that were read, the last one first."""
        return (NamespaceAccess(*name, max(0, now_ns - last_ns) / 1e9) for name, last_ns in reversed(self._last_ns.items()))


class BlockReads(NamedTuple):
    """How often clients read a block, and of that those of other hosts."""

    block: Block
    reads_per_s: float
    remote_reads_per_s: float


class HotBlocks:
    """Not thread-safe: the node's loop is the only caller."""

    def __init__(self) -> None:
        self.is_counting = False
        self._counts: dict[Block, float] = {}
        self._far: dict[Block, float] = {}
        self._counted_s = 0.0
        """What `_counts` stand for, aged as they are, up to `_told_ns`."""
        self._told_ns = 0

    def read(self, blocks: Iterable[Block], *, is_far: bool) -> None:
        """Clients were given these, of other hosts where `is_far`. While it is counting only."""
        self._counts = _counted(self._counts, blocks)
        if is_far:
            self._far = _counted(self._far, blocks)

    def told(self, most: int, now_ns: int) -> list[BlockReads]:
        """The `most` that are read most and still here, the hottest first; nothing when it begins to count. 0: nobody asks."""
        elapsed_s = (now_ns - self._told_ns) / 1e9
        if not most:
            if elapsed_s > IDLE_S:
                self._stop()
            return []
        if not self.is_counting:
            self.is_counting, self._told_ns = True, now_ns
            return []
        if elapsed_s <= 0:
            return []
        self._counted_s += elapsed_s
        self._told_ns = now_ns
        here = ((count, block) for block, count in self._counts.items() if not block.is_gone)
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
    """The counts with these reads, cut where they had become too many."""
    for block in blocks:
        counts[block] = counts.get(block, 0.0) + 1.0
    if len(counts) <= 2 * MAX_COUNTED:
        return counts
    least = heapq.nlargest(MAX_COUNTED, counts.values())[-1]
    return {block: count - least for block, count in counts.items() if count > least}


def _aged(counts: dict[Block, float], share: float) -> dict[Block, float]:
    return {block: count * share for block, count in counts.items() if not block.is_gone}
