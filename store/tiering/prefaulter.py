"""Thread that touches a node's DRAM: all of it at the start, later the memory of slabs that is made anew.

Fresh memory is ten times slower to write than touched memory. The node serves meanwhile; clients touch what they write before the thread
gets there. In between the thread looks how much of the memory is in huge pages, and why no more: the loop reads what it found last.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvstore.rpc.reactor import Reactor
from kvstore.tiers.dram import DramTier
from kvstore.tiers.huge_pages import shared_huge_bytes, unavailable_reason

LOOK_S: Final = 10.0

REST: Final = 100
"""A look walks the process's page tables: there is one every LOOK_S, and the thread rests at least this many times as long as it took."""

NICE: Final = 5
"""The thread is nicer than the node by so much: where the node's loop wants the same processor, it has three times as much of it."""


class PageSizes:
    """`look` is for any one thread; the loop reads what it found last."""

    def __init__(self, dram: DramTier, *, root: Path = Path("/")) -> None:
        """`root` is that of the files."""
        self._dram = dram
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
        return "" if self._dram.hugepages else unavailable_reason(self._root)


class Prefaulter:
    """See the module. The node's loop is the only caller."""

    def __init__(self, reactor: Reactor, dram: DramTier, pages: PageSizes, *, step_bytes: int) -> None:
        """It touches `step_bytes` at a time."""
        self._reactor = reactor
        self._dram = dram
        self._pages = pages
        self._step_bytes = step_bytes
        self._on_done: Callable[[], None] = lambda: None
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="prefault", daemon=True)

    def start(self, on_done: Callable[[], None]) -> None:
        """`on_done` is called in the loop once everything has been touched and looked at."""
        self._on_done = on_done
        self._thread.start()

    def stop(self) -> None:
        """Have the thread end after the step or the look that it is at."""
        self._is_stopping = True
        self._dram.has_cold.set()

    def join(self, timeout_s: float) -> None:
        """Wait until the thread, where it was started, has ended; `timeout_s` at most."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + NICE)
        self._touch()
        if self._is_stopping:
            return
        look_s = time.monotonic() + self._pages.look()
        self._reactor.call_soon(self._on_done)
        while not self._is_stopping:
            self._dram.has_cold.wait(max(0.0, look_s - time.monotonic()))
            self._touch()
            if not self._is_stopping and time.monotonic() >= look_s:
                look_s = time.monotonic() + self._pages.look()

    def _touch(self) -> None:
        """Until nothing is left. What is made after the flag is cleared sets it again."""
        if not self._is_stopping:
            self._dram.has_cold.clear()
        while not self._is_stopping and self._dram.prefault_step(self._step_bytes):
            pass
