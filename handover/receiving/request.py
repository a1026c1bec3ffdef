"""One request at a rank that takes cache: what each sender rank owes, what it has offered, what is in the blocks.

Sans-I/O: side.py brings events and moves bytes. No clock: deadlines are its owner's timers.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from kvstore.handover.movements.parts import PartId, PartPlan, RequestState
from kvstore.protocol.errors import KVStoreError, ProtocolError


@dataclass(slots=True)
class _Sender:
    """A counterpart rank that owes something."""

    plan: PartPlan
    missing: set[tuple[int, int]]
    """(layer, chunk) pairs that it has not offered."""
    untaken: int
    """Pairs that are not in the blocks."""
    under_way: dict[PartId, int] = field(default_factory=dict)
    """Offered and not taken, with the slot."""


class CacheReceiver:
    """See the module. `plans`: what each sender rank owes, nothing perhaps: it is asked all the same, and knows then that it is done.

    Of senders that are `confirming` bytes are read: only they know whether these were still the request's.
    """

    def __init__(self, plans: Mapping[int, PartPlan], *, confirming: Collection[int] = ()) -> None:
        self._senders = {
            rank: _Sender(plan, {(layer, chunk) for layer in plan.layers for chunk in range(len(plan.chunks))}, plan.unit_count)
            for rank, plan in plans.items()
        }
        self._unanswered = set(plans)
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
        """The sender has heard what is wanted of it, be it nothing."""
        self._unanswered.discard(rank)

    def offered(self, rank: int, part: PartId, slot: int, *, slots: int, size_bytes: int) -> None:
        """A sender offers a part. Raises ProtocolError: it is none of what this sender owes, or comes a second time, or its slot is
        none or taken, or it is larger than a slot."""
        sender = self._senders.get(rank)
        if sender is None or not sender.plan.has(part):
            raise ProtocolError(f"rank {rank} offers {part}, which it was not asked for")
        if not sender.missing.issuperset(part.units):
            raise ProtocolError(f"rank {rank} offers {part} a second time")
        if sender.plan.is_staged and (slot >= slots or slot in sender.under_way.values() or size_bytes > sender.plan.slot_bytes):
            raise ProtocolError(f"rank {rank} offers {size_bytes} bytes in slot {slot}, which is not free, not there, or too small")
        self._has_begun = True
        sender.missing.difference_update(part.units)
        sender.under_way[part] = slot

    def taken(self, rank: int, part: PartId, size_bytes: int) -> None:
        """The part is in the blocks."""
        sender = self._senders[rank]
        del sender.under_way[part]
        sender.untaken -= len(part.layers)
        self.received_bytes += size_bytes

    def confirmed(self, rank: int) -> None:
        """What was read from this sender was the request's. Raises ProtocolError: not all of it has been read."""
        if rank not in self._unconfirmed or self._senders[rank].untaken:
            raise ProtocolError(f"rank {rank} confirms what was not read")
        self._unconfirmed.discard(rank)

    def needs(self, rank: int) -> bool:
        """Whether a sender still owes something, or has not heard."""
        sender = self._senders.get(rank)
        return sender is not None and (sender.untaken > 0 or rank in self._unanswered or rank in self._unconfirmed)

    def fail(self, error: KVStoreError) -> bool:
        """It has failed; False if it was over before."""
        if self.state is RequestState.OVER:
            return False
        self.error = error
        return True
