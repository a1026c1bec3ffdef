"""How long blocks take from one instance to another: bytes over measured bandwidth, behind what the sender has to send before.

Algorithm 1 names the estimator and gives no formula. This is the one that the transfer engine chooses paths by (transfer/paths/choice.py),
for a sender as a whole, and for a pair where its rate was measured. It reads no counter itself: whoever reports does.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.protocol.errors import InvalidArgument


class BandwidthTransfer:
    """TransferTime (interface.py): `latency_s` + (size_bytes + backlog_bytes) / bytes_per_s, and 0 where there is nothing to send.

    Where the pair's rate was measured, that takes the place of the sender's for `size_bytes`.
    """

    def __init__(self, *, latency_s: float = 0.0) -> None:
        """`latency_s`: from the decision to the first byte.

        Raises:
            InvalidArgument: it is negative.
        """
        if not latency_s >= 0:
            raise InvalidArgument(f"latency_s is {latency_s:g}: it must be 0 or more")
        self._latency_s = latency_s

    def transfer_s(self, size_bytes: int, *, backlog_bytes: int, bytes_per_s: float, measured_bytes_per_s: float | None = None) -> float:
        """Infinite from a sender that sends nothing, and where nothing was measured to arrive."""
        if not size_bytes:
            return 0.0
        if bytes_per_s <= 0 or (measured_bytes_per_s is not None and measured_bytes_per_s <= 0):
            return float("inf")
        if measured_bytes_per_s is None:
            return self._latency_s + (size_bytes + backlog_bytes) / bytes_per_s
        return self._latency_s + backlog_bytes / bytes_per_s + size_bytes / measured_bytes_per_s


@dataclass(frozen=True, slots=True)
class PathCounters:
    """What the transfer engine says of one path (transfer/paths/choice.py, PathState), as plain numbers."""

    local_rail: str
    bytes_per_s: float
    """Delivered while it had something to deliver; before that the speed of its link."""
    in_flight_bytes: int
    is_usable: bool = True
    """It does not rest after a failure."""


class SenderLoad(NamedTuple):
    """What PrefillInstance.send_bytes_per_s and send_backlog_bytes are set to."""

    bytes_per_s: float
    backlog_bytes: int


def from_counters(paths: Iterable[PathCounters], *, queued_bytes: int = 0) -> SenderLoad:
    """What a sender delivers by all its rails, and what is in flight on them or `queued_bytes` for them.

    Paths of one rail to several peers share it: the fastest of them says what the rail can, their sum would count it more than once.
    """
    rails: dict[str, float] = {}
    backlog_bytes = queued_bytes
    for path in paths:
        backlog_bytes += path.in_flight_bytes
        if path.is_usable:
            rails[path.local_rail] = max(rails.get(path.local_rail, 0.0), path.bytes_per_s)
    return SenderLoad(sum(rails.values()), backlog_bytes)
