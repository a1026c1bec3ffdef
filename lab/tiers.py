"""Replay of prompts through DRAM and NVMe by the rules of a node's block table. Copies are instantaneous.

Puts go to DRAM. Above the high watermark DRAM demotes blocks down to the low one, and when it is full, one per new
block; a block that NVMe has as well is only dropped. When NVMe is full, the demoted block or NVMe's next victim leaves,
whichever is worth less. The second hit in NVMe promotes a block if DRAM has a slot, or gets one by dropping a copy; the
copy in NVMe is then evicted first. In a node copies take time: blocks that are being demoted are still in DRAM, and a
put may wait for them.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.kvcache.traces.mooncake import TraceRequest
from kvstore.lab.replay import check_capacity
from kvstore.tiers.policies.by_name import make_family
from kvstore.tiers.policies.interface import PolicyFamily

PROMOTE_AT_HITS: Final = 2
HIGH_WATERMARK: Final = 0.95
LOW_WATERMARK: Final = 0.90
WRITE_WORTH: Final = 1.2
"""The four are a node's defaults."""


@dataclass(slots=True)
class TieredCounts:
    """Counters of a replay so far. Hits are prefix hits: blocks before a prompt's first miss."""

    blocks: int = 0
    dram_hits: int = 0
    nvme_hits: int = 0
    demotions: int = 0
    promotions: int = 0
    evictions: int = 0
    """Blocks that were dropped from both tiers."""

    @property
    def hits(self) -> int:
        return self.dram_hits + self.nvme_hits

    @property
    def prefix_hit_ratio(self) -> float:
        return self.hits / self.blocks if self.blocks else 0.0


class _Level:
    """One tier with its copies and its own policy."""

    def __init__(self, family: PolicyFamily[int], tier: int, capacity_blocks: int) -> None:
        check_capacity(capacity_blocks)
        self.capacity = capacity_blocks
        self.policy = family.policy(tier)
        self.resident: set[int] = set()
        self.duplicates: dict[int, None] = {}
        """Copies of blocks that are elsewhere, too, which are evicted first, the one read longest ago first: in NVMe those
        of promoted blocks, and secondary copies."""
        self.reserved = 0
        """Slots of blocks that are not readable yet."""

    @property
    def used(self) -> int:
        return len(self.resident) + self.reserved

    def add(self, block: int, parent: int | None) -> None:
        self.policy.insert(block, parent)
        self.resident.add(block)

    def drop(self, block: int) -> None:
        self.policy.remove(block)
        self.resident.remove(block)
        self.duplicates.pop(block, None)

    def touch(self, block: int) -> None:
        self.policy.touch(block)
        if block in self.duplicates:
            self.duplicates[block] = self.duplicates.pop(block)

    def victim(self) -> int:
        if self.duplicates:
            return next(iter(self.duplicates))
        victim = self.policy.victim()
        assert victim is not None, "the policy has keys but returned no victim"
        return int(victim)

    def reduce_to_low_watermark(self, remove: Callable[[int], bool]) -> None:
        """Above the high watermark, remove victims down to the low one, or until `remove` refuses one."""
        if self.used > HIGH_WATERMARK * self.capacity:
            while self.resident and self.used > LOW_WATERMARK * self.capacity and remove(self.victim()):
                pass


