"""Strategies for a full KV cache, each an admission and a preemption strategy; the model of the server, and times of quantised caches.

Sources: the strategies reject, queue, evict, recompute and offload are those of the chapter "The KV cache", section 22.9. vLLM queues new
requests and recomputes preempted ones: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
SOSP 2023, section 4.5.

Quantised caches: a decode step reads the whole cache of its batch, and attention is bound by these reads. It needs (query heads / KV heads)
operations per byte of a 16-bit cache, 8 with Llama 3 70B, and the GPUs of estimators/gpus.py can do 95 or more. So half the bytes take half
the time. Prefill is compute-bound. Encoding and decoding are not counted, because kernels fuse them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from kvstore.protocol.errors import InvalidArgument
from kvstore.scheduler.estimators.interface import DecodeTime, PrefillTime


class AdmissionStrategy(Enum):
    """Treatment of a new request that does not fit."""

    REJECTED = "rejected"
    WAIT = "wait"
    DISPLACE = "displace"
    """It displaces the latest requests of the batch."""


class PreemptionStrategy(Enum):
    """Treatment of a request that is displaced in the middle of its response."""

    NONE = "none"
    """No displacement: the cache of the whole response is reserved before a request starts."""
    EVICTED = "evicted"
    RECOMPUTED = "recomputed"
    OFFLOADED = "offloaded"
    """Recomputed if no lower tier can hold its cache."""


@dataclass(frozen=True, slots=True)
class Strategy:
    name: str
    newcomers: AdmissionStrategy
    displaced: PreemptionStrategy


STRATEGIES: Final = (
    Strategy("reject", AdmissionStrategy.REJECTED, PreemptionStrategy.NONE),
    Strategy("queue", AdmissionStrategy.WAIT, PreemptionStrategy.NONE),
    Strategy("evict", AdmissionStrategy.DISPLACE, PreemptionStrategy.EVICTED),
    Strategy("recompute", AdmissionStrategy.DISPLACE, PreemptionStrategy.RECOMPUTED),
    Strategy("offload", AdmissionStrategy.DISPLACE, PreemptionStrategy.OFFLOADED),
    Strategy("queue+recompute", AdmissionStrategy.WAIT, PreemptionStrategy.RECOMPUTED),
)
"""The last one is vLLM's default."""


class Times(PrefillTime, DecodeTime, Protocol):
    """Prefill and decode times of the model on the server's GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerTier:
    """A tier for offloaded caches. Raises InvalidArgument for values out of range."""

    name: str
    capacity_bytes: int
    bytes_per_s: float
    """In each direction, all GPUs of the server together."""

    def __post_init__(self) -> None:
        if self.capacity_bytes < 0 or not self.bytes_per_s > 0:
            raise InvalidArgument(f"the tier {self.name} must have a capacity of 0 or more and a bandwidth above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingModel:
    """Parameters of the server."""

    times: Times
    cache_tokens: int
    """Capacity of the GPUs' KV cache."""
    kv_bytes_per_token: float
    lower_tiers: Sequence[LowerTier] = ()
    """In the order of use."""


class QuantisedTimes:
    """Times of a server whose cache takes `share` of the bytes that `times` assumes."""

    def __init__(self, times: Times, share: float) -> None:
        self._times, self._share = times, share

    def prefill_s(self, input_tokens: int, prefix_tokens: int) -> float:
        return self._times.prefill_s(input_tokens, prefix_tokens)

    def tbt_s(self, batch: int, context_tokens: int) -> float:
        return self._times.tbt_s(batch, round(context_tokens * self._share))
