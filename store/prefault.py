"""Fresh memory is ten times slower to write than touched memory: a thread touches all of a node's DRAM once, and then looks at what pages
it is in."""

import threading
from collections.abc import Callable

from kvstore.rpc.reactor import Reactor
from kvstore.store.page_sizes import PageSizes
from kvstore.tiers.dram import DramTier


class Prefaulter:
    """See the module. The node's loop is the only caller."""

    def __init__(self, reactor: Reactor, dram: DramTier, pages: PageSizes, *, step_bytes: int, on_done: Callable[[], None]) -> None:
        """`on_done` is called in the loop once everything has been touched, `step_bytes` at a time, and looked at."""
        self._reactor = reactor
        self._dram = dram
        self._pages = pages
        self._step_bytes = step_bytes
        self._on_done = on_done
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefault", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Have the thread end after the step or the look that it is at."""
        self._stopping.set()

    def join(self, timeout_s: float) -> None:
        """Wait until the thread, where it was started, has ended; `timeout_s` at most."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            if not self._dram.prefault_step(self._step_bytes):
                pause_s = self._pages.look()
                self._reactor.call_soon(self._on_done)
                while not self._stopping.wait(pause_s):
                    pause_s = self._pages.look()
