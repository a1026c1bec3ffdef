"""What a caller holds of a request under way: to say that layers are ready, to wait, to cancel. It does nothing itself."""

from collections.abc import Callable
from typing import Final

from kvstore.protocol.errors import DeadlineExceeded, KVStoreError
from kvstore.transfer.memory.signal_safety import UninterruptibleEvent

PATIENCE_S: Final = 5.0
"""How long after its deadline and fence a request may take to say that it is over; one that takes longer is at fault."""


class Handover:
    """One request on one rank. Thread-safe."""

    def __init__(self, request_id: bytes, *, limit_s: float) -> None:
        """`limit_s`: from now on, after which it is over in any case."""
        self.request_id = request_id
        self.error: KVStoreError | None = None
        """Why it failed; None while it goes on and after success."""
        self.is_fenced = False
        """Nobody moves bytes of it, now and ever after. False until it is over, and after a failure in which that could not be had: blocks
        must stay."""
        self.is_abandoned = False
        """Whoever waited for it was interrupted: the transceiver ends it as soon as it sees this."""
        self.on_cancel: Callable[[], None]
        self._limit_s = limit_s + PATIENCE_S
        self._over = UninterruptibleEvent(self._limit_s)
        self.wait_uninterruptibly = self._over.wait_uninterruptibly
        """Block until it is over, whatever is raised meanwhile: see UninterruptibleEvent."""

    @property
    def is_over(self) -> bool:
        return self._over.is_set

    def wait(self) -> None:
        """Block until it is over on this rank. Raises its error: DeadlineExceeded, Cancelled, Unreachable (a rank is gone), InvalidArgument
        (engines disagree), StaleHandle (a description of an earlier run), Full, ProtocolError, Closed, or what a rank of either executor
        failed with.

        What a signal handler raises meanwhile, Ctrl-C for one, cancels the request, and comes out once that is over too.
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
        """Have it end soon, with Cancelled unless it is over before. Returns at once; `wait` tells when its blocks may be used."""
        self.on_cancel()

    def finish(self, error: KVStoreError | None, *, is_fenced: bool = True) -> None:
        """For the transceiver; a second time is a no-op."""
        if not self.is_over:
            self.error, self.is_fenced = error, is_fenced
            self._over.set()


class SendHandle(Handover):
    """A request whose cache this rank gives away. Its blocks may be freed once `wait` has returned or raised, if `is_fenced`."""

    def __init__(self, request_id: bytes, *, limit_s: float) -> None:
        super().__init__(request_id, limit_s=limit_s)
        self.on_ready: Callable[[int | None], None]
        self.sent_bytes = 0
        """Acknowledged by receivers so far."""
        self.overlap_bytes = 0
        """Of them, before the last layer of this rank was ready."""

    def layer_ready(self, layer: int) -> None:
        """The layer (the model's number) is in the blocks: its bytes may go. Costs some microseconds; layers of other ranks are ignored."""
        self.on_ready(layer)

    def all_ready(self) -> None:
        """Every layer is."""
        self.on_ready(None)


class ReceiveHandle(Handover):
    """A request whose cache this rank takes. After `wait` has returned or raised nobody writes its blocks any more, if `is_fenced`."""

    received_bytes = 0
    """From senders so far."""
    store_tokens = 0
    """Tokens up to which the store had what was not here before, from `first_token` on; senders were asked for the rest."""
