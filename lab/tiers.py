"""Prompts through two tiers, DRAM and NVMe, by the rules of a node's block table. It moves no bytes: a copy is over as soon as it begins.

Puts land in DRAM. Above its high watermark DRAM demotes down to the low one, and when it is full, for a newcomer; a block that has a copy
in the other tier just leaves. A read touches every copy. The second hit in NVMe copies a block up if room can be had without a
demotion; the copy below stays. A node's copies take time: blocks on their way down are still in DRAM, and a put may wait for them.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.kvcache.traces.mooncake import TraceRequest
from kvstore.lab.replay import check_capacity
from kvstore.tiers.policies.by_name import make_policy

PROMOTE_AT_HITS: Final = 2
HIGH_WATERMARK: Final = 0.95
LOW_WATERMARK: Final = 0.90
"""All three as in a node, by default."""


@dataclass(slots=True)
class TieredCounts:
    """What was replayed so far. Hits are prefix hits: blocks before a prompt's first miss."""

    blocks: int = 0
    dram_hits: int = 0
    nvme_hits: int = 0
    demotions: int = 0
    promotions: int = 0
    evictions: int = 0
    """Blocks that left the node."""

    @property
    def hits(self) -> int:
        return self.dram_hits + self.nvme_hits

    @property
    def prefix_hit_ratio(self) -> float:
        return self.hits / self.blocks if self.blocks else 0.0


class _Level:
    """One tier: its copies, in the order of a policy of its own."""

    def __init__(self, tiers: "TwoTiers", policy: str, capacity_blocks: int) -> None:
        check_capacity(capacity_blocks)
        self.capacity = capacity_blocks
        self.policy = make_policy(policy, clock=lambda: tiers.now_s)
        self.resident: set[int] = set()
        self.taken = 0
        """Slots of blocks that are not readable here yet."""

    @property
    def used(self) -> int:
        return len(self.resident) + self.taken

    def add(self, block: int, parent: int | None) -> None:
        self.policy.insert(block, parent)
        self.resident.add(block)

    def drop(self, block: int) -> None:
        self.policy.remove(block)
        self.resident.remove(block)

    def victim(self) -> int:
        victim = self.policy.victim()
        assert victim is not None, "the policy has keys and names no victim"
        return int(victim)

    def relieve(self, leave: Callable[[int], bool]) -> None:
        """From the high watermark down to the low one, or until `leave` refuses a victim."""
        if self.used > HIGH_WATERMARK * self.capacity:
            while self.resident and self.used > LOW_WATERMARK * self.capacity and leave(self.victim()):
                pass


class TwoTiers:
    """A cold node with room for so many blocks in either tier, under one policy. `counts` may be read at any time."""

    def __init__(self, policy: str, *, dram_blocks: int, nvme_blocks: int) -> None:
        """Raises ConfigError for an unknown policy, InvalidArgument for a tier without room."""
        self.counts = TieredCounts()
        self.now_s = 0.0
        self._dram = _Level(self, policy, dram_blocks)
        self._nvme = _Level(self, policy, nvme_blocks)
        self._parents: dict[int, int | None] = {}
        """Of every block that is here."""
        self._hits: dict[int, int] = {}
        """Of a block since it was last copied."""

    def run(self, requests: Iterable[TraceRequest]) -> TieredCounts:
        """Replay all of them, in order; the counts."""
        for request in requests:
            self.request(request)
        return self.counts

    def request(self, request: TraceRequest) -> None:
        """Replay one prompt at its own time, or the one before's if that is later."""
        self.now_s = max(self.now_s, request.timestamp_ms / 1000)
        found = [block in self._parents for block in request.hash_ids]
        self.counts.blocks += len(found)
        for block in request.hash_ids[: found.index(False) if False in found else len(found)]:
            is_in_dram = block in self._dram.resident
            self.counts.dram_hits += is_in_dram
            self.counts.nvme_hits += not is_in_dram
        self._read([block for block, is_there in zip(request.hash_ids, found, strict=True) if is_there])
        missing: dict[int, int | None] = {}
        for block, parent, is_there in zip(request.hash_ids, (None, *request.hash_ids), found, strict=False):
            if not is_there:
                missing.setdefault(block, parent)
        self._store(list(missing.items()))

    def _read(self, blocks: Sequence[int]) -> None:
        """Touch every copy, and copy up what earned it once all are read. What is being read gives its slot to nobody."""
        rising: dict[int, None] = {}
        held: set[int] = set()
        for block in blocks:
            self._hits[block] += 1
            self._dram.policy.touch(block)
            self._nvme.policy.touch(block)
            held.add(block)
            is_below = block not in self._dram.resident and block not in rising
            if is_below and self._hits[block] >= PROMOTE_AT_HITS and self._has_room_at_once(held):
                rising[block] = None
                self._dram.taken += 1
        for block in rising:
            self._dram.add(block, self._parents[block])
            self._hits[block] = 0
        self._dram.taken = 0
        self.counts.promotions += len(rising)
        self._relieve()

    def _has_room_at_once(self, held: Container[int]) -> bool:
        """Whether DRAM has a slot, or can have one by dropping a copy."""
        if self._dram.used < self._dram.capacity:
            return True
        victim = self._dram.policy.victim(lambda block: block not in held)
        if victim is None or victim not in self._nvme.resident:
            return False
        self._dram.drop(victim)
        return True

    def _store(self, pending: Sequence[tuple[int, int | None]]) -> None:
        """Slots for all first, as far as they fit; then all become readable."""
        for start in range(0, len(pending), self._dram.capacity):
            part = pending[start : start + self._dram.capacity]
            for _ in range(self._dram.used + len(part) - self._dram.capacity):
                self._leave_dram(self._dram.victim())
            self._dram.taken = len(part)
            self._relieve()
            for block, parent in part:
                self._dram.add(block, parent)
                self._parents[block], self._hits[block] = parent, 0
            self._dram.taken = 0
            self._relieve()

    def _relieve(self) -> None:
        self._dram.relieve(self._leave_dram)
        self._nvme.relieve(self._drop_copy_below)

    def _leave_dram(self, block: int) -> bool:
        """Drop the copy, or demote it."""
        if block not in self._nvme.resident:
            if self._nvme.used == self._nvme.capacity:
                self._leave_nvme(self._nvme.victim())
            self._nvme.add(block, self._parents[block])
            self._hits[block] = 0
            self.counts.demotions += 1
        self._dram.drop(block)
        return True

    def _leave_nvme(self, block: int) -> None:
        self._nvme.drop(block)
        if block not in self._dram.resident:
            del self._parents[block], self._hits[block]
            self.counts.evictions += 1

    def _drop_copy_below(self, block: int) -> bool:
        """For a watermark a block leaves the lowest tier only if it is in DRAM too; otherwise False."""
        if block not in self._dram.resident:
            return False
        self._nvme.drop(block)
        return True
