"""Resources that both sides of a rank share: memory, transfer engine, staging, connections; and plans of parts."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.handover.config import HandoverSettings
from kvstore.handover.description import RankInfo
from kvstore.handover.handles import Handover
from kvstore.handover.movements.movement import LayerWindow
from kvstore.handover.movements.parts import Chunk, PartPlan, plan_parts, unit_tokens
from kvstore.handover.movements.staging_buffers import StagingPool
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
"""Delay before a failed transfer fails its request: the peer's own error, which is more precise, may be on its way."""
STOP_TIMEOUT_S = 1.0
"""Deadline of a failure's notification. A peer that misses it fails at its own deadline."""


class RankSetup(NamedTuple):
    """Arguments of a rank's transceiver: see CacheTransceiver."""

    layout: CacheLayout
    rank: int
    regions: Sequence[Region]
    engine: TransferEngine
    settings: HandoverSettings
    store: RankPrefixStore | None


@dataclass(slots=True)
class RankResources:
    """Shared resources of a rank. The reactor's thread only, except engine, staging and worker."""

    layout: CacheLayout
    rank: int
    regions: Sequence[Region]
    engine: TransferEngine
    settings: HandoverSettings
    reactor: Reactor
    worker: Executor
    staging: StagingPool
    connections: RankConnections
    begun: Callable[[bytes, int], None]
    """(request id, deadline): reports to the executor."""
    over: Callable[[Handover, int], None]
    """(handle, deadline): reports to the executor."""

    _pool: LayerWindow | None = None
    _peers: dict[bytes, Peer] = field(default_factory=dict)
    """Peers of the transfer engine, by the instance of connected ranks."""

    def connect(self, info: RankInfo) -> Peer:
        """Connect the engine to a rank, until `lost` or `close`. Raises as `TransferEngine.connect`."""
        peer = self._peers[info.instance] = self.engine.connect(info.engine)
        return peer

    def lost(self, info: RankInfo) -> None:
        """Disconnect the engine from an unreachable rank, whose requests have failed. Its mapped pool is unmapped; a
        restarted process has another pool."""
        peer = self._peers.pop(info.instance, None)
        if peer is not None and peer not in self._peers.values():
            self.engine.disconnect(peer)

    def readable_pool(self) -> LayerWindow:
        """Return read access to the pool, for the life of this rank: local peers map it once, which costs 50 ms a GiB.

        Data that they read after a request has ended is not confirmed.
        """
        if self._pool is None:
            self._pool = LayerWindow(self.engine, self.regions, writable=False)
        return self._pool

    def close(self) -> None:
        """Disconnect all ranks and end read access. Raises DeadlineExceeded if a peer keeps reading; everything else
        is closed then."""
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
        """Notify a peer that a request failed here."""
        message = CancelRequest(request_id, error.code, f"rank {self.rank}: {error}"[:1000])
        self.connections.send_request(peer, message, deadline_s=STOP_TIMEOUT_S, on_answer=lambda _: None)


def remapping_of(source: CacheLayout, destination: CacheLayout, *, source_dp: int, destination_dp: int) -> Remapping:
    """Return the conversion. Raises InvalidArgument: different models, or incompatible layouts."""
    ours, theirs = source.spec.model, destination.spec.model
    if ours and theirs and ours != theirs:
        raise InvalidArgument(f"the sender has the cache of {ours}, the receiver of {theirs}")
    return remap(source, destination, source_dp=source_dp, destination_dp=destination_dp)


def plan_of(remapping: Remapping, source_rank: int, destination_rank: int, *, first_token: int, tokens: int, part_bytes: int) -> PartPlan:
    """Return the parts that one rank sends to another, equal at both ends. Raises InvalidArgument."""
    layers = remapping.pair(source_rank, destination_rank).layers

    def measure(chunk: Chunk) -> int:
        one = range(layers.start, layers.start + 1)
        return remapping.staged_bytes(source_rank, destination_rank, tokens=chunk.end, first_token=chunk.start, layers=one)

    unit = unit_tokens(remapping.source, remapping.destination)
    return plan_parts(layers, Chunk(first_token, tokens), unit, measure=measure, part_bytes=part_bytes)
