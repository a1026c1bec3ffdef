"""What a scheduler knows of the instances it sends requests to: views, filled by the simulator or from live reports."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field


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
