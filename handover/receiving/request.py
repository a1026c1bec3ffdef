"""State machine of one request on a receiving rank: parts that each sender owes, has offered, and that are in the
blocks.

Sans-I/O: side.py passes events in and moves bytes. Without a clock: its owner has the timers.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from kvstore.handover.movements.parts import PartId, PartPlan, RequestState
from kvstore.protocol.errors import KVStoreError, ProtocolError


@dataclass(slots=True)
class _Sender:
    """Remote rank that owes parts."""

    plan: PartPlan
    missing: set[tuple[int, int]]
    """(layer, chunk) pairs that it has not offered."""
    outstanding: int
    """Number of pairs that are not in the blocks."""
    under_way: dict[PartId, int] = field(default_factory=dict)
    """Slot of each part that was offered and is not in the blocks."""


class CacheReceiver:
    """State of one request on a receiving rank. Not thread-safe.

    `plans`: parts of each sender rank, possibly none; such a sender is notified, so that it knows that it is done.
    `confirming`: senders whose memory is read, and who must confirm that the data was still the request's.
    """

    def __init__(self, plans: Mapping[int, PartPlan], *, confirming: Collection[int] = ()) -> None:
        self._senders = {
            rank: _Sender(plan, {(layer, chunk) for layer in plan.layers for chunk in range(len(plan.chunks))}, plan.unit_count)
            for rank, plan in plans.items()
        }
        self._unacknowledged = set(plans)
        self._unconfirmed = {rank for rank in confirming if plans[rank].unit_count}
        self._has_begun = False
        self.error: KVStoreError | None = None
        self.received_bytes = 0

    @property
    def state(self) -> RequestState:
        if self.error is not None or not any(map(self.needs, self._senders)):
            return RequestState.OVER
        return RequestState.MOVING if self._has_begun else RequestState.WAITING

    def answered(self, rank: int) -> None:
        """The sender acknowledged this rank's request."""
        self._unacknowledged.discard(rank)

    def offered(self, rank: int, part: PartId, slot: int, *, slots: int, size_bytes: int) -> None:
        """A sender offers a part. Raises ProtocolError: it does not owe the part, offers it again, or its slot is
        invalid, in use, or too small."""
        sender = self._senders.get(rank)
        if sender is None or not sender.plan.has(part):
            raise ProtocolError(f"rank {rank} offers {part}, which was not requested")
        if not sender.missing.issuperset(part.units):
            raise ProtocolError(f"rank {rank} offers {part} a second time")
        if sender.plan.is_staged and (slot >= slots or slot in sender.under_way.values() or size_bytes > sender.plan.slot_bytes):
            raise ProtocolError(f"rank {rank} offers {size_bytes} bytes in slot {slot}, which is in use, unknown, or too small")
        self._has_begun = True
        sender.missing.difference_update(part.units)
        sender.under_way[part] = slot

    def taken(self, rank: int, part: PartId, size_bytes: int) -> None:
        """The part is in the blocks."""
        sender = self._senders[rank]
        del sender.under_way[part]
        sender.outstanding -= len(part.layers)
        self.received_bytes += size_bytes

    def confirmed(self, rank: int) -> None:
        """The sender confirmed the data that was read. Raises ProtocolError: not all of it was read."""
        if rank not in self._unconfirmed or self._senders[rank].outstanding:
            raise ProtocolError(f"rank {rank} confirms data that was not read")
        self._unconfirmed.discard(rank)

    def needs(self, rank: int) -> bool:
        """Return whether a sender still owes parts, an acknowledgement or a confirmation."""
        sender = self._senders.get(rank)
        return sender is not None and (sender.outstanding > 0 or rank in self._unacknowledged or rank in self._unconfirmed)

    def fail(self, error: KVStoreError) -> bool:
        """Fail the request; return False if it was over."""
        if self.state is RequestState.OVER:
            return False
        self.error = error
        return True
