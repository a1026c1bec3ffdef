"""What a server may do when its KV cache is full and a request comes in, as two choices each; and what they need to know of the server.

Source: the five strategies are those of the chapter "The KV cache", section 22.9 (reject, queue, evict, recompute, offload). That vLLM lets
new requests wait, and recomputes those in its batch that find no room to grow: Kwon et al., "Efficient Memory Management for Large Language
Model Serving with PagedAttention", SOSP 2023, section 4.5.

Times of a server that keeps its KV cache in fewer bits than the model computes in. It measures nothing.

A decode step reads the whole cache of its batch, and reading bounds its attention: that needs (query heads / KV heads) operations for a
byte of a cache of 16 bits, 8 with Llama 3 70B, and the GPUs of estimators/gpus.py can do 95 or more. So half the bytes are half the time.
Prefill is bound by computing. What encoding and decoding take is not counted: kernels fuse it with what they do anyway.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from kvstore.protocol.errors import InvalidArgument
from kvstore.scheduler.estimators.interface import DecodeTime, PrefillTime


class AdmissionStrategy(Enum):
    """What becomes of a request for which there is no room."""

    REJECTED = "rejected"
    WAIT = "wait"
    DISPLACE = "displace"
    """It takes the room of those that came last before it."""


class PreemptionStrategy(Enum):
    """What becomes of a request that loses its room in the middle of its answer."""

    NOBODY = "nobody"
    """There is none: room for the whole answer is set aside before a request starts."""
    EVICTED = "evicted"
    RECOMPUTED = "recomputed"
    OFFLOADED = "offloaded"
    """Or recomputed, if no tier below has room for its cache."""


@dataclass(frozen=True, slots=True)
class Strategy:
    name: str
    newcomers: AdmissionStrategy
    displaced: PreemptionStrategy


STRATEGIES: Final = (
    Strategy("reject", AdmissionStrategy.REJECTED, PreemptionStrategy.NOBODY),
    Strategy("queue", AdmissionStrategy.WAIT, PreemptionStrategy.NOBODY),
    Strategy("evict", AdmissionStrategy.DISPLACE, PreemptionStrategy.EVICTED),
    Strategy("recompute", AdmissionStrategy.DISPLACE, PreemptionStrategy.RECOMPUTED),
    Strategy("offload", AdmissionStrategy.DISPLACE, PreemptionStrategy.OFFLOADED),
    Strategy("queue+recompute", AdmissionStrategy.WAIT, PreemptionStrategy.RECOMPUTED),
)
"""The last is a combination: what vLLM does unless told otherwise."""


class Times(PrefillTime, DecodeTime, Protocol):
    """Of the model on the server's GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerTier:
    """Where caches are offloaded to. Raises InvalidArgument for a figure that cannot be."""

    name: str
    capacity_bytes: int
    bytes_per_s: float
    """In either direction, over all GPUs of the server."""

    def __post_init__(self) -> None:
        if self.capacity_bytes < 0 or not self.bytes_per_s > 0:
            raise InvalidArgument(f"the tier {self.name} must have a capacity of 0 or more and a bandwidth above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingModel:
    """What serves the users."""

    times: Times
    cache_tokens: int
    """Tokens of KV cache that its GPUs have room for."""
    kv_bytes_per_token: float
    lower_tiers: Sequence[LowerTier] = ()
    """In the order in which they are filled."""


class QuantisedTimes:
    """Times (strategies.py) of `times` with a cache of `share` as many bytes."""

    def __init__(self, times: Times, share: float) -> None:
        self._times, self._share = times, share

    def prefill_s(self, input_tokens: int, prefix_tokens: int) -> float:
        return self._times.prefill_s(input_tokens, prefix_tokens)

    def tbt_s(self, batch: int, context_tokens: int) -> float:
        return self._times.tbt_s(batch, round(context_tokens * self._share))
