"""Handles of requests under way: a caller marks layers as ready, waits, or cancels through them."""

from collections.abc import Callable
from typing import Final

from kvstore.protocol.errors import DeadlineExceeded, KVStoreError
from kvstore.transfer.memory.signal_safety import UninterruptibleEvent

END_GRACE_S: Final = 5.0
"""Time after deadline and fence within which a request must end; a longer one is a bug."""


class Handover:
    """One request on one rank. Thread-safe."""

    def __init__(self, request_id: bytes, *, limit_s: float) -> None:
        """Create the handle. `limit_s`: time within which the request ends in any case."""
        self.request_id = request_id
        self.error: KVStoreError | None = None
        """Reason of the failure; None while it is under way and after success."""
        self.is_fenced = False
        """No transfer accesses the blocks any more. False until the request is over, and after a failure in which a
        transfer did not end: the blocks must stay."""
        self.is_abandoned = False
        """Its waiting caller was interrupted: the transceiver ends it at the next check."""
        self.on_cancel: Callable[[], None]
        self._limit_s = limit_s + END_GRACE_S
        self._over = UninterruptibleEvent(self._limit_s)
        self.wait_uninterruptibly = self._over.wait_uninterruptibly
        """Block until it is over, whatever is raised meanwhile: see UninterruptibleEvent."""

    @property
    def is_over(self) -> bool:
        return self._over.is_set

    def wait(self) -> None:
        """Block until the request is over on this rank. Raises its error:

        - DeadlineExceeded, Cancelled, Full, Closed, ProtocolError.
        - Unreachable: a rank is unreachable.
        - InvalidArgument: the engines disagree.
        - StaleHandle: the description is of an earlier run.
        - The error that a rank of either executor failed with.

        An exception of a signal handler, such as Ctrl-C, cancels the request and is raised once that is over.
        """
        try:
            is_over = self._over.wait(self._limit_s)
        except BaseException:
            self.is_abandoned = True
            try:
                self.cancel()
            finally:
                self.wait_uninterruptibly()
            raise
        if not is_over:
            raise DeadlineExceeded(f"request {self.request_id!r} did not end at its deadline: its blocks must stay")
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        """Cancel the request unless it is over. Returns at once; after `wait` the blocks may be used."""
        self.on_cancel()

    def finish(self, error: KVStoreError | None, *, is_fenced: bool = True) -> None:
        """Record the outcome. For the transceiver; repeated calls are no-ops."""
        if not self.is_over:
            self.error, self.is_fenced = error, is_fenced
            self._over.set()


class SendHandle(Handover):
    """Request that this rank sends. Its blocks may be freed once `wait` has returned or raised, if `is_fenced`."""

    def __init__(self, request_id: bytes, *, limit_s: float) -> None:
        super().__init__(request_id, limit_s=limit_s)
        self.on_ready: Callable[[int | None], None]
        self.sent_bytes = 0
        """Bytes that receivers have acknowledged."""
        self.overlap_bytes = 0
        """Part of them that was acknowledged before this rank's last layer was ready."""

    def layer_ready(self, layer: int) -> None:
        """Mark a layer (the model's number) as ready to send. Costs some microseconds; layers of other ranks are
        ignored."""
        self.on_ready(layer)

    def all_ready(self) -> None:
        """Mark every layer as ready."""
        self.on_ready(None)


class ReceiveHandle(Handover):
    """Request that this rank receives. Its blocks are not written any more once `wait` has returned or raised, if
    `is_fenced`."""

    received_bytes = 0
    """Bytes that arrived from senders."""
    store_tokens = 0
    """Tokens up to which the store had the sequence, from `first_token` on; senders send the rest."""
