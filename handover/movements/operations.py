"""Movements of bytes of a request: each begins in the reactor's thread, works elsewhere, and tells its end once, in the reactor's thread.

An Operation has the transfer engine move them, and may gather before and scatter after; a StreamOperation is one part of a stream.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Protocol

from kvstore.handover.movements.streams import Move, Stream, cancelled
from kvstore.protocol.errors import Closed, KVStoreError, typed
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.workers import submit_once
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.paths.spans import Batch
from kvstore.transfer.paths.transfers import Transfer

log = logging.getLogger("kvstore.handover")

OnEnd = Callable[[KVStoreError | None], None]
"""Called in the reactor's thread when no byte is moved by this side any more."""


class Movement(Protocol):
    """See the module."""

    def begin(self, on_end: OnEnd) -> None: ...

    def cancel(self) -> None:
        """Have it end soon; its end is told all the same."""


class Operation:
    """`prepare` and `follow` run in a worker: they gather, scatter and build the batch, which may be empty."""

    def __init__(
        self,
        reactor: Reactor,
        worker: Executor,
        engine: TransferEngine | None,
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
        if not batch or self._engine is None:
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


class StreamOperation:
    """One part that goes through a stream, after those before it."""

    def __init__(self, reactor: Reactor, stream: Stream, move: Move) -> None:
        self._reactor = reactor
        self._stream = stream
        self._move = move

    def begin(self, on_end: OnEnd) -> None:
        self._stream.put(self._move, lambda error: self._reactor.call_soon(lambda: on_end(error)))

    def cancel(self) -> None:
        """Ends all parts of the stream: what is half received cannot be left."""
        self._stream.close()
