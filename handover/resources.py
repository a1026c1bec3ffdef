"""What both sides of a rank share: its memory, the ways out of it, and the small decisions that need nothing else."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.handover.config import HandoverSettings
from kvstore.handover.description import RankInfo
from kvstore.handover.handles import Handover
from kvstore.handover.movements.movement import LayerWindow
from kvstore.handover.movements.parts import Chunk, PartPlan, plan_parts, unit_tokens
from kvstore.handover.movements.staging import StagingPool
from kvstore.handover.prefix import RankPrefixStore
from kvstore.handover.ranks.rank_connections import RankConnections
from kvstore.kvcache.layouts.formatter import Remapping, remap
from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.protocol.errors import DeadlineExceeded, InvalidArgument, KVStoreError
from kvstore.protocol.handover_messages import CancelRequest
from kvstore.rpc.reactor import Reactor
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.memory.region import Region
from kvstore.transfer.paths.peer import Peer

REASON_GRACE_S = 0.25
"""Bytes that do not come, or cannot go, because the peer has ended the request: why it did is on its way, and says more than the engine."""
STOP_TIMEOUT_S = 1.0
"""For the word that a request has failed; a peer that does not hear it finds out at its own deadline."""


class RankSetup(NamedTuple):
    """A rank as its transceiver was made: see CacheTransceiver."""

    layout: CacheLayout
    rank: int
    regions: Sequence[Region]
    engine: TransferEngine
    settings: HandoverSettings
    store: RankPrefixStore | None


@dataclass(slots=True)
class RankResources:
    """See the module. Everything but the engine, the staging and the worker belongs to the reactor's thread."""

    layout: CacheLayout
    rank: int
    regions: Sequence[Region]
    engine: TransferEngine
    settings: HandoverSettings
    reactor: Reactor
    worker: Executor
    staging: StagingPool
    links: RankConnections
    begun: Callable[[bytes, int], None]
    """(request id, deadline): tell the executor."""
    over: Callable[[Handover, int], None]
    """(handle, deadline): tell the executor."""

    _pool: LayerWindow | None = None
    _peers: dict[bytes, Peer] = field(default_factory=dict)
    """The engine's, of ranks that are connected, by their instance."""

    def connect(self, info: RankInfo) -> Peer:
        """A rank as the engine's peer, until it is lost, or `close`. Raises as `TransferEngine.connect`."""
        peer = self._peers[info.instance] = self.engine.connect(info.engine)
        return peer

    def lost(self, info: RankInfo) -> None:
        """A rank is gone, and its requests have failed: the engine is to keep nothing of it. A pool that is mapped stays in memory for as
        long, and the process that takes its place has another."""
        peer = self._peers.pop(info.instance, None)
        if peer is not None and peer not in self._peers.values():
            self.engine.disconnect(peer)

    def readable_pool(self) -> LayerWindow:
        """Leave to read the pool, for as long as this rank lives: peers of this host map it once, which costs them 50 ms a GiB.

        What they read when it is not theirs any more is not confirmed.
        """
        if self._pool is None:
            self._pool = LayerWindow(self.engine, self.regions, writable=False)
        return self._pool

    def close(self) -> None:
        """The engine keeps nothing of other ranks, and nobody reads the pool any more. Raises DeadlineExceeded if somebody goes on; all
        else of it is closed then."""
        for peer in self._peers.values():
            self.engine.disconnect(peer)
        self._peers.clear()
        if self._pool is None or self._pool.close():
            return
        deadline_ns, late = self.reactor.now_ns() + int(self.settings.fence_timeout_s * 1e9), None
        for region in self._pool.regions:
            try:
                region.close(deadline_s=self.left_s(deadline_ns))
            except DeadlineExceeded as error:
                late = error
        if late is not None:
            raise late

    @property
    def dp(self) -> int:
        return self.layout.parallel.group_of(self.rank)

    def left_s(self, deadline_ns: int) -> float:
        return max((deadline_ns - self.reactor.now_ns()) / 1e9, 0.001)

    def stop(self, peer: RankInfo, request_id: bytes, error: KVStoreError) -> None:
        """Tell a peer that a request has failed here."""
        message = CancelRequest(request_id, error.code, f"rank {self.rank}: {error}"[:1000])
        self.links.tell(peer, message, deadline_s=STOP_TIMEOUT_S, on_answer=lambda _: None)


def remapping_of(source: CacheLayout, destination: CacheLayout, *, source_dp: int, destination_dp: int) -> Remapping:
    """Raises InvalidArgument: the engines disagree about the model, or one layout cannot be mapped to the other."""
    ours, theirs = source.spec.model, destination.spec.model
    if ours and theirs and ours != theirs:
        raise InvalidArgument(f"the sender has the cache of {ours}, the receiver of {theirs}")
    return remap(source, destination, source_dp=source_dp, destination_dp=destination_dp)


def plan_of(remapping: Remapping, source_rank: int, destination_rank: int, *, first_token: int, tokens: int, part_bytes: int) -> PartPlan:
    """What one rank gives another: the same at both ends. Raises InvalidArgument."""
    layers = remapping.pair(source_rank, destination_rank).layers

    def measure(chunk: Chunk) -> int:
        one = range(layers.start, layers.start + 1)
        return remapping.staged_bytes(source_rank, destination_rank, tokens=chunk.end, first_token=chunk.start, layers=one)

    unit = unit_tokens(remapping.source, remapping.destination)
    return plan_parts(layers, Chunk(first_token, tokens), unit, measure=measure, part_bytes=part_bytes)
