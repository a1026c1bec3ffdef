"""Times that a scheduler has to predict, as interfaces, and the estimator of transfers.

analytic.py computes prefill and decode times from a model and a GPU, regression.py from measurements. Algorithm 1 names the estimator of
transfers and gives no formula: this one is that of the transfer engine's path choice, for a sender as a whole or for a measured pair.

Source: Qin et al., Mooncake, FAST 2025, section 5 and Algorithm 1.
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


class BandwidthTransfer:
    """TransferTime (interface.py): (size_bytes + backlog_bytes) / bytes_per_s, and 0 where there is nothing to send.

    Where the pair's rate was measured, that takes the place of the sender's for `size_bytes`.
    """

    def transfer_s(self, size_bytes: int, *, backlog_bytes: int, bytes_per_s: float, measured_bytes_per_s: float | None = None) -> float:
        """Infinite from a sender that sends nothing, and where nothing was measured to arrive."""
        if not size_bytes:
            return 0.0
        pair_bytes_per_s = bytes_per_s if measured_bytes_per_s is None else measured_bytes_per_s
        if min(bytes_per_s, pair_bytes_per_s) <= 0:
            return float("inf")
        return backlog_bytes / bytes_per_s + size_bytes / pair_bytes_per_s
