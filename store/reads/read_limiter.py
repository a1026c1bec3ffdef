"""Limits on bytes in flight from tiers that block (NVMe, HBM) into answers, for the node and for one connection. Pure.

A value that cannot be mapped takes memory from its read until the kernel has its answer. A request of 25 kB can name
gigabytes of them. Reads beyond the limits wait and hold nothing.
"""

import ctypes
from typing import Final

MANY_BYTES: Final = 16 << 20
"""Peak from which the heap is trimmed afterwards."""

OVERHEAD_BYTES: Final = 1024
"""Charge per block besides its value; bounds the number of blocks."""


def charge_of(size_bytes: int) -> int:
    """Bytes charged for a value of that size."""
    return size_bytes + OVERHEAD_BYTES


class ReadLimiter:
    """Byte limits of reads. Not thread-safe: called from the node's loop."""

    def __init__(self, *, node_bytes: int, peer_bytes: int) -> None:
        self._node_bytes = node_bytes
        self._peer_bytes = peer_bytes
        self._of_peer: dict[object, int] = {}
        self.held_bytes = 0
        self.is_full = False
        """The node's limit has refused a value since the last release."""
        self._highest_bytes = 0
        self._takes = 0
        self._takes_seen = 0

    def take(self, peer: object, size_bytes: int) -> bool:
        """Charge a value if it may be fetched for the connection now. A value larger than a limit is fetched alone."""
        charge = charge_of(size_bytes)
        mine = self._of_peer.get(peer, 0)
        if mine and mine + charge > self._peer_bytes:
            return False
        if self.held_bytes and self.held_bytes + charge > self._node_bytes:
            self.is_full = True
            return False
        self._of_peer[peer] = mine + charge
        self.held_bytes += charge
        self._highest_bytes = max(self._highest_bytes, self.held_bytes)
        self._takes += 1
        return True

    def release(self, peer: object, charge: int) -> None:
        """Release a charge: `charge_of` a value, or a sum of them."""
        left = self._of_peer[peer] - charge
        if left:
            self._of_peer[peer] = left
        else:
            del self._of_peer[peer]
        self.held_bytes -= charge
        self.is_full = False

    def is_over(self) -> bool:
        """Return True once after a peak: nothing is charged now, nor was since the last call."""
        is_over = self._takes == self._takes_seen and not self.held_bytes and self._highest_bytes >= MANY_BYTES
        self._takes_seen = self._takes
        if is_over:
            self._highest_bytes = 0
        return is_over


def trim_heap() -> None:
    """Return free heap pages to the system, with glibc. Some milliseconds for 256 MiB, without the GIL."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
