"""Values of scheduling: requests, instances, decisions and rejections.

Indexes in a decision refer to the scheduler's sequences of instances, which come from a simulator or from live reports.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvstore.protocol.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Slo:
    """Service-level objectives: time to first token, and time between tokens, in seconds; infinite if none."""

    ttft_s: float = float("inf")
    tbt_s: float = float("inf")

    def __post_init__(self) -> None:
        """Raises InvalidArgument unless both are above 0."""
        for name, value in (("ttft_s", self.ttft_s), ("tbt_s", self.tbt_s)):
            if not value > 0:
                raise InvalidArgument(f"the SLO {name} is {value:g}: it must be above 0 seconds")


@dataclass(frozen=True, slots=True)
class ScheduleRequest:
    """One prompt. `keys` identify its blocks of `block_tokens` in order; the last one may be partial or missing."""

    keys: Sequence[Hashable]
    input_tokens: int
    block_tokens: int
    output_tokens: int = 1
    """Predicted."""
    slo: Slo = Slo()

    def prefix_tokens(self, blocks: int) -> int:
        """Tokens that need no prefill if the first `blocks` blocks are cached. The last token always needs it, for the
        first logits."""
        return max(0, min(blocks * self.block_tokens, self.input_tokens - 1))


@dataclass(slots=True)
class PrefillInstance:
    """A group of GPUs that computes prompts, one after the other."""

    name: str
    queue_s: float = 0.0
    """Predicted seconds until it can start a new prompt: the rest of the running prefill, and the queue."""
    send_backlog_bytes: int = 0
    """Bytes queued to be sent."""
    send_bytes_per_s: float = 25e9
    """Measured send rate of its rails."""
    place: Hashable = None
    """Location of its cache; several instances may share one."""
    received_bytes_per_s: Mapping[Hashable, float] = field(default_factory=dict)
    """Recently measured receive rate by the sender's `place`; for other senders, their send rate applies."""
    decodes_at: int | None = None
    """Index of its decode side, if it decodes what it has prefilled and nothing else. None: any decode instance without
    `is_own`."""


@dataclass(slots=True)
class DecodeInstance:
    """A group of GPUs that generates tokens for all its sequences at once."""

    name: str
    batch: int = 0
    """Running sequences, and those promised but not arrived."""
    context_tokens: int = 0
    """Tokens of KV cache of these sequences."""
    capacity_tokens: int = 1 << 62
    """Capacity in tokens of KV cache."""
    is_own: bool = False
    """The decode side of an instance that decodes only what it has prefilled."""


class Reason(Enum):
    """Reason of a rejection."""

    TTFT = "ttft"
    """No prefill instance meets the TTFT SLO."""
    TBT = "tbt"
    """No decode instance meets the TBT SLO."""
    CAPACITY = "capacity"
    """No decode instance has space for its KV cache."""
    PREFILL_LOAD = "prefill_load"
    """Early rejection: the prefill pool is over its load limit."""
    DECODE_LOAD = "decode_load"
    """Early rejection: the decode pool is over its load limit, or will be when the prefill ends."""
    NO_INSTANCE = "no_instance"
    """No instance is available."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Placement on prefill[`prefill`], then decode[`decode`]."""

    prefill: int
    decode: int
    prefix_blocks: int
    """Blocks of the prompt that are not computed."""
    transfer_from: int | None
    """Prefill instance that the last `transfer_blocks` of these are fetched from; None: no transfer."""
    transfer_blocks: int
    transfer_s: float
    queue_s: float
    prefill_s: float
    tbt_s: float

    @property
    def ttft_s(self) -> float:
        """Predicted seconds to the first token; the transfer runs while the request queues."""
        return max(self.transfer_s, self.queue_s) + self.prefill_s


@dataclass(frozen=True, slots=True)
class Rejection:
    """Rejection of a request: the predicted `value` and the `limit` that it exceeds, in the reason's unit."""

    reason: Reason
    value: float = 0.0
    limit: float = 0.0
