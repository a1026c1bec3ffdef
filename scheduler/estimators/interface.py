"""What a scheduler has to foresee, as interfaces. analytic.py computes it from a model and a GPU, regression.py from measurements.

Source: Qin et al., Mooncake, FAST 2025, section 5 and Algorithm 1 (which names the estimators and gives no formula for the transfer).
"""

from typing import Protocol


class PrefillTime(Protocol):
    """EstimatePrefillExecutionTime."""

    def prefill_s(self, input_tokens: int, prefix_tokens: int) -> float:
        """Seconds to compute `input_tokens` of which the first `prefix_tokens` are in the cache. Finite and not negative."""
        ...


class DecodeTime(Protocol):
    """What SelectDecodingInstance goes by."""

    def tbt_s(self, batch: int, context_tokens: int) -> float:
        """Seconds for one token of each of `batch` sequences with `context_tokens` of cache together."""
        ...


class TransferTime(Protocol):
    """EstimateKVCacheTransferTime."""

    def transfer_s(self, size_bytes: int, *, backlog_bytes: int, bytes_per_s: float, measured_bytes_per_s: float | None = None) -> float:
        """Seconds until `size_bytes` have been sent by one that has `backlog_bytes` to send before and sends `bytes_per_s`.

        `measured_bytes_per_s` was measured between these two; None: it was not. The backlog goes to others: what it takes is added to
        `size_bytes` / `measured_bytes_per_s`, and is all that is left where that is infinite.
        """
        ...
