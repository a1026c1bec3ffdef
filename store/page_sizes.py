"""How much of a node's DRAM is in huge pages, and why no more: looked up now and then, never by the loop."""

import time
from pathlib import Path
from typing import Final

from kvstore.tiers.dram import DramTier
from kvstore.tiers.huge_pages import shared_huge_bytes, why_none

LOOK_S: Final = 10.0
REST: Final = 100
"""A look walks the process's page tables: there is one every LOOK_S, and the thread rests at least this many times as long as it took."""


class PageSizes:
    """`look` is for any one thread; the loop reads what it found last."""

    def __init__(self, dram: DramTier, *, asks: bool, root: Path = Path("/")) -> None:
        """`asks`: DRAM asks the kernel for huge pages (setting `transparent_hugepages`). `root` is that of the files."""
        self._dram = dram
        self._asks = asks
        self._root = root
        self.huge_bytes = 0
        """Of DRAM, as far as this process has touched it, and of what else it has in shared memory: indexes and desks are small."""
        self.why_not = self._reason()
        """Why it is in small pages; "" where huge ones are to be had."""

    def look(self) -> float:
        """See for once; how long to wait before the next time, in seconds."""
        begun_s = time.perf_counter()
        self.why_not = self._reason()
        if self._dram.hugepages:
            self.huge_bytes = self._dram.capacity_bytes
        elif not self.why_not or self.huge_bytes:
            # Those that it has stay when the host's setting changes. Where there never were any the walk, of many pages, is spared.
            self.huge_bytes = min(shared_huge_bytes(self._root), self._dram.capacity_bytes)
        return max(LOOK_S, REST * (time.perf_counter() - begun_s))

    def _reason(self) -> str:
        if self._dram.hugepages:
            return ""
        return why_none(self._root) if self._asks else "transparent_hugepages is off"
