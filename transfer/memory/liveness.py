"""Which regions of a process are open, in memory that peers of the same host map: a mapping alone would outlive its region unnoticed.

The table is an array of u64 in the host's byte order. Word 0 counts the regions that were closed, so that a peer sees at one glance
whether it has mappings to let go; each other word holds the id of an open region, or 0.
"""

import contextlib
import fcntl
import os
import threading
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.protocol.errors import Full
from kvstore.transfer.memory.mapping import map_slab

MAX_LIVE: Final = 65_535
"""Regions of one process that can be shared at once; the table takes memory only where it is used."""
CLOSED_COUNT: Final = 0
"""The word that counts."""
F_SEAL_FUTURE_WRITE: Final = 0x10
"""No mapping made from now on can write, whoever opens the memory anew. Linux 5.1; Python 3.11 does not name it."""


class LiveRegions:
    """The owner's side. Thread-safe. Owns the memfd `fd`, of `size_bytes`."""

    def __init__(self, max_regions: int = MAX_LIVE) -> None:
        """Raises Full: the system has no descriptor or memory left."""
        self.size_bytes = (max_regions + 1) * 8
        try:
            self.fd = os.memfd_create("kvstore-live", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise Full(f"no descriptor is left for the table of live regions: {error.strerror}") from None
        os.ftruncate(self.fd, self.size_bytes)
        self._table: npt.NDArray[np.uint64] = np.frombuffer(map_slab(os.dup(self.fd), self.size_bytes, writable=True).memory, np.uint64)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        with contextlib.suppress(OSError):  # an older kernel: peers are trusted not to write then
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
        self._max_regions = max_regions
        self._process_id = os.getpid()
        self._lock = threading.Lock()
        self._free: list[int] = []
        self._next = CLOSED_COUNT + 1

    def add(self, region_id: int) -> int:
        """The region's place in the table. Raises Full."""
        with self._lock:
            if not self._free and self._next > self._max_regions:
                raise Full(f"{self._max_regions} regions are shared with this host already: close some")
            place = self._free.pop() if self._free else self._next
            self._next = max(self._next, place + 1)
            self._table[place] = region_id
            return place

    def remove(self, place: int) -> None:
        """The region is closed; in a forked child, which shares the table, its owner has it still."""
        if os.getpid() != self._process_id:
            return
        with self._lock:
            self._table[place] = 0
            self._table[CLOSED_COUNT] += 1
            self._free.append(place)

    def close(self) -> None:
        """All regions are closed. A second close is a no-op."""
        with self._lock:
            if self.fd >= 0:
                self._table[CLOSED_COUNT + 1 : self._next] = 0
                self._table[CLOSED_COUNT] += 1
                os.close(self.fd)
                self.fd = -1
