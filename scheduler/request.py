"""A request as a scheduler sees it, before anything was computed. A value; it decides nothing."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

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
class Request:
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
