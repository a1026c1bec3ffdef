"""How many bytes may be on their way from tiers that block (NVMe, HBM) into answers: of the node, and of one connection. Pure.

A value that cannot be pointed at takes memory from the moment it is read until its answer is the kernel's. A request of 25 kB can name
gigabytes of them; what is beyond the limits waits for its turn, holding nothing.
"""

import ctypes
from typing import Final

MANY_BYTES: Final = 16 << 20
"""As much at once is worth a walk through the heap when it is over."""

OVERHEAD_BYTES: Final = 1024
"""What a block that is being fetched takes besides its value; it bounds their number too."""


def charge_of(size_bytes: int) -> int:
    """What a value of that size is counted as."""
    return size_bytes + OVERHEAD_BYTES


class ReadLimiter:
    """Not thread-safe: the node's loop is the only caller."""

    def __init__(self, *, node_bytes: int, peer_bytes: int) -> None:
        self._node_bytes = node_bytes
        self._peer_bytes = peer_bytes
        self._of_peer: dict[object, int] = {}
        self.held_bytes = 0
        self._highest_bytes = 0
        self._takes = 0
        self._takes_seen = 0

    def take(self, peer: object, size_bytes: int) -> bool:
        """Whether a value of that size may be fetched for the connection now. One larger than a limit gets its turn alone."""
        charge = charge_of(size_bytes)
        mine = self._of_peer.get(peer, 0)
        if (mine and mine + charge > self._peer_bytes) or (self.held_bytes and self.held_bytes + charge > self._node_bytes):
            return False
        self._of_peer[peer] = mine + charge
        self.held_bytes += charge
        self._highest_bytes = max(self._highest_bytes, self.held_bytes)
        self._takes += 1
        return True

    def give_back(self, peer: object, charge: int) -> None:
        """What was taken is free again: `charge_of` a value, or of several together."""
        left = self._of_peer[peer] - charge
        if left:
            self._of_peer[peer] = left
        else:
            del self._of_peer[peer]
        self.held_bytes -= charge

    def is_over(self) -> bool:
        """True once after much was held: nothing is now, and nothing was taken since the last call."""
        is_over = self._takes == self._takes_seen and not self.held_bytes and self._highest_bytes >= MANY_BYTES
        self._takes_seen = self._takes
        if is_over:
            self._highest_bytes = 0
        return is_over


def trim_heap() -> None:
    """Give the free pages of the heap back, where the C library can (glibc). Some milliseconds for 256 MiB, without the GIL."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
