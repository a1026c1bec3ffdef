"""Interfaces of the time estimators, and the estimator of transfers.

analytic.py estimates prefill and decode times from a model and a GPU, regression.py from measurements. Algorithm 1
names the transfer estimator without a formula; this one is that of the transfer engine's path choice, for a sender or
for a measured pair.

Source: Qin et al., Mooncake, FAST 2025, section 5 and Algorithm 1.
"""

from typing import Protocol


class PrefillTime(Protocol):
    """EstimatePrefillExecutionTime of Algorithm 1."""

    def prefill_s(self, input_tokens: int, prefix_tokens: int) -> float:
        """Seconds to compute `input_tokens` of which the first `prefix_tokens` are cached. Finite and not negative."""
        ...


class DecodeTime(Protocol):
    """Basis of SelectDecodingInstance of Algorithm 1."""

    def tbt_s(self, batch: int, context_tokens: int) -> float:
        """Seconds for one token of each of `batch` sequences with `context_tokens` of cache in total."""
        ...


class TransferTime(Protocol):
    """EstimateKVCacheTransferTime of Algorithm 1."""

    def transfer_s(self, size_bytes: int, *, backlog_bytes: int, bytes_per_s: float, measured_bytes_per_s: float | None = None) -> float:
        """Seconds until `size_bytes` are sent by a sender with a backlog of `backlog_bytes` and a rate of
        `bytes_per_s`.

        `measured_bytes_per_s` is the measured rate of the pair; None: unknown. The backlog goes to others at the
        sender's rate. Its time is added to `size_bytes` / `measured_bytes_per_s`, which is 0 for an infinite rate.
        """
        ...


class BandwidthTransfer:
    """TransferTime: (size_bytes + backlog_bytes) / bytes_per_s, and 0 for no bytes. A measured rate of the pair
    replaces the sender's for `size_bytes`."""

    def transfer_s(self, size_bytes: int, *, backlog_bytes: int, bytes_per_s: float, measured_bytes_per_s: float | None = None) -> float:
        """Infinite if the sender's or the pair's rate is 0."""
        if not size_bytes:
            return 0.0
        pair_bytes_per_s = bytes_per_s if measured_bytes_per_s is None else measured_bytes_per_s
        if min(bytes_per_s, pair_bytes_per_s) <= 0:
            return float("inf")
        return backlog_bytes / bytes_per_s + size_bytes / pair_bytes_per_s
