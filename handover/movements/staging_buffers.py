"""Pool of staging buffers in which short runs are gathered before a transfer and scattered after it.

Buffers are kept between requests: fresh memory costs more than the copy, because its pages are created at first use.
"""

import threading
from typing import Final

from kvstore.protocol.errors import Closed, Full
from kvstore.protocol.settings import format_size
from kvstore.transfer.memory.mapped_memory import allocate
from kvstore.transfer.memory.region import Region

SMALLEST_BYTES: Final = 64 << 10
"""Smallest buffer; sizes are powers of two of it, so that buffers fit later requests."""


class StagingPool:
    """Bounded pool of staging buffers, which it owns. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._free: dict[int, list[Region]] = {}
        self._is_closed = False
        self.taken_bytes = 0
        self.kept_bytes = 0
        """Bytes of free buffers."""

    def take(self, size_bytes: int) -> Region:
        """Return a buffer of at least this size, with undefined contents. Raises Full, Closed."""
        size = SMALLEST_BYTES
        while size < size_bytes:
            size *= 2
        with self._lock:
            if self._is_closed:
                raise Closed("the transceiver is closed")
            if self.taken_bytes + size > self._limit_bytes:
                raise Full(
                    f"{format_size(self.taken_bytes)} of staging are in use and {format_size(size)} more are needed; "
                    f"staging_bytes is {format_size(self._limit_bytes)}"
                )
            free = self._free.get(size)
            region = free.pop() if free else None
            self.taken_bytes += size
            self.kept_bytes -= size if region is not None else 0
            unused = self._shrink()
        for other in unused:
            other.close()
        if region is not None:
            return region
        try:
            return allocate(size)
        except BaseException:
            with self._lock:
                self.taken_bytes -= size
            raise

    def _shrink(self) -> list[Region]:
        """Return free buffers to close, so that all buffers together keep to the limit. Call it with the lock held."""
        unused = []
        for kept in sorted(self._free, reverse=True):
            while self._free[kept] and self.taken_bytes + self.kept_bytes > self._limit_bytes:
                unused.append(self._free[kept].pop())
                self.kept_bytes -= kept
        return unused

    def release(self, region: Region) -> None:
        """Return a buffer, which no transfer uses any more."""
        with self._lock:
            self.taken_bytes -= region.size_bytes
            if not self._is_closed:
                self._free.setdefault(region.size_bytes, []).append(region)
                self.kept_bytes += region.size_bytes
                return
        region.close()

    def close(self) -> None:
        """Close the free buffers, and taken ones when they are returned. A second close is a no-op."""
        with self._lock:
            self._is_closed = True
            regions = [region for free in self._free.values() for region in free]
            self._free.clear()
            self.kept_bytes = 0
        for region in regions:
            region.close()
