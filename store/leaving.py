"""A node that is to be stopped: it takes no new blocks, and writes down in its NVMe what only its memory holds.

By its master's word (`drain`), which may be taken back, or by a signal (`end`), for as long as it has. It reads on for whoever asks.
"""

import logging
from collections.abc import Callable

from kvstore.protocol.catalog_messages import DRAIN_NOT, DRAIN_SAVE
from kvstore.protocol.errors import Draining
from kvstore.protocol.settings import format_size
from kvstore.store.moves.saving import Saver
from kvstore.telemetry.logs import named

log = logging.getLogger("kvstore.store")


class Leaving:
    """See the module. Not thread-safe: the node's loop is the only caller."""

    def __init__(self, saver: Saver, *, has_nvme: bool, clock_ns: Callable[[], int]) -> None:
        self._saver = saver
        self._has_nvme = has_nvme
        self._clock_ns = clock_ns
        self._mode = DRAIN_NOT
        self._said: dict[int, int] = {}
        """What the master of each partition has said: the strictest holds."""
        self._then: Callable[[], None] | None = None
        """Set once the node ends."""
        self._began_ns = 0
        self._until_ns = 0

    @property
    def is_closed(self) -> bool:
        """It takes no new blocks."""
        return self._mode != DRAIN_NOT or self._then is not None

    def check_open(self) -> None:
        """Raises Draining: the node takes no new blocks."""
        if self.is_closed:
            raise Draining("this node is to be stopped and takes no new blocks: put them elsewhere")

    def drain(self, mode: int, partition: int = 0) -> None:
        """The partition's master says so, as often as it likes. DRAIN_NOT, too, of a new registration: it says the rest anew."""
        self._said[partition] = mode
        mode = max(self._said.values())
        if mode == self._mode:
            return
        self._mode = mode
        if self._then is not None:
            return
        if mode == DRAIN_SAVE:
            self._saver.begin()
        else:
            self._saver.stop()

    def end(self, drain_s: float, then: Callable[[], None]) -> None:
        """Call `then` once all is written that can be, or after `drain_s`. At once where there is no NVMe, or no time."""
        if self._then is not None:
            return
        self._then = then
        self._began_ns = self._clock_ns()
        self._until_ns = self._began_ns + int(drain_s * 1e9)
        if not self._has_nvme or not drain_s:
            self._finish()
            return
        self._saver.begin()

    def step(self) -> None:
        """Called after every round of events."""
        self._saver.step()

    def tick(self) -> None:
        """Called now and then."""
        now_ns = self._clock_ns()
        self._saver.tick(now_ns=now_ns)
        if self._then is not None and self._until_ns and (self._saver.is_done or now_ns >= self._until_ns):
            self._finish()

    def _finish(self) -> None:
        assert self._then is not None
        self._until_ns = 0
        self._saver.stop()
        lost_blocks, lost_bytes = self._saver.lost()
        saved = f"{self._saver.saved_blocks} blocks ({format_size(self._saver.saved_bytes)}) were written to NVMe"
        took_s = (self._clock_ns() - self._began_ns) / 1e9
        lost = f"{lost_blocks} blocks ({format_size(lost_bytes)}) end with it"
        if lost_blocks and self._has_nvme:
            log.warning(
                "the node ends: %s in %.1f s; %s: no time, room or decision of the master for them",
                saved,
                took_s,
                lost,
                extra=named("node_ends", saved=saved, lost=lost),
            )
        else:
            log.info("the node ends: %s in %.1f s; %s", saved, took_s, lost, extra=named("node_ends", saved=saved, lost=lost))
        self._then()
