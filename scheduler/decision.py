"""What a scheduler answers. Values; indexes are into the sequences of instances that it was given."""

from dataclasses import dataclass
from enum import Enum


class Reason(Enum):
    """Why a request was rejected."""

    TTFT = "ttft"
    """No prefill instance would make its first token in time."""
    TBT = "tbt"
    """No decode instance would make the others in time."""
    CAPACITY = "capacity"
    """No decode instance has room for its KV cache."""
    PREFILL_LOAD = "prefill_load"
    """Early rejection: the prefill pool is loaded above what is allowed."""
    DECODE_LOAD = "decode_load"
    """Early rejection: the decode pool is, or will be when the prefill is over."""
    NO_INSTANCE = "no_instance"
    """There is nothing to send it to."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The request goes to prefill[`prefill`], then to decode[`decode`]."""

    prefill: int
    decode: int
    prefix_blocks: int
    """Blocks of the prompt that will not be computed."""
    transfer_from: int | None
    """The prefill instance that `transfer_blocks` of them are fetched from first: those after the ones that are there. None: nothing."""
    transfer_blocks: int
    transfer_s: float
    queue_s: float
    prefill_s: float
    tbt_s: float

    @property
    def ttft_s(self) -> float:
        """Predicted seconds to the first token: what is fetched comes while the request waits for its turn."""
        return max(self.transfer_s, self.queue_s) + self.prefill_s


@dataclass(frozen=True, slots=True)
class Rejection:
    """The request goes nowhere. `value` is what was predicted and `limit` what it had to stay below, in the reason's unit."""

    reason: Reason
    value: float = 0.0
    limit: float = 0.0
