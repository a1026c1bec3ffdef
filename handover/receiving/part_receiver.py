"""Receives parts from one sender rank: pushed or read, direct or scattered. CacheReceiver tracks what is missing.

The receiver chooses the transfer mode of each pair of ranks, and whether parts are gathered.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.handover.description import RankInfo, is_same_host
from kvstore.handover.movements.movement import LayerWindow, Movement, MoveOperation
from kvstore.handover.movements.parts import PartId, PartPlan
from kvstore.handover.resources import RankResources
from kvstore.kvcache.layouts.formatter import Remapping
from kvstore.protocol.errors import ConfigError, ProtocolError
from kvstore.protocol.handover_messages import PULL, PUSH, ExportRegions, PartReady, RequestCache
from kvstore.transfer.memory.region import Region
from kvstore.transfer.paths.batch import Copy, Runs, Span
from kvstore.transfer.paths.peer import Peer, PeerRegion


class TransferMode(NamedTuple):
    """PUSH or PULL; size of gathered parts, 0 for direct copies; the engine's peer."""

    way: int
    part_bytes: int
    peer: Peer


def choose_way(resources: RankResources, info: RankInfo, remapping: Remapping) -> TransferMode:
    """Return the transfer mode from sender `info` to this rank. Raises ConfigError: the settings' mode is
    impossible; Unreachable: no common transport; ProtocolError."""
    settings, peer = resources.settings, resources.connect(info)
    is_pull = settings.way == "pull" or (settings.way == "auto" and _is_shared_memory_first(peer) and is_same_host(info))
    is_shm_only = {path.transport for path in peer.routes} == {"shm"}
    is_short = remapping.run_bytes(info.rank, resources.rank) < settings.direct_min_bytes
    # If shared memory is the only transport and the pool is not shared, parts go through staging, which is.
    is_staged = is_short or (is_pull and is_shm_only and not info.is_shared)
    if is_shm_only and not is_pull:
        raise ConfigError("way is push, but the ranks only share memory, which the sender may not write: set way to auto or pull")
    return TransferMode(PULL if is_pull else PUSH, settings.staging_part_bytes if is_staged else 0, peer)


def _is_shared_memory_first(peer: Peer) -> bool:
    path, _ = min(peer.routes.items(), key=lambda item: item[1].facts.preference)
    return path.transport == "shm"


class PartReceiver:
    """Transfer of one pair's parts. Owns staging and access to it until `release`; access to the pool belongs to the
    request.

    `way` None: the sender has no parts for this rank and is only notified.
    """

    def __init__(
        self,
        resources: RankResources,
        info: RankInfo,
        way: TransferMode | None,
        remapping: Remapping,
        plan: PartPlan,
        blocks: NDArray[np.int64],
        *,
        deadline_ns: int,
    ) -> None:
        self.info, self.plan = info, plan
        self._resources, self._remapping, self._blocks, self._deadline_ns = resources, remapping, blocks, deadline_ns
        self._way = way if plan.unit_count else None
        self._sources: Sequence[PeerRegion] = ()
        self._their_blocks: NDArray[np.int64] = np.zeros(0, np.int64)
        self._staging: Region | None = None
        self.window: LayerWindow | None = None

    @property
    def is_pool_written(self) -> bool:
        """True if the sender writes directly into the pool."""
        return self._way is not None and self._way.way == PUSH and not self.plan.is_staged

    @property
    def is_reading(self) -> bool:
        """True if this side reads the sender's memory."""
        return self._way is not None and self._way.way == PULL

    def open(self) -> None:
        """Prepare staging and access. Raises Full, or errors of the engine."""
        resources, way = self._resources, self._way
        if way is None:
            return
        if self.plan.is_staged:
            self._staging = resources.staging.take(self.plan.slot_bytes * resources.settings.staging_slots)
        if way.way == PUSH and self._staging is not None:
            self.window = LayerWindow(resources.engine, [self._staging], writable=True)

    def complete(self, ask: RequestCache, pool: LayerWindow | None) -> RequestCache:
        """Return the request with what this sender needs for the transfer."""
        way = self._way
        if way is not None:
            window = self.window or (pool if self.is_pool_written else None)
            ask.mode, ask.part_bytes, ask.slots = way.way, way.part_bytes, self._resources.settings.staging_slots
            ask.regions = window.descriptions if window is not None else []
            ask.blocks = self._blocks.astype(np.uint64).tolist() if self.is_pool_written else []
        return ask

    def shown(self, message: ExportRegions) -> None:
        """The sender exported regions to read. Raises ProtocolError."""
        resources, way = self._resources, self._way
        if way is None or way.way != PULL:
            raise ProtocolError("regions were exported to a receiver that does not read")
        self._their_blocks = np.array(message.blocks, np.int64)
        self._sources = [resources.engine.import_region(way.peer, region) for region in message.regions]

    def movement(self, message: PartReady) -> Movement | None:
        """Return this side's transfer of a part into its blocks; None if it has none. Raises ProtocolError."""
        resources, way = self._resources, self._way
        part = PartId(message.layer_start, message.layer_end, message.chunk)
        if way is None or self.is_pool_written:
            return None
        deadline_s = resources.left_s(self._deadline_ns)
        if not self.plan.is_staged:
            self._check_shown()
            return MoveOperation(resources.reactor, resources.worker, resources.engine, lambda: self._copies(part), deadline_s=deadline_s)
        staging, at, size_bytes = self._staging, message.slot * self.plan.slot_bytes, message.size_bytes
        assert staging is not None
        scatter = self._scatter(part, staging.part(at, size_bytes))
        batch: list[Copy] = []
        if way.way == PULL:
            self._check_shown()
            batch = [(Span(self._sources[0], at), Span(staging, at), size_bytes)]
        return MoveOperation(resources.reactor, resources.worker, resources.engine, lambda: batch, scatter, deadline_s=deadline_s)

    def _check_shown(self) -> None:
        if not self._sources:
            raise ProtocolError("a part was announced before the regions to read it from")

    def _scatter(self, part: PartId, staged: memoryview) -> Callable[[], None]:
        def scatter() -> None:
            memory = [region.memory for region in self._resources.regions]
            array = np.frombuffer(staged, np.uint8)
            self._remapping.scatter(self.info.rank, self._resources.rank, memory, self._blocks, array, **self.plan.extent(part))

        return scatter

    def _copies(self, part: PartId) -> Runs:
        """Return the copies directly from the sender's pool into this one."""
        found = self._remapping.copies(self.info.rank, self._resources.rank, self._their_blocks, self._blocks, **self.plan.extent(part))
        return Runs(self._sources, self._resources.regions, *found)

    def release(self, *, is_fenced: bool) -> None:
        """End the transfer. Staging that a peer may still access is not reused."""
        if self._staging is not None and is_fenced:
            self._resources.staging.release(self._staging)
