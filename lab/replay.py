"""Replay of prompts through one eviction policy at one capacity, in a node's order of operations, without a node.

Order of a node: first all blocks of a prompt are read, and hits are touched. Then the missing blocks are stored together: victims are
evicted for all of them, then all become readable, in the order of the prompt. More missing blocks than the capacity are stored in several
rounds. No block of the prompt is protected meanwhile.

Published simulations store each missing block before the next lookup. With that order LRU gives the same ratios; LFU and SIEVE differ in
the fourth digit, because new blocks can evict each other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.kvcache.traces.mooncake import TraceRequest
from kvstore.protocol.errors import InvalidArgument
from kvstore.tiers.policies.by_name import make_policy

MAX_CAPACITY_BLOCKS: Final = 1 << 40
"""More than any trace has: a larger capacity is a typing error."""


@dataclass(slots=True)
class HitCounts:
    """Counters of a replay so far."""

    blocks: int = 0
    prefix_hits: int = 0
    """Cached blocks before a prompt's first miss: only these save an engine work."""
    hits: int = 0
    """Cached blocks, before or after a miss."""

    @property
    def prefix_hit_ratio(self) -> float:
        return self.prefix_hits / self.blocks if self.blocks else 0.0


class CacheReplay:
    """Replay through an initially empty cache of `capacity_blocks` blocks. `counts` may be read at any time."""

    def __init__(self, policy: str, capacity_blocks: int) -> None:
        """`policy` is a name of tiers/policies/by_name.py. Raises ConfigError for another."""
        self.counts = HitCounts()
        self._capacity = capacity_blocks
        self._now_s = 0.0
        self._policy = make_policy(policy, clock=lambda: self._now_s)
        # Kept independently of the policy's own keys, so that a faulty policy cannot distort the hits.
        self._resident: set[int] = set()

    def run(self, requests: Iterable[TraceRequest]) -> HitCounts:
        """Replay all requests in order, and return the counts."""
        for request in requests:
            self.request(request)
        return self.counts

    def request(self, request: TraceRequest) -> int:
        """Replay one prompt at its timestamp, or its predecessor's if that is later. Returns the number of prefix hits."""
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
        """Return the number of leading blocks in the cache. Not an access."""
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
            assert victim is not None, "the policy has keys but returned no victim"
            self._policy.remove(victim)
            self._resident.remove(victim)


def check_capacity(blocks: int) -> None:
    """Raise InvalidArgument unless the capacity is in [1, MAX_CAPACITY_BLOCKS]."""
    if not 1 <= blocks <= MAX_CAPACITY_BLOCKS:
        raise InvalidArgument(f"the capacity is {blocks} blocks: it must be from 1 to {MAX_CAPACITY_BLOCKS}")
