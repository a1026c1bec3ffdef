"""One request at a rank that gives cache away: who has asked, which layers are ready, what goes next, what has been acknowledged.

Sans-I/O: side.py brings events and does what `due` says. No clock: deadlines are its owner's timers.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.handover.config import MAX_SLOTS
from kvstore.handover.movements.parts import PartId, PartPlan, RequestState
from kvstore.protocol.errors import KVStoreError, ProtocolError


class PartOffer(NamedTuple):
    """A part that goes to this rank now, through this slot of the staging if parts are gathered."""

    rank: int
    part: PartId
    slot: int


@dataclass(slots=True)
class _Receiver:
    """A counterpart rank that has asked."""

    plan: PartPlan
    free_slots: list[int]
    queued: set[int] = field(default_factory=set)
    """Layers that have gone into `parts`."""
    parts: deque[PartId] = field(default_factory=deque)
    under_way: dict[PartId, int] = field(default_factory=dict)
    """Offered and not acknowledged, with the slot."""
    unacknowledged: int = 0


class CacheSender:
    """See the module. `layers` are the rank's own; `batch_bytes`: layers wait until this much can go to a rank at once."""

    def __init__(self, layers: range, *, batch_bytes: int) -> None:
        self._layers = layers
        self._batch_bytes = batch_bytes
        self._ready: set[int] = set()
        self._expected: frozenset[int] | None = None
        self._receivers: dict[int, _Receiver] = {}
        self.error: KVStoreError | None = None
        self.sent_bytes = 0
        """Acknowledged."""
        self.overlap_bytes = 0
        """Of them, before the last layer was ready."""

    @property
    def state(self) -> RequestState:
        if self.error is not None or self._is_complete():
            return RequestState.OVER
        return RequestState.MOVING if self._expected is not None and self._expected <= self._receivers.keys() else RequestState.WAITING

    def _is_complete(self) -> bool:
        """Every counterpart has all its bytes and has said so."""
        return (
            self._expected is not None
            and self._expected <= self._receivers.keys()
            and not any(receiver.unacknowledged for receiver in self._receivers.values())
        )

    @property
    def is_all_ready(self) -> bool:
        return len(self._ready) == len(self._layers)

    def expect(self, ranks: Iterable[int]) -> None:
        """These ranks take something from this one."""
        self._expected = frozenset(ranks)

    def asked(self, rank: int, plan: PartPlan, *, slots: int) -> None:
        """A counterpart wants this. Raises ProtocolError: it takes nothing from this rank, has asked before, or has no
        slots, or more than there can be."""
        if self._expected is None or rank not in self._expected:
            raise ProtocolError(f"rank {rank} takes nothing from this one")
        if rank in self._receivers:
            raise ProtocolError(f"rank {rank} has asked already")
        if slots > MAX_SLOTS or (plan.is_staged and not slots):
            raise ProtocolError(f"gathered parts need staging of 1 to {MAX_SLOTS} slots; slots is {slots}")
        self._receivers[rank] = _Receiver(plan, list(range(slots)), unacknowledged=plan.unit_count)

    def layer_ready(self, layer: int) -> None:
        """The layer is computed; a second time is a no-op."""
        self._ready.add(layer)

    def due(self) -> list[PartOffer]:
        """What goes now; it is under way from then on."""
        if self.error is not None:
            return []
        offers = []
        for rank, receiver in self._receivers.items():
            self._enqueue(receiver)
            while receiver.parts and (receiver.free_slots or not receiver.plan.is_staged):
                part = receiver.parts.popleft()
                slot = receiver.free_slots.pop() if receiver.plan.is_staged else 0
                receiver.under_way[part] = slot
                offers.append(PartOffer(rank, part, slot))
        return offers

    def _enqueue(self, receiver: _Receiver) -> None:
        """Layers that are ready, as parts, in order; a few small ones wait for more unless there will be none."""
        plan = receiver.plan
        group: list[int] = []
        for layer in [*plan.layers, -1]:
            is_next = layer in self._ready and layer not in receiver.queued
            if group and (not is_next or len(group) == plan.layers_per_part):
                is_full = len(group) == plan.layers_per_part or len(group) * plan.layer_bytes >= self._batch_bytes
                if is_full or self._is_ready_for(plan):
                    receiver.queued.update(group)
                    receiver.parts.extend(PartId(group[0], group[-1] + 1, chunk) for chunk in range(len(plan.chunks)))
                group = []
            if is_next:
                group.append(layer)

    def _is_ready_for(self, plan: PartPlan) -> bool:
        return all(layer in self._ready for layer in plan.layers)

    def acknowledged(self, rank: int, part: PartId, size_bytes: int) -> None:
        """The part is in the receiver's blocks."""
        receiver = self._receivers[rank]
        slot = receiver.under_way.pop(part)
        if receiver.plan.is_staged:
            receiver.free_slots.append(slot)
        receiver.unacknowledged -= len(part.layers)
        self.sent_bytes += size_bytes
        if not self.is_all_ready:
            self.overlap_bytes += size_bytes

    def needs(self, rank: int) -> bool:
        """Whether a counterpart that has asked is still to take something."""
        receiver = self._receivers.get(rank)
        return receiver is not None and receiver.unacknowledged > 0

    def fail(self, error: KVStoreError) -> bool:
        """It has failed; False if it was over before."""
        if self.state is RequestState.OVER:
            return False
        self.error = error
        return True
