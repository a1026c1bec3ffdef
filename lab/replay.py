"""Prompts through one eviction policy at one capacity, in the order in which a node goes about it. It moves no bytes and starts no node.

The order of a node: all blocks of a prompt are read first, present ones being touched. Then the missing ones are stored together: a victim
leaves for each, and only when all have their slots do they become readable, each after the block before it in the prompt. More
missing blocks than the tier holds go in several such rounds. No block of the prompt is protected meanwhile.

Against an order that stores each missing block before it looks at the next (as published simulations do) LRU gives the same ratios, and
LFU and SIEVE differ in the fourth digit: their newcomers can be each other's victims there.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.kvcache.traces.mooncake import TraceRequest
from kvstore.protocol.errors import InvalidArgument
from kvstore.tiers.policies.by_name import make_policy

MAX_CAPACITY_BLOCKS: Final = 1 << 40
"""Beyond any trace: a capacity above it is a slip of the keyboard."""


@dataclass(slots=True)
class HitCounts:
    """What was replayed so far."""

    blocks: int = 0
    prefix_hits: int = 0
    """Blocks before a prompt's first miss: only they spare an engine its work."""
    hits: int = 0
    """Blocks that were there, before or after a miss."""

    @property
    def prefix_hit_ratio(self) -> float:
        return self.prefix_hits / self.blocks if self.blocks else 0.0


class CacheReplay:
    """One cold cache of `capacity_blocks` blocks under one policy. `counts` may be read at any time."""

    def __init__(self, policy: str, capacity_blocks: int) -> None:
        """`policy` is a name that tiers/policies/by_name.py knows. Raises ConfigError for another."""
        self.counts = HitCounts()
        self._capacity = capacity_blocks
        self._now_s = 0.0
        self._policy = make_policy(policy, clock=lambda: self._now_s)
        # Beside the policy's own record of its keys: what is resident must not depend on what is measured.
        self._resident: set[int] = set()

    def run(self, requests: Iterable[TraceRequest]) -> HitCounts:
        """Replay all of them, in order; the counts."""
        for request in requests:
            self.request(request)
        return self.counts

    def request(self, request: TraceRequest) -> int:
        """Replay one prompt at its own time, or the one before's if that is later; how many of its first blocks were there."""
        self._now_s = max(self._now_s, request.timestamp_ms / 1000)
        resident, touch = self._resident, self._policy.touch
        found = [block in resident for block in request.hash_ids]
        lead = found.index(False) if False in found else len(found)
        for block, is_there in zip(request.hash_ids, found, strict=True):
            if is_there:
                touch(block)
        self.counts.blocks += len(found)
        self.counts.prefix_hits += lead
        self.counts.hits += sum(found)
        if lead < len(found):
            self._store(request.hash_ids, found)
        return lead

    def leading_run(self, blocks: Sequence[int]) -> int:
        """How many of the first blocks are there; not an access."""
        return next((index for index, block in enumerate(blocks) if block not in self._resident), len(blocks))

    def _store(self, blocks: Sequence[int], found: Sequence[bool]) -> None:
        missing: dict[int, int | None] = {}
        for block, parent, is_there in zip(blocks, (None, *blocks), found, strict=False):
            if not is_there:
                missing.setdefault(block, parent)
        pending = list(missing.items())
        for start in range(0, len(pending), self._capacity):
            part = pending[start : start + self._capacity]
            self._evict(len(self._resident) + len(part) - self._capacity)
            for block, parent in part:
                self._policy.insert(block, parent)
                self._resident.add(block)

    def _evict(self, count: int) -> None:
        for _ in range(count):
            victim = self._policy.victim()
            assert victim is not None, "the policy has keys and names no victim"
            self._policy.remove(victim)
            self._resident.remove(victim)


def check_capacity(blocks: int) -> None:
    """Raises InvalidArgument unless it is a number of blocks that a cache can have."""
    if not 1 <= blocks <= MAX_CAPACITY_BLOCKS:
        raise InvalidArgument(f"a capacity of {blocks} blocks: it must be from 1 to {MAX_CAPACITY_BLOCKS}")
