"""Transfer: the handle of a batch of copies in flight. Its state belongs to the engine and is guarded by the engine's
lock.
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
"""Slices in flight end within this time after an abort. An agent that takes longer is faulty, which is logged."""
log = logging.getLogger("kvstore.transfer")


class Priority(IntEnum):
    """Slices of a lower number overtake queued slices of a higher one."""

    FOREGROUND = 0
    """A caller waits: a get."""
    BACKGROUND = 1
    """Replication, prefetching, moves between tiers."""


class Transfer:
    """A batch of copies in flight. Thread-safe. Over when every byte has moved, or after an error once nothing moves
    any more.

    Until then the regions are held: sources must not be changed, destinations not read.
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
        """The failure. Set before the transfer is over, as slices in flight must end first."""
        self.is_over = False
        self.retries = 0
        """Slices that were retried."""
        self.slices_left = 0
        self.in_flight: dict[AgentRequest, TransferAgent | None] = {}
        """Requests in flight with their agents; None until they are submitted."""
        self._held = held
        self._abort = abort
        self._assist = assist
        self._on_done = on_done
        self._lock = threading.Lock()
        self._over: threading.Event | None = None
        self._gate: Gate | None = None

    def hold_gate(self, gate: Gate) -> None:
        """Keep `gate` entered until the transfer is over. Called by the engine before anything moves."""
        gate.enter()
        self._gate = gate

    def complete(self) -> None:
        """Mark the transfer as over. Called by the engine."""
        held, self._held = self._held, ()  # a reference to the transfer must not keep its memory
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
            except Exception:  # the caller's fault; other transfers continue
                log.exception("on_done of a transfer failed")

    def cancel(self) -> None:
        """Make it end soon, with Cancelled unless it ends before."""
        self._abort(self, cancelled())

    def expire(self) -> None:
        """Make it end soon, with DeadlineExceeded unless it ends before: for callers that do not use `wait`."""
        self._abort(self, self.deadline.exceeded())

    def wait(self) -> None:
        """Block until the transfer is over, copying in this thread where that is faster.

        Raises its error: Unreachable (no path to the peer works), DeadlineExceeded, Denied, StaleHandle,
        InvalidArgument, ProtocolError, Cancelled or Closed. After an error the destinations' content is undefined. Any
        other exception, such as a signal handler's, cancels the transfer and is raised once it is over.
        """
        with Shield() as shield:
            self.wait_with(shield)

    def wait_with(self, shield: Shield) -> None:
        """As `wait`, under a shield that the caller has active and whose work ends with this call."""
        self._wait_until_over(shield)
        self.check()

    def check(self) -> None:
        """Raise the error of a transfer that is over, as `wait` does.

        Raises a copy: the error itself would keep alive, by its traceback and context, frames that refer to this
        transfer and to its buffers.
        """
        if self.error is not None:
            raise copy(self.error)

    def abandon(self) -> None:
        """Cancel it and return when it is over."""
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
        """Wait without limit: the memory must not be returned to its owner while a slice moves."""
        while not self.is_over and not self._event().wait(ABORT_TIMEOUT_S):
            log.error("a slice has not ended %g s after it was aborted: its agent is faulty, and its caller still waits", ABORT_TIMEOUT_S)

    def _event(self) -> threading.Event:
        with self._lock:
            if self._over is None:
                self._over = threading.Event()
            if self.is_over:
                self._over.set()
            return self._over
