"""Movements of a request's bytes, the leave of peers to reach memory for its length, and its end on a rank, alike on both sides.

A movement begins in the reactor's thread, works elsewhere, and reports its end once, in the reactor's thread. An Operation has the transfer
engine move bytes, and may gather before and scatter after.

A request ends in the order of a fence: its movements and its peers' leave to reach memory end first, and the caller is told last.
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
"""Called in the reactor's thread when no byte is moved by this side any more."""
FIRST_LOOK_S: Final = 0.001
LONGEST_LOOK_S: Final = 0.02
"""Nobody tells when the last peer has left a region: looks at it are this far apart at most."""


class LayerWindow:
    """See the module. Thread-safe. It owns its regions, not their memory, which stays until `close` has returned True."""

    def __init__(self, engine: TransferEngine, memory: Sequence[Region], *, writable: bool) -> None:
        """Raises whatever a transport has against the memory; nothing is shown then."""
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
        """Refuse peers from now on; True once none of them is at it any more. Does not wait: call it again."""
        is_closed = True
        for region in self.regions:
            try:
                region.close(deadline_s=0.0)
            except DeadlineExceeded:
                is_closed = False
        return is_closed


class Movement(Protocol):
    """See the module."""

    def begin(self, on_end: OnEnd) -> None: ...

    def cancel(self) -> None:
        """Have it end soon; its end is told all the same."""


class MoveOperation:
    """`prepare` and `follow` run in a worker: they gather, scatter and build the batch, which may be empty."""

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
        """In some thread of the engine, which must not be kept."""
        if transfer.error is not None or self._follow is None:
            self._end(transfer.error)
        else:
            self._in_worker(self._finish)

    def _finish(self) -> None:
        if self._follow is not None:
            self._follow()
        self._end(None)

    def _in_worker(self, act: Callable[[], None]) -> None:
        """Run it in a worker; its exception, or the lack of workers, ends the operation."""

        def run() -> None:
            try:
                if self._is_cancelled:
                    raise cancelled()
                act()
            except KVStoreError as error:
                self._end(error)
            except BaseException as error:
                log.exception("a hand-over failed")
                self._end(typed(error))

        if submit_once(self._worker, run) is None:
            self._end(Closed("the transceiver is closed, or the system has no thread left for it"))

    def _end(self, error: KVStoreError | None) -> None:
        self._reactor.call_soon(lambda: self._on_end(error))


class MovementEnd:
    """See the module. Not thread-safe: the reactor's thread is the only caller. `on_over(is_fenced)` is called once: False if something
    still moved after `fence_timeout_s`."""

    def __init__(self, reactor: Reactor, fence_timeout_s: float, on_over: Callable[[bool], None]) -> None:
        self._reactor = reactor
        self._fence_timeout_s = fence_timeout_s
        self._on_over = on_over
        self._windows: Sequence[LayerWindow] = ()
        self._movements: set[Movement] = set()
        self._give_up_ns = 0
        self._pause_s = FIRST_LOOK_S
        self._is_ending = self._is_over = False
        self._timer: Timer | None = None

    def expire_at(self, deadline_ns: int, callback: Callable[[], None]) -> None:
        """Call `callback` at the request's deadline, unless it ends before."""
        self._timer = self._reactor.call_at(deadline_ns, callback)

    def track(self, movement: Movement, on_end: Callable[[KVStoreError | None], None]) -> None:
        """Begin a movement, without whose end the request is not over."""

        def ended(error: KVStoreError | None) -> None:
            self._movements.discard(movement)
            on_end(error)
            if self._is_ending:
                self._look()

        self._movements.add(movement)
        movement.begin(ended)

    def begin(self, windows: Sequence[LayerWindow], *, is_failed: bool, moves_until_ns: int = 0) -> None:
        """The request is over but for what still moves: cancel that if it failed. A second time is a no-op.

        `fence_timeout_s` counts from now, or from `moves_until_ns` where something moves that no cancelling ends before.
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
        finally:  # a movement at fault must not keep the request from ever being over
            self._look_again()

    def _look(self) -> bool:
        """Whether it is over by now."""
        if not self._is_over:
            are_closed = [window.close() for window in self._windows]
            is_fenced = all(are_closed) and not self._movements
            if is_fenced or self._reactor.now_ns() >= self._give_up_ns:
                self._is_over = True
                self._on_over(is_fenced)
        return self._is_over

    def _look_again(self) -> None:
        if not self._look():
            self._reactor.call_later(self._pause_s, self._look_again)
            self._pause_s = min(2 * self._pause_s, LONGEST_LOOK_S)


def cancelled() -> Cancelled:
    return Cancelled("the hand-over was cancelled")
