"""Transfers of a request's bytes, memory access for its peers, and its end on a rank, common to both sides.

- **Movement.** Starts in the reactor's thread, works elsewhere, and reports its end once, in the reactor's thread.
  `MoveOperation` moves bytes with the transfer engine, and may gather before and scatter after.
- **LayerWindow.** Access of peers to memory for the length of a request.
- **MovementEnd.** Fence at the end of a request: its movements and its peers' memory access end first, then the caller
  is notified.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Final, Protocol

from kvstore.protocol.errors import Cancelled, Closed, DeadlineExceeded, KVStoreError, typed
from kvstore.rpc.reactor import Reactor, Timer
from kvstore.rpc.thread_pools import submit_once
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.memory.region import Region
from kvstore.transfer.paths.batch import Batch
from kvstore.transfer.paths.transfers import Transfer

log = logging.getLogger("kvstore.handover")
OnEnd = Callable[[KVStoreError | None], None]
"""Called in the reactor's thread once this side moves no more bytes."""
MIN_POLL_S: Final = 0.001
MAX_POLL_S: Final = 0.02
"""MIN_POLL_S to MAX_POLL_S: polling interval for the last peer to leave a region, which is not notified."""


class LayerWindow:
    """Access of peers to memory regions. Thread-safe. Owns the regions, not their memory, which must stay until
    `close` has returned True."""

    def __init__(self, engine: TransferEngine, memory: Sequence[Region], *, writable: bool) -> None:
        """Export the memory. Raises what a transport raises; nothing is exported then."""
        self.regions: list[Region] = []
        self.descriptions: list[bytes] = []
        try:
            for region in memory:
                self.regions.append(Region(region.memory, location=region.location, fd=-1 if writable else region.fd))
                self.descriptions.append(engine.export(self.regions[-1], writable=writable))
        except BaseException:
            self.close()
            raise

    def close(self) -> bool:
        """Revoke the access. Returns True once no peer uses it any more; does not wait, so call it again."""
        is_closed = True
        for region in self.regions:
            try:
                region.close(deadline_s=0.0)
            except DeadlineExceeded:
                is_closed = False
        return is_closed


class Movement(Protocol):
    """Transfer of bytes."""

    def begin(self, on_end: OnEnd) -> None: ...

    def cancel(self) -> None:
        """End it early; its end is still reported."""


class MoveOperation:
    """Movement by the transfer engine. A worker runs `prepare` and `follow`: they gather, scatter and build the
    batch, which may be empty."""

    def __init__(
        self,
        reactor: Reactor,
        worker: Executor,
        engine: TransferEngine,
        prepare: Callable[[], Batch],
        follow: Callable[[], None] | None = None,
        *,
        deadline_s: float,
    ) -> None:
        self._reactor = reactor
        self._worker = worker
        self._engine = engine
        self._prepare = prepare
        self._follow = follow
        self._deadline_s = deadline_s
        self._on_end: OnEnd
        self._transfer: Transfer | None = None
        self._is_cancelled = False

    def begin(self, on_end: OnEnd) -> None:
        self._on_end = on_end
        self._in_worker(self._carry)

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._transfer is not None:
            self._transfer.cancel()

    def _carry(self) -> None:
        batch = self._prepare()
        if self._is_cancelled:
            raise cancelled()
        if not batch:
            self._finish()
            return
        self._transfer = self._engine.submit(batch, deadline_s=self._deadline_s, on_done=self._moved)
        if self._is_cancelled:
            self._transfer.cancel()

    def _moved(self, transfer: Transfer) -> None:
        """Continue after the transfer. Runs in a thread of the engine, which must not block."""
        if transfer.error is not None or self._follow is None:
            self._end(transfer.error)
        else:
            self._in_worker(self._finish)

    def _finish(self) -> None:
        if self._follow is not None:
            self._follow()
        self._end(None)

    def _in_worker(self, act: Callable[[], None]) -> None:
        """Run `act` in a worker; its exception, or the lack of workers, ends the operation."""

        def run() -> None:
            try:
                if self._is_cancelled:
                    raise cancelled()
                act()
            except KVStoreError as error:
                self._end(error)
            except BaseException as error:
                log.exception("a transfer of a hand-over failed")
                self._end(typed(error))

        if submit_once(self._worker, run) is None:
            self._end(Closed("the transceiver is closed, or the system has no thread left for it"))

    def _end(self, error: KVStoreError | None) -> None:
        self._reactor.call_soon(lambda: self._on_end(error))


class MovementEnd:
    """Fence of a request. The reactor's thread only. Calls `on_over(is_fenced)` once; False if a transfer was still
    running after `fence_timeout_s`."""

    def __init__(self, reactor: Reactor, fence_timeout_s: float, on_over: Callable[[bool], None]) -> None:
        self._reactor = reactor
        self._fence_timeout_s = fence_timeout_s
        self._on_over = on_over
        self._windows: Sequence[LayerWindow] = ()
        self._movements: set[Movement] = set()
        self._give_up_ns = 0
        self._pause_s = MIN_POLL_S
        self._is_ending = self._is_over = False
        self._timer: Timer | None = None

    def expire_at(self, deadline_ns: int, callback: Callable[[], None]) -> None:
        """Call `callback` at the request's deadline unless it ends before."""
        self._timer = self._reactor.call_at(deadline_ns, callback)

    def track(self, movement: Movement, on_end: Callable[[KVStoreError | None], None]) -> None:
        """Start a movement; the request is not over before its end."""

        def ended(error: KVStoreError | None) -> None:
            self._movements.discard(movement)
            on_end(error)
            if self._is_ending:
                self._check_fence()

        self._movements.add(movement)
        movement.begin(ended)

    def begin(self, windows: Sequence[LayerWindow], *, is_failed: bool, moves_until_ns: int = 0) -> None:
        """End the request: cancel its movements if it failed. Repeated calls are no-ops.

        `fence_timeout_s` counts from now, or from `moves_until_ns` if a movement cannot be cancelled before.
        """
        if self._is_ending:
            return
        self._is_ending = True
        self._windows = windows
        self._give_up_ns = max(self._reactor.now_ns(), moves_until_ns) + int(self._fence_timeout_s * 1e9)
        if self._timer is not None:
            self._timer.cancel()
        try:
            if is_failed:
                for movement in list(self._movements):
                    movement.cancel()
        finally:  # an exception of a movement must not keep the request from ending
            self._poll_fence()

    def _check_fence(self) -> bool:
        """Check the fence; return whether the request is over."""
        if not self._is_over:
            are_closed = [window.close() for window in self._windows]
            is_fenced = all(are_closed) and not self._movements
            if is_fenced or self._reactor.now_ns() >= self._give_up_ns:
                self._is_over = True
                self._on_over(is_fenced)
        return self._is_over

    def _poll_fence(self) -> None:
        if not self._check_fence():
            self._reactor.call_later(self._pause_s, self._poll_fence)
            self._pause_s = min(2 * self._pause_s, MAX_POLL_S)


def cancelled() -> Cancelled:
    return Cancelled("the hand-over was cancelled")
