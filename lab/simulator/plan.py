"""Plan of a simulation: how many instances in which mode, their caches, the SLOs; and what one instance can do. Values, checked.

A Machine is the scheduler's PrefillTime and DecodeTime, too: what is predicted then takes place, unless something interferes.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from kvstore.protocol.errors import ConfigError, InvalidArgument
from kvstore.scheduler.estimators.interface import DecodeTime, PrefillTime
from kvstore.scheduler.request import Slo

BLOCK_TOKENS: Final = 512
"""Of the trace format."""
MAX_INSTANCES: Final = 4096
MAX_FACTOR: Final = 1e9
"""The highest rate and interval; its inverse is the lowest. A simulation looks at its load the more often the longer it takes."""
MAX_BYTES_PER_S: Final = 1e18
"""Of an instance. Nothing sends or loads so fast, and what takes no time at all cannot be counted with."""


class Mode(Enum):
    """Who prefills and who decodes."""

    DISAGGREGATED = "disaggregated"
    """Each instance does one of both."""
    PREFILL_FIRST = "prefill-first"
    DECODE_FIRST = "decode-first"
    CHUNKED = "chunked"

    @property
    def is_coupled(self) -> bool:
        """Each instance does both."""
        return self is not Mode.DISAGGREGATED


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationPlan:
    """A cluster and its load. Raises InvalidArgument for what cannot be simulated."""

    mode: Mode = Mode.DISAGGREGATED
    prefill: int = 8
    decode: int = 8
    """Coupled, all of prefill + decode instances do both, so that modes are compared on the same GPUs."""
    cache_blocks: int = 10_000
    """Of each instance that computes prompts."""
    policy: str = "lru"
    rate: float = 1.0
    """2.0 makes the requests arrive twice as fast."""
    slo: Slo = Slo()
    """What counts as served in time."""
    enforced: Slo = Slo()
    """What the dispatcher rejects by: infinite where another decides, or nobody."""
    overlap: bool = True
    """The KV cache goes to the decode instance layer by layer during the prefill, not after it."""
    chunk_tokens: int = 512
    decision_s: float = 0.001
    """What a decision takes, from arrival to the prefill queue."""
    sample_s: float = 10.0
    """Between two looks at the load of the pools."""

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
        """All of them."""
        return self.prefill + self.decode


class InstanceTimes(PrefillTime, DecodeTime, Protocol):
    """Times and work of a model on a group of GPUs: analytic.py's AnalyticModel."""

    def step_s(self, *, new_tokens: int, prefix_tokens: int, batch: int, context_tokens: int) -> float:
        """Seconds of a step that computes `new_tokens` of a prompt after `prefix_tokens` and decodes a batch with them."""
        ...

    def prefill_flops(self, input_tokens: int, prefix_tokens: int) -> float:
        """Floating-point operations of what `prefill_s` times."""
        ...

    def decode_flops(self, batch: int, context_tokens: int) -> float:
        """Floating-point operations of what `tbt_s` times. Affine in the context."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceModel:
    """One instance: a group of GPUs with one copy of the model. Raises ConfigError where the model does not fit, InvalidArgument for a
    bandwidth that is none."""

    times: InstanceTimes
    layers: int
    kv_bytes_per_token: int
    capacity_tokens: int
    """Tokens of KV cache that its GPUs' memory holds beside the weights."""
    peak_flops_per_s: float
    """Of all its GPUs together: what MFU is a share of."""
    send_bytes_per_s: float
    load_bytes_per_s: float
    """From its DRAM to its GPUs' memory, over all of their PCIe links."""

    def __post_init__(self) -> None:
        if self.capacity_tokens < 1:
            raise ConfigError("the model does not fit in the GPUs of an instance with room for a KV cache: give it more or larger ones")
        for name in ("send_bytes_per_s", "load_bytes_per_s"):
            if not 1 <= getattr(self, name) <= MAX_BYTES_PER_S:
                raise InvalidArgument(f"{name} is {getattr(self, name):g}: it must be from 1 to {MAX_BYTES_PER_S:g}")

    def prefill_s(self, input_tokens: int, prefix_tokens: int) -> float:
        """Seconds to compute a prompt and load its prefix."""
        computed_s = self.times.prefill_s(input_tokens, prefix_tokens)
        return computed_s + self.load_s(prefix_tokens, computed_s=computed_s)

    def load_s(self, prefix_tokens: int, *, computed_s: float) -> float:
        """What loading a cached prefix from DRAM adds to a prefill of `computed_s` seconds.

        Layer i is computed while layer i + 1 is loaded. So where computing is slower, only the first layer's load shows; where it
        is faster, all of the load but what the computing of the layers before the last covers.
        """
        loaded_s = prefix_tokens * self.kv_bytes_per_token / self.load_bytes_per_s
        return max(loaded_s / self.layers, loaded_s - computed_s * (1 - 1 / self.layers))

    def tbt_s(self, batch: int, context_tokens: int) -> float:
        """Seconds for one token of each sequence."""
        return self.times.tbt_s(batch, context_tokens)
