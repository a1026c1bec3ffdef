"""What to simulate: how many instances in which mode, their caches, what was promised. Values, checked; the machine is machine.py's."""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvstore.protocol.errors import InvalidArgument
from kvstore.scheduler.request import Slo

BLOCK_TOKENS: Final = 512
"""Of the trace format."""
MAX_INSTANCES: Final = 4096
MAX_FACTOR: Final = 1e9
"""The highest rate and interval; its inverse is the lowest. A simulation looks at its load the more often the longer it takes."""


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
class Plan:
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
        for name in ("rate", "sample_s"):
            if not 1 / MAX_FACTOR <= getattr(self, name) <= MAX_FACTOR:
                raise InvalidArgument(f"{name} is {getattr(self, name):g}: it must be from {1 / MAX_FACTOR:g} to {MAX_FACTOR:g}")
        if not 0 <= self.decision_s <= MAX_FACTOR:
            raise InvalidArgument(f"decision_s is {self.decision_s:g}: it must be from 0 to {MAX_FACTOR:g} seconds")

    @property
    def instances(self) -> int:
        """All of them."""
        return self.prefill + self.decode