class TwoTiers:
    """Replay through an initially empty node with two tiers, under one policy. `counts` may be read at any time."""

    def __init__(
        self,
        policy: str,
        *,
        dram_blocks: int,
        nvme_blocks: int,
        clock: Callable[[], float] | None = None,
        on_left: Callable[[int], None] = lambda block: None,
    ) -> None:
        """`clock` is the policy's, by default the time of the prompt; `on_left` is called for each block that has left both
        tiers. Raises ConfigError for an unknown policy, InvalidArgument for a capacity out of range."""
        self.counts = TieredCounts()
        self.now_s = 0.0
        self.family = make_family(policy, clock=clock or (lambda: self.now_s))
        self._on_left = on_left
        self._dram = _Level(self.family, 1, dram_blocks)
        self._nvme = _Level(self.family, 2, nvme_blocks)
        self._secondary: set[int] = set()
        """Blocks that are only dropped, since another node keeps them."""
        self._parents: dict[int, int | None] = {}
        """Block -> parent, for every resident block."""
        self._hits: dict[int, int] = {}
        """Block -> hits since it was last copied."""

    def run(self, requests: Iterable[TraceRequest]) -> TieredCounts:
        """Replay all requests in order, and return the counts."""
        for request in requests:
            self.request(request)
        return self.counts

    def request(self, request: TraceRequest) -> None:
        """Replay one prompt at its timestamp, or its predecessor's if that is later."""
        self.now_s = max(self.now_s, request.timestamp_ms / 1000)
        found = [block in self._parents for block in request.hash_ids]
        self.counts.blocks += len(found)
        for block in request.hash_ids[: found.index(False) if False in found else len(found)]:
            is_in_dram = block in self._dram.resident
            self.counts.dram_hits += is_in_dram
            self.counts.nvme_hits += not is_in_dram
        self.read([block for block, is_there in zip(request.hash_ids, found, strict=True) if is_there])
        missing: dict[int, int | None] = {}
        for block, parent, is_there in zip(request.hash_ids, (None, *request.hash_ids), found, strict=False):
            if not is_there:
                missing.setdefault(block, parent)
        pending = list(missing.items())
        for start in range(0, len(pending), self._dram.capacity):
            part = pending[start : start + self._dram.capacity]
            self.make_room(len(part))
            for block, parent in part:
                self.add(block, parent)
            self.settle()

    def holds(self, block: int) -> bool:
        return block in self._parents

    @property
    def used_blocks(self) -> int:
        """Used slots of both tiers."""
        return self._dram.used + self._nvme.used

    def read(self, blocks: Sequence[int]) -> None:
        """Touch every copy, then promote blocks that reached PROMOTE_AT_HITS. Blocks that are being read are not dropped."""
        promoted: dict[int, None] = {}
        held: set[int] = set()
        for block in blocks:
            self._hits[block] += 1
            self._dram.touch(block)
            self._nvme.touch(block)
            held.add(block)
            is_below = block not in self._dram.resident and block not in promoted
            if is_below and self._hits[block] >= PROMOTE_AT_HITS and self._free_dram_slot(held):
                promoted[block] = None
                self._dram.reserved += 1
        for block in promoted:
            self._dram.add(block, self._parents[block])
            self._nvme.duplicates[block] = None
            if block in self._secondary:
                self._dram.duplicates[block] = None
            self._hits[block] = 0
        self._dram.reserved = 0
        self.counts.promotions += len(promoted)
        self._apply_watermarks()

    def _free_dram_slot(self, held: Container[int]) -> bool:
        """Return whether DRAM has a free slot, after dropping a copy that NVMe has as well, if needed."""
        if self._dram.used < self._dram.capacity:
            return True
        victim = self._dram.policy.victim(lambda block: block not in held)
        if victim is None or victim not in self._nvme.resident:
            return False
        self._dram.drop(victim)
        self._nvme.duplicates.pop(victim, None)
        return True

    def make_room(self, count: int) -> None:
        """Reserve slots of DRAM, at most all, for `add`."""
        for _ in range(self._dram.used + count - self._dram.capacity):
            self._demote(self._dram.victim())
        self._dram.reserved = count
        self._apply_watermarks()

    def add(self, block: int, parent: int | None) -> None:
        """Put a block, which the node does not hold, into a slot reserved by `make_room`."""
        self._dram.add(block, parent)
        self._parents[block], self._hits[block] = parent, 0

    def settle(self) -> None:
        """End the puts into the slots of `make_room`."""
        self._dram.reserved = 0
        self._apply_watermarks()

    def mark_secondary(self, block: int) -> None:
        """Another node keeps the block: its copies here are dropped first, and not demoted."""
        self._secondary.add(block)
        for level in (self._dram, self._nvme):
            if block in level.resident:
                level.duplicates[block] = None

    def _apply_watermarks(self) -> None:
        self._dram.reduce_to_low_watermark(self._demote)
        self._nvme.reduce_to_low_watermark(self._drop_copy_below)

    def _demote(self, block: int) -> bool:
        """Remove a block from DRAM, after a copy to NVMe if it has none there and is worth it."""
        if block in self._nvme.resident:
            if block not in self._secondary:
                self._nvme.duplicates.pop(block, None)
        elif block in self._secondary or self._is_worth_less(block):
            self._leave(block)
        else:
            if self._nvme.used == self._nvme.capacity:
                self._evict(self._nvme.victim())
            self._nvme.add(block, self._parents[block])
            self._hits[block] = 0
            self.counts.demotions += 1
        self._dram.drop(block)
        return True

    def _leave(self, block: int) -> None:
        del self._parents[block], self._hits[block]
        self._secondary.discard(block)
        self.counts.evictions += 1
        self._on_left(block)

    def _is_worth_less(self, block: int) -> bool:
        """Return True if NVMe is full and a block of DRAM is not worth a write that evicts its next victim."""
        if self._nvme.used < self._nvme.capacity or (victim := self._nvme.victim()) in self._nvme.duplicates:
            return False
        # Of blocks of one class and age the newer stays.
        gained, lost = self._dram.policy.worth(block), self._nvme.policy.worth(victim)
        return gained is not None and lost is not None and gained != lost and gained <= WRITE_WORTH * lost

    def _evict(self, block: int) -> None:
        self._nvme.drop(block)
        if block not in self._dram.resident:
            self._leave(block)

    def _drop_copy_below(self, block: int) -> bool:
        """Drop a block from NVMe if DRAM or another node has it as well; otherwise return False: watermarks evict no last
        copy."""
        if block not in self._dram.resident and block not in self._secondary:
            return False
        self._evict(block)
        return True
