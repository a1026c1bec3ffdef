"""A transfer: what a caller of the engine holds while bytes move.

The engine (engine.py) owns its state and guards it with its lock.
"""

import logging
import threading
from collections.abc import Callable, Collection
from copy import copy
from enum import IntEnum

from kvstore.protocol.errors import DeadlineExceeded, KVStoreError
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.agent import AgentRequest, TransferAgent, cancelled
from kvstore.transfer.memory.region import Region
from kvstore.transfer.memory.signal_safety import Gate, Shield

ABORT_TIMEOUT_S = 30.0
"""Slices under way end within this time of being given up; an agent that takes longer is at fault, which is logged."""
log = logging.getLogger("kvstore.transfer")


class Priority(IntEnum):
    """Slices of a lower number overtake those of a higher one that are not under way yet."""

    FOREGROUND = 0
    """Somebody waits for it: a get."""
    BACKGROUND = 1
    """Replication, prefetching, moving between tiers."""


class Transfer:
    """A batch of copies under way. Thread-safe. It is over when every byte has moved, or an error was met and nothing moves any more.

    Until then the regions are held: their memory must not be changed (sources) or read (destinations).
    """

    def __init__(
        self,
        deadline: Deadline,
        priority: Priority,
        held: Collection[Region],
        abort: "Callable[[Transfer, KVStoreError], None]",
        assist: "Callable[[Transfer], None]",
        on_done: "Callable[[Transfer], None] | None",
    ) -> None:
        self.deadline = deadline
        self.priority = priority
        self.size_bytes = 0
        self.error: KVStoreError | None = None
        """Why it failed. Set before it is over: slices under way have to end first."""
        self.is_over = False
        self.retries = 0
        """Slices that had to be tried again."""
        self.slices_left = 0
        self.in_flight: dict[AgentRequest, TransferAgent | None] = {}
        """Requests under way, and whom to tell when they are to end: None until they are submitted."""
        self._held = held
        self._abort = abort
        self._assist = assist
        self._on_done = on_done
        self._lock = threading.Lock()
        self._over: threading.Event | None = None
        self._gate: Gate | None = None

    def hold_gate(self, gate: Gate) -> None:
        """For the engine, before anything moves: to shut the gate waits until it is over."""
        gate.enter()
        self._gate = gate

    def complete(self) -> None:
        """For the engine: it is over."""
        held, self._held = self._held, ()  # who keeps the transfer does not keep its memory
        for region in held:
            region.release()
        with self._lock:
            self.is_over = True
            over = self._over
        if over is not None:
            over.set()
        if self._gate is not None:
            self._gate.leave()
        if self._on_done is not None:
            try:
                self._on_done(self)
            except Exception:  # the caller's mistake; other transfers go on
                log.exception("on_done of a transfer failed")

    def cancel(self) -> None:
        """Have it end soon, with Cancelled unless it is over before."""
        self._abort(self, cancelled())

    def expire(self) -> None:
        """Have it end soon, with DeadlineExceeded unless it is over before: for who waits by other means than `wait`."""
        self._abort(self, self.deadline.exceeded())

    def wait(self) -> None:
        """Block until it is over, copying in this thread where that helps. Raises its error: Unreachable (the peer is gone, by every way
        there is), DeadlineExceeded, Denied, StaleHandle, InvalidArgument, ProtocolError, Cancelled or Closed. After an error the
        destinations' content is undefined.

        Whatever else is raised, by a signal handler say, cancels the transfer and goes on once it is over.
        """
        with Shield() as shield:
            self.wait_with(shield)

    def wait_with(self, shield: Shield) -> None:
        """`wait`, for who has a shield up, whose work ends with this: a second one would only take time."""
        self._wait_until_over(shield)
        self.check()

    def check(self) -> None:
        """For a transfer that is over: raise its error, as `wait` does.

        A copy is raised: the error itself would hold, by its traceback and its context, the frames of callers that hold this transfer, and
        all that they have lent, until garbage is collected.
        """
        if self.error is not None:
            raise copy(self.error)

    def abandon(self) -> None:
        """Cancel it and return when it is over, however that ends."""
        self.cancel()
        with Shield() as shield:
            self._wait_until_over(shield)

    def _wait_until_over(self, shield: Shield) -> None:
        shield.cancels(self.cancel)
        try:
            if not self.is_over:
                self._assist(self)
            if not self.is_over and not self._ends_within(self.deadline):
                self.expire()
        except BaseException:
            self.cancel()
            raise
        finally:
            if not self.is_over:
                self._wait_until_finished()

    def _ends_within(self, deadline: Deadline) -> bool:
        try:
            return self._event().wait(deadline.left_s())
        except DeadlineExceeded:
            return self.is_over

    def _wait_until_finished(self) -> None:
        """However long it takes: as long as a slice moves, nobody may have the memory back."""
        while not self.is_over and not self._event().wait(ABORT_TIMEOUT_S):
            log.error(
                "a slice has not ended within %g s of being given up: its agent is at fault, and its caller waits on", ABORT_TIMEOUT_S
            )

    def _event(self) -> threading.Event:
        with self._lock:
            if self._over is None:
                self._over = threading.Event()
            if self.is_over:
                self._over.set()
            return self._over
