"""State machine of one request on a sending rank: receivers, ready layers, parts in flight, acknowledgements.

Sans-I/O: side.py passes events in and carries out `due`. Without a clock: its owner has the timers.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.handover.config import MAX_SLOTS
from kvstore.handover.movements.parts import PartId, PartPlan, RequestState
from kvstore.protocol.errors import KVStoreError, ProtocolError


class PartOffer(NamedTuple):
    """A part to send to this rank now, through this staging slot if parts are gathered."""

    rank: int
    part: PartId
    slot: int


@dataclass(slots=True)
class _Receiver:
    """Remote rank that has requested parts."""

    plan: PartPlan
    free_slots: list[int]
    queued: set[int] = field(default_factory=set)
    """Layers that are in `parts`."""
    parts: deque[PartId] = field(default_factory=deque)
    under_way: dict[PartId, int] = field(default_factory=dict)
    """Staging slot of each part that was sent and not acknowledged."""
    unacknowledged: int = 0


class CacheSender:
    """State of one request on a sending rank. `layers`: the rank's own. `batch_bytes`: minimum size before layers
    are sent. Not thread-safe."""

    def __init__(self, layers: range, *, batch_bytes: int) -> None:
        self._layers = layers
        self._batch_bytes = batch_bytes
        self._ready: set[int] = set()
        self._expected: frozenset[int] | None = None
        self._receivers: dict[int, _Receiver] = {}
        self.error: KVStoreError | None = None
        self.sent_bytes = 0
        """Acknowledged bytes."""
        self.overlap_bytes = 0
        """Part of `sent_bytes` that was acknowledged before the last layer was ready."""

    @property
    def state(self) -> RequestState:
        if self.error is not None or self._is_complete():
            return RequestState.OVER
        return RequestState.MOVING if self._expected is not None and self._expected <= self._receivers.keys() else RequestState.WAITING

    def _is_complete(self) -> bool:
        """Return whether every receiver has acknowledged all its bytes."""
        return (
            self._expected is not None
            and self._expected <= self._receivers.keys()
            and not any(receiver.unacknowledged for receiver in self._receivers.values())
        )

    @property
    def is_all_ready(self) -> bool:
        return len(self._ready) == len(self._layers)

    def expect(self, ranks: Iterable[int]) -> None:
        """Set the ranks that receive from this one."""
        self._expected = frozenset(ranks)

    def asked(self, rank: int, plan: PartPlan, *, slots: int) -> None:
        """A remote rank requested its parts. Raises ProtocolError: it receives nothing from this rank, has requested
        before, or has too few or too many slots."""
        if self._expected is None or rank not in self._expected:
            raise ProtocolError(f"rank {rank} receives nothing from this rank")
        if rank in self._receivers:
            raise ProtocolError(f"rank {rank} has requested this already")
        if slots > MAX_SLOTS or (plan.is_staged and not slots):
            raise ProtocolError(f"gathered parts need staging of 1 to {MAX_SLOTS} slots; slots is {slots}")
        self._receivers[rank] = _Receiver(plan, list(range(slots)), unacknowledged=plan.unit_count)

    def layer_ready(self, layer: int) -> None:
        """Mark the layer as computed. Repeated calls are no-ops."""
        self._ready.add(layer)

    def due(self) -> list[PartOffer]:
        """Return the parts to send now and mark them as in flight."""
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
        """Queue ready layers as parts, in order. A small batch waits for more layers unless none will follow."""
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
        """The receiver has the part in its blocks."""
        receiver = self._receivers[rank]
        slot = receiver.under_way.pop(part)
        if receiver.plan.is_staged:
            receiver.free_slots.append(slot)
        receiver.unacknowledged -= len(part.layers)
        self.sent_bytes += size_bytes
        if not self.is_all_ready:
            self.overlap_bytes += size_bytes

    def needs(self, rank: int) -> bool:
        """Return whether a receiver still lacks parts."""
        receiver = self._receivers.get(rank)
        return receiver is not None and receiver.unacknowledged > 0

    def fail(self, error: KVStoreError) -> bool:
        """Fail the request; return False if it was over."""
        if self.state is RequestState.OVER:
            return False
        self.error = error
        return True
