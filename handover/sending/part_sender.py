"""Sends parts from this rank to one receiver rank: gathered or direct, pushed or read by the receiver. CacheSender
decides the order."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.handover.description import RankInfo
from kvstore.handover.movements.movement import LayerWindow, Movement, MoveOperation
from kvstore.handover.movements.parts import PartId, PartPlan
from kvstore.handover.resources import RankResources
from kvstore.handover.sending.request import PartOffer
from kvstore.kvcache.layouts.formatter import Remapping
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.handover_messages import PULL, PUSH, ExportRegions, PartReady, RequestCache
from kvstore.transfer.memory.region import Region
from kvstore.transfer.paths.batch import Batch, Runs, Span
from kvstore.transfer.paths.peer import PeerRegion


class PartSender:
    """Transfer of one pair's parts. Owns staging and access to it until `release`. The reactor's thread calls it; a
    worker gathers."""

    def __init__(
        self,
        resources: RankResources,
        info: RankInfo,
        ask: RequestCache,
        remapping: Remapping,
        plan: PartPlan,
        blocks: NDArray[np.int64],
        *,
        deadline_ns: int,
    ) -> None:
        self.info, self.deadline_ns = info, deadline_ns
        self._resources, self._ask, self._remapping, self._plan, self._blocks = resources, ask, remapping, plan, blocks
        self._their_blocks = np.array(ask.blocks, np.int64)
        self._targets: Sequence[PeerRegion] = ()
        self._staging: Region | None = None
        self.window: LayerWindow | None = None

    @property
    def reads_pool(self) -> bool:
        """True if the receiver reads directly from the pool."""
        return self._ask.mode == PULL and not self._plan.is_staged

    def open(self) -> None:
        """Prepare staging and access. Raises InvalidArgument, Full, or errors of the engine."""
        resources, ask = self._resources, self._ask
        if self._plan.is_staged:
            self._staging = resources.staging.take(self._plan.slot_bytes * ask.slots)
        if ask.mode == PUSH:
            peer = resources.connect(self.info)
            self._targets = [resources.engine.import_region(peer, region) for region in ask.regions]
        elif ask.mode != PULL:
            raise InvalidArgument(f"transfer mode {ask.mode} is unknown here: run the same release on both sides")
        elif self._staging is not None:
            self.window = LayerWindow(resources.engine, [self._staging], writable=False)

    @property
    def confirms(self) -> bool:
        """True if the receiver reads, and so needs a confirmation that the data was still the request's."""
        return self._ask.mode == PULL

    def show(self) -> ExportRegions | None:
        """Return the regions for a reading receiver; None for others."""
        if self._ask.mode != PULL:
            return None
        window = self.window or self._resources.readable_pool()
        return ExportRegions(self._ask.request_id, window.descriptions, self._blocks.astype(np.uint64).tolist() if self.reads_pool else [])

    def message(self, offer: PartOffer) -> PartReady:
        """Return the message that announces a part."""
        part = offer.part
        size_bytes = self._remapping.staged_bytes(self._resources.rank, self.info.rank, **self._plan.extent(part))
        return PartReady(self._ask.request_id, part.layer_start, part.layer_end, part.chunk, offer.slot, size_bytes)

    def movement(self, offer: PartOffer, size_bytes: int) -> Movement | None:
        """Return this side's transfer of a part; None if it has none."""
        resources, part, at = self._resources, offer.part, offer.slot * self._plan.slot_bytes
        if self.reads_pool:
            return None

        def prepare() -> Batch:
            if not self._plan.is_staged:
                return self._copies(part)
            staging = self._gathered(part, at, size_bytes)
            return [(Span(staging, at), Span(self._targets[0], at), size_bytes)] if self._ask.mode == PUSH else []

        return MoveOperation(resources.reactor, resources.worker, resources.engine, prepare, deadline_s=resources.left_s(self.deadline_ns))

    def _gathered(self, part: PartId, at: int, size_bytes: int) -> Region:
        """Gather the part into staging and return that."""
        assert self._staging is not None
        out = np.frombuffer(self._staging.memory, np.uint8)[at : at + size_bytes]
        memory = [region.memory for region in self._resources.regions]
        self._remapping.gather(self._resources.rank, self.info.rank, memory, self._blocks, out=out, **self._plan.extent(part))
        return self._staging

    def _copies(self, part: PartId) -> Runs:
        """Return the copies from the pool directly into the receiver's."""
        found = self._remapping.copies(self._resources.rank, self.info.rank, self._blocks, self._their_blocks, **self._plan.extent(part))
        return Runs(self._resources.regions, self._targets, *found)

    def release(self, *, is_fenced: bool) -> None:
        """End the transfer. Staging that a peer may still access is not reused."""
        if self._staging is not None and is_fenced:
            self._resources.staging.release(self._staging)
