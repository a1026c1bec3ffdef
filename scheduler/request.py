"""A request as a scheduler sees it, the instances that it may go to, and the decision. Values; they decide nothing.

Indexes of a decision are into the sequences of instances that the scheduler was given. The simulator or live reports fill the instances.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvstore.protocol.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Slo:
    """What was promised: time to first token, and time between tokens. Both in seconds; infinite where nothing was."""

    ttft_s: float = float("inf")
    tbt_s: float = float("inf")

    def __post_init__(self) -> None:
        """Raises InvalidArgument for a promise that nobody can keep."""
        for name, value in (("ttft_s", self.ttft_s), ("tbt_s", self.tbt_s)):
            if not value > 0:
                raise InvalidArgument(f"the SLO {name} is {value:g}: it must be above 0 seconds")


@dataclass(frozen=True, slots=True)
class ScheduleRequest:
    """One prompt. `keys` name its blocks in order, each after `block_tokens` tokens; the last one may be partial or missing."""

    keys: Sequence[Hashable]
    input_tokens: int
    block_tokens: int
    output_tokens: int = 1
    """As predicted: nobody knows it before the last token."""
    slo: Slo = Slo()

    def prefix_tokens(self, blocks: int) -> int:
        """Tokens that need no prefill when the first `blocks` blocks are there. The last token always does: it gives the first logits."""
        return max(0, min(blocks * self.block_tokens, self.input_tokens - 1))


@dataclass(slots=True)
class PrefillInstance:
    """A group of GPUs that computes prompts, one after the other."""

    name: str
    queue_s: float = 0.0
    """Predicted seconds until it could start on something new: what is left of the running prefill, and all that waits."""
    send_backlog_bytes: int = 0
    """Bytes that it was told to send and has not sent yet."""
    send_bytes_per_s: float = 25e9
    """What its rails deliver, as measured."""
    place: Hashable = None
    """Where its cache is: several instances may share one."""
    received_bytes_per_s: Mapping[Hashable, float] = field(default_factory=dict)
    """What was measured lately on the way to it, by the sender's `place`; from elsewhere what the sender delivers counts."""
    decodes_at: int | None = None
    """It decodes what it has prefilled, and nothing else does: the index of its decode side. None: any decode instance without `is_own`."""


@dataclass(slots=True)
class DecodeInstance:
    """A group of GPUs that produces tokens for all its sequences at once."""

    name: str
    batch: int = 0
    """Sequences that are being decoded, and those promised to it that have not arrived."""
    context_tokens: int = 0
    """Tokens of KV cache of all of them together."""
    capacity_tokens: int = 1 << 62
    """Tokens of KV cache that fit."""
    is_own: bool = False
    """The decode side of an instance that prefills too, and decodes only what that has prefilled."""


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
