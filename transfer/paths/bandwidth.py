"""How fast a path delivers: an average over the time in which it had something to deliver. Sans-I/O."""

import math
from typing import Final, NamedTuple

MEMORY_NS: Final = 250_000_000
"""A measurement counts for 1/e of itself after this long: a change of rate is followed within about a second (four times this)."""
SAMPLE_BYTES: Final = 256 << 10
"""Less than this between two idle times says little of the rate: it took mostly latency."""


class Measured(NamedTuple):
    """A rate that was measured, at least SAMPLE_BYTES of it."""

    bytes_s: float
    basis_bytes: int
    """Bytes that it rests on, older ones counting less."""
    measured_ns: int
    """When the last of them arrived, by the engine's clock."""


class Bandwidth:
    """Bytes delivered over busy time, both fading exponentially.

    Not the mean of size over latency of single slices: with several in flight on one rail each waits for those before it, so that
    would find the rate divided by their number, and would find a rail the slower the more it is given. What a rail delivers from one
    moment to the next while something is in flight is its rate whatever the number, as in the delivery rate of BBR.
    Source: Cardwell et al., "BBR: Congestion-Based Congestion Control", ACM Queue 14 (2016). The ratio of two faded sums weighs every
    nanosecond alike, where a mean of ratios would let a burst out of a shaper's bucket count as much as a long slice.
    """

    __slots__ = ("_busy_ns", "_bytes", "_sample_bytes", "_sample_ns", "measured_ns")

    def __init__(self, bytes_s: float) -> None:
        """`bytes_s` is assumed until something is measured, and counts for nothing afterwards."""
        self._bytes, self._busy_ns = bytes_s, 1e9
        self._sample_ns = 0
        self._sample_bytes = 0
        self.measured_ns = -1
        """When it was last measured; -1: never."""

    @property
    def bytes_s(self) -> float:
        return self._bytes / self._busy_ns * 1e9

    def measured(self) -> Measured | None:
        """None until enough has been delivered to tell."""
        if self.measured_ns < 0 or self._bytes < SAMPLE_BYTES:
            return None
        return Measured(self.bytes_s, int(self._bytes), self.measured_ns)

    def restart(self, now_ns: int) -> None:
        """What is delivered counts from here: the path was idle until now, or something failed on it."""
        self._sample_ns, self._sample_bytes = now_ns, 0

    def delivered(self, size_bytes: int, now_ns: int, *, is_idle: bool) -> None:
        """`size_bytes` more were delivered since the last call; `is_idle`: and nothing is in flight any more."""
        self._sample_bytes += size_bytes
        if not is_idle and self._sample_bytes < SAMPLE_BYTES:
            return
        took_ns = max(now_ns - self._sample_ns, 1)
        # A few bytes alone show that the path is at least this fast, not that it is no faster.
        if self._sample_bytes >= SAMPLE_BYTES or self._sample_bytes * self._busy_ns > self._bytes * took_ns:
            # Time passes for old measurements while the path is idle, too: then a single probe can outweigh them.
            kept = math.exp((self.measured_ns - now_ns) / MEMORY_NS) if self.measured_ns >= 0 else 0.0
            self._bytes = self._bytes * kept + self._sample_bytes
            self._busy_ns = self._busy_ns * kept + took_ns
            self.measured_ns = now_ns
        self.restart(now_ns)
