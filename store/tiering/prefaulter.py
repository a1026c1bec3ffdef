"""Prefault thread: touches a node's DRAM at the start, and later the memory of new slabs.

Writing untouched memory is ten times slower. The node serves meanwhile. The thread also measures how much memory is in
huge pages and why not more; the loop reads the latest result.
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
"""A measurement walks the process's page tables. The pause is LOOK_S, and at least this many times its duration."""

NICE: Final = 5
"""Niceness added to the thread: on a shared core the node's loop gets three times as much time."""


class PageSizes:
    """Use of huge pages. `look` is called from one thread; the loop reads the results."""

    def __init__(self, dram: DramTier, *, root: Path = Path("/")) -> None:
        """`root` is the root of the system's files."""
        self._dram = dram
        self._root = root
        self.huge_bytes = 0
        """Huge pages in touched DRAM and in other shared memory of the process, which is small."""
        self.why_not = self._reason()
        """Reason for small pages; "" if huge ones are available."""

    def look(self) -> float:
        """Measure once; return the pause before the next time, in seconds."""
        begun_s = time.perf_counter()
        self.why_not = self._reason()
        if self._dram.hugepages:
            self.huge_bytes = self._dram.capacity_bytes
        elif not self.why_not or self.huge_bytes:
            # Existing huge pages stay when the host's setting changes. Without any, the walk is skipped.
            self.huge_bytes = min(shared_huge_bytes(self._root), self._dram.capacity_bytes)
        return max(LOOK_S, REST * (time.perf_counter() - begun_s))

    def _reason(self) -> str:
        return "" if self._dram.hugepages else unavailable_reason(self._root)


class Prefaulter:
    """Owns the prefault thread. Called from the node's loop."""

    def __init__(self, reactor: Reactor, dram: DramTier, pages: PageSizes, *, step_bytes: int) -> None:
        """`step_bytes` are touched at a time."""
        self._reactor = reactor
        self._dram = dram
        self._pages = pages
        self._step_bytes = step_bytes
        self._on_done: Callable[[], None] = lambda: None
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="prefault", daemon=True)

    def start(self, on_done: Callable[[], None]) -> None:
        """Start the thread. `on_done` is called in the loop once all DRAM is touched and measured."""
        self._on_done = on_done
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step."""
        self._is_stopping = True
        self._dram.has_cold.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread, if it was started, at most `timeout_s`."""
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
        """Touch all cold memory. New cold memory sets the flag again."""
        if not self._is_stopping:
            self._dram.has_cold.clear()
        while not self._is_stopping and self._dram.prefault_step(self._step_bytes):
            pass
