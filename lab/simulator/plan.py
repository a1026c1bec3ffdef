"""Inputs of a simulation: the plan (instances, mode, caches, SLOs) and the model of one instance, both validated.

InstanceModel is also the scheduler's PrefillTime and DecodeTime, so its estimates are exact unless requests interfere.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from kvstore.protocol.errors import ConfigError, InvalidArgument
from kvstore.scheduler.estimators.interface import DecodeTime, PrefillTime
from kvstore.scheduler.request import Slo

BLOCK_TOKENS: Final = 512
"""Tokens per block of the trace format."""
MAX_INSTANCES: Final = 4096
MAX_FACTOR: Final = 1e9
"""Highest rate; its inverse is the lowest. Bounds the simulated time, and with it the number of samples."""
MAX_BYTES_PER_S: Final = 1e18
"""Highest bandwidth of an instance; keeps durations above 0."""


class Mode(Enum):
    """Assignment of prefill and decode to instances."""

    DISAGGREGATED = "disaggregated"
    """Each instance either prefills or decodes."""
    PREFILL_FIRST = "prefill-first"
    DECODE_FIRST = "decode-first"
    CHUNKED = "chunked"

    @property
    def is_coupled(self) -> bool:
        """True if each instance prefills and decodes."""
        return self is not Mode.DISAGGREGATED


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationPlan:
    """A cluster and its load. Raises InvalidArgument for values out of range."""

    mode: Mode = Mode.DISAGGREGATED
    prefill: int = 8
    decode: int = 8
    """In coupled modes prefill + decode instances do both, so that modes are compared on the same GPUs."""
    cache_blocks: int = 10_000
    """Per prefill instance."""
    policy: str = "lru"
    rate: float = 1.0
    """Factor of the arrival rate: 2.0 doubles it."""
    slo: Slo = Slo()
    """SLO that defines goodput."""
    enforced: Slo = Slo()
    """SLO by which the dispatcher rejects; infinite if only the admission policy rejects."""
    overlap: bool = True
    """Stream the KV cache layer by layer during the prefill, not after it."""
    chunk_tokens: int = 512
    decision_s: float = 0.001
    """Time of a scheduling decision."""
    sample_s: float = 10.0
    """Interval of load samples."""

    def __post_init__(self) -> None:
        for name, low, high in (("prefill", 1, MAX_INSTANCES), ("decode", 1, MAX_INSTANCES), ("chunk_tokens", 1, 1 << 20)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise InvalidArgument(f"{name} is {value}: it must be from {low:,} to {high:,}")
        if self.cache_blocks < 0:
            raise InvalidArgument(f"cache_blocks is {self.cache_blocks}: it must be 0 or more")
        if not 1 / MAX_FACTOR <= self.rate <= MAX_FACTOR:
            raise InvalidArgument(f"rate is {self.rate:g}: it must be from {1 / MAX_FACTOR:g} to {MAX_FACTOR:g}")

    @property
    def instances(self) -> int:
        """Number of instances."""
        return self.prefill + self.decode


class InstanceTimes(PrefillTime, DecodeTime, Protocol):
    """Times and work of a model on a group of GPUs, as AnalyticModel has them."""

    def step_s(self, *, new_tokens: int, prefix_tokens: int, batch: int, context_tokens: int) -> float:
        """Return the seconds of a step that prefills `new_tokens` after `prefix_tokens` and decodes a batch."""
        ...

    def prefill_flops(self, input_tokens: int, prefix_tokens: int) -> float:
        """Return the floating-point operations of `prefill_s`."""
        ...

    def decode_flops(self, batch: int, context_tokens: int) -> float:
        """Return the floating-point operations of `tbt_s`. Affine in the context."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceModel:
    """One instance: a group of GPUs with one copy of the model.

    Raises ConfigError if the model does not fit, InvalidArgument for a bandwidth out of range.
    """

    times: InstanceTimes
    layers: int
    kv_bytes_per_token: int
    capacity_tokens: int
    """KV cache that fits in its GPUs' memory beside the weights."""
    peak_flops_per_s: float
    """Of all its GPUs; the base of MFU."""
    send_bytes_per_s: float
    load_bytes_per_s: float
    """From DRAM to GPU memory, all PCIe links together."""

    def __post_init__(self) -> None:
        if self.capacity_tokens < 1:
            raise ConfigError("the model leaves no GPU memory of an instance for KV cache: use more or larger GPUs")
        for name in ("send_bytes_per_s", "load_bytes_per_s"):
            if not 1 <= getattr(self, name) <= MAX_BYTES_PER_S:
                raise InvalidArgument(f"{name} is {getattr(self, name):g}: it must be from 1 to {MAX_BYTES_PER_S:g}")

    def prefill_s(self, input_tokens: int, prefix_tokens: int) -> float:
        """Return the seconds to compute a prompt and load its prefix."""
        computed_s = self.times.prefill_s(input_tokens, prefix_tokens)
        return computed_s + self.load_s(prefix_tokens, computed_s=computed_s)

    def load_s(self, prefix_tokens: int, *, computed_s: float) -> float:
        """Return the seconds that loading a cached prefix from DRAM adds to a prefill of `computed_s` seconds.

        Layer i is computed while layer i + 1 is loaded. If computing is slower, only the load of the first layer adds time. If it is
        faster, the load adds its time less the computing of all layers but the last.
        """
        loaded_s = prefix_tokens * self.kv_bytes_per_token / self.load_bytes_per_s
        return max(loaded_s / self.layers, loaded_s - computed_s * (1 - 1 / self.layers))

    def tbt_s(self, batch: int, context_tokens: int) -> float:
        """Return the seconds of a decode step."""
        return self.times.tbt_s(batch, context_tokens)
