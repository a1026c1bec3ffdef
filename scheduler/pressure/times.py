"""Times of a server that keeps its KV cache in fewer bits than the model computes in. It measures nothing.

A decode step reads the whole cache of its batch, and reading bounds its attention: that needs (query heads / KV heads) operations for a
byte of a cache of 16 bits, 8 with Llama 3 70B, and the GPUs of estimators/gpus.py can do 95 or more. So half the bytes are half the time.
Prefill is bound by computing. What encoding and decoding take is not counted: kernels fuse it with what they do anyway.
"""

from kvstore.protocol.errors import InvalidArgument
from kvstore.scheduler.pressure.strategies import Times


class QuantisedTimes:
    """Times (strategies.py) of `times` with a cache of `share` as many bytes."""

    def __init__(self, times: Times, share: float) -> None:
        """Raises InvalidArgument unless the share is above 0 and finite."""
        if not 0 < share < float("inf"):
            raise InvalidArgument(f"share is {share:g}: it must be above 0 and finite")
        self._times, self._share = times, share

    def prefill_s(self, input_tokens: int, prefix_tokens: int) -> float:
        return self._times.prefill_s(input_tokens, prefix_tokens)

    def tbt_s(self, batch: int, context_tokens: int) -> float:
        return self._times.tbt_s(batch, round(context_tokens * self._share))
