"""What one simulated instance can do: the times its model says, its memory, its rails. Values and arithmetic.

It is the scheduler's PrefillTime and DecodeTime too, so what is foreseen is what then takes place unless something interferes.
"""

from dataclasses import dataclass
from typing import Final, Protocol

from kvstore.protocol.errors import ConfigError, InvalidArgument
from kvstore.scheduler.estimators.interface import DecodeTime, PrefillTime

MAX_BYTES_PER_S: Final = 1e18
"""Of an instance. Nothing sends or loads so fast, and what takes no time at all cannot be counted with."""


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
class Machine:
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
