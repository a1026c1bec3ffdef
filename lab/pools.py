"""Comparison of one shared pool with a private cache per instance, under simple routing without a scheduler.

Private caches lose hits when the next turn of a conversation is routed to another instance. Round robin and random routing mostly do that;
cache-aware routing finds the instance with the blocks, and loses little unless that one is busy.

Measured on the public conversation trace, with LRU and 3M tokens (5,859 blocks of 512) per instance: the pool has 2.36 times the prefix
hits of four instances under round robin, 3.4 times with ten, and 1.1 to 1.2 times under cache-aware routing. Published: 2.22 for this
trace, 1.4 to 2.4 over three traces, without the routing; a few instances with cache-unaware routing come closest.
Source: Qin et al., Mooncake, FAST'25.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Final

from kvstore.kvcache.traces.mooncake import TraceRequest
from kvstore.lab.replay import CacheReplay, HitCounts
from kvstore.protocol.errors import InvalidArgument

MAX_INSTANCES: Final = 4096
PREFILL_S_PER_BLOCK: Final = 0.06
"""512 tokens of a 70B model on 8 x A800 at half of peak: l (4 n^2 d + 22 n d^2) = 1.8e15 operations for the trace's average prompt of
23.5 blocks (l = 80, d = 8192), at 1.25e15 per second. Source: Mooncake, FAST'25, and GPU data sheet."""


class Routing(Enum):
    """Assignment of prompts to instances."""

    ROUND_ROBIN = "round_robin"
    RANDOM = "random"
    CACHE_AWARE = "cache_aware"
    """To the instance that would finish first, counting its queue and the prefill of blocks that it lacks."""


@dataclass(frozen=True, slots=True)
class PoolComparison:
    """Hits of one policy, summed over all instances."""

    pooled: HitCounts
    """Of one cache with the capacity of all instances."""
    local: HitCounts

    @property
    def gain(self) -> float | None:
        """Prefix hits of the pool over those of the local caches; None if those had none."""
        return self.pooled.prefix_hits / self.local.prefix_hits if self.local.prefix_hits else None


def compare(
    requests: Sequence[TraceRequest], *, policy: str, instances: int, blocks_per_instance: int, routing: Routing, seed: int = 0
) -> PoolComparison:
    """Replay the prompts through the pool and through the local caches.

    Raises InvalidArgument for a number of instances outside [1, MAX_INSTANCES], ConfigError for an unknown policy.
    """
    if not 1 <= instances <= MAX_INSTANCES:
        raise InvalidArgument(f"instances is {instances}: it must be from 1 to {MAX_INSTANCES}")
    caches = [CacheReplay(policy, blocks_per_instance) for _ in range(instances)]
    router = _PromptRouter(caches, routing, seed)
    for request in requests:
        router.route(request)
    local = HitCounts()
    for cache in caches:
        local.blocks += cache.counts.blocks
        local.prefix_hits += cache.counts.prefix_hits
        local.hits += cache.counts.hits
    return PoolComparison(CacheReplay(policy, instances * blocks_per_instance).run(requests), local)


class _PromptRouter:
    """Routes prompts to the local caches."""

    def __init__(self, caches: Sequence[CacheReplay], routing: Routing, seed: int) -> None:
        self._caches = caches
        self._routing = routing
        self._random = Random(seed)
        self._next = 0
        self._idle_from_s = [0.0] * len(caches)

    def route(self, request: TraceRequest) -> None:
        index = self._pick(request)
        now_s = request.timestamp_ms / 1000
        work_s = (len(request.hash_ids) - self._caches[index].request(request)) * PREFILL_S_PER_BLOCK
        self._idle_from_s[index] = max(self._idle_from_s[index], now_s) + work_s

    def _pick(self, request: TraceRequest) -> int:
        if self._routing is Routing.RANDOM:
            return self._random.randrange(len(self._caches))
        if self._routing is Routing.ROUND_ROBIN:
            self._next += 1
            return (self._next - 1) % len(self._caches)
        now_s = request.timestamp_ms / 1000

        def done_s(index: int) -> float:
            saved_s = self._caches[index].leading_run(request.hash_ids) * PREFILL_S_PER_BLOCK
            return max(self._idle_from_s[index], now_s) - saved_s

        return min(range(len(self._caches)), key=done_s)
