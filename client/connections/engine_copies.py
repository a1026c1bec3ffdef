"""The client's transfer engine, created at first use, with nodes of other hosts as peers. Sans-I/O: see effects.py.

A node whose engine is unreachable (behind a firewall, say) serves its values by messages for a cooldown: slower, but it
works.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.client.connections.cluster_connections import ClusterConnections
from kvstore.client.connections.registered_memory import Registry
from kvstore.client.connections.routes import KnownNode
from kvstore.client.core.effects import AnyChannel, Operation, RequestEffect, RunInThreadEffect, TransferEffect
from kvstore.client.stats import ClientCounters
from kvstore.protocol.errors import (
    Broken,
    Closed,
    ConfigError,
    DeadlineExceeded,
    Denied,
    Fenced,
    KVStoreError,
    ProtocolError,
    StaleHandle,
    Unavailable,
    Unreachable,
)
from kvstore.protocol.frames import MAX_BATCH
from kvstore.protocol.node_messages import ExportSlabs, ExportSlabsReply
from kvstore.rpc.client.blocking_socket import MAX_FDS
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.tracing import CALL
from kvstore.transfer.config import TransferSettings

if TYPE_CHECKING:
    from kvstore.security.tls.certificates import Certificates
    from kvstore.transfer.engine import TransferEngine
    from kvstore.transfer.paths.batch import Copy
    from kvstore.transfer.paths.peer import Peer, PeerRegion


COOLDOWN_S: Final = 10.0
"""Cooldown after a node's engine could not be reached."""

MAX_SLABS: Final = MAX_BATCH
"""Slabs kept per node, as many as one batch can name."""


class SlabId(NamedTuple):
    """Slab of one process of a node: `epoch` distinguishes restarts, which reuse slab ids."""

    node_id: int
    epoch: int
    slab: int


class RemoteMemory:
    """The transfer engine with its peers and their slabs. Thread-safe; owns the engine."""

    def __init__(
        self, settings: TransferSettings, clock_ns: Callable[[], int] = time.monotonic_ns, *, tls: "Certificates | None" = None
    ) -> None:
        self._settings = settings
        self._tls = tls
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._engine: TransferEngine | None = None
        self._is_closed = False
        self._peers: dict[int, tuple[bytes, Peer]] = {}
        self._cooldowns: dict[int, tuple[int, int]] = {}
        """(revision of the node's description, end in ns) by node. A changed description ends the cooldown."""
        self._slabs: dict[int, tuple[int, dict[int, PeerRegion]]] = {}
        """(epoch of the process, exported slabs in order) by node."""

    @property
    def engine(self) -> "TransferEngine":
        """The engine, created if need be in some milliseconds.

        Raises ConfigError for settings that cannot be met, Unreachable if the network interfaces cannot be read,
        Closed.
        """
        from kvstore.transfer.engine import TransferEngine

        with self._lock:
            if self._is_closed:
                raise Closed("the client is closed")
            if self._engine is None:
                try:
                    self._engine = TransferEngine(settings=self._settings, serves=False, tls=self._tls)
                except Broken as error:
                    raise Unreachable(f"no transfer engine: the topology of this host is unknown: {error}") from None
            return self._engine

    @property
    def is_started(self) -> bool:
        return self._engine is not None

    def refresh(self) -> bool:
        """Rescan this host's network links: True if the engine's paths changed. Takes some milliseconds."""
        from kvstore.transfer.topology.discovery import Discovery

        engine = self._engine
        if engine is None:
            return False
        try:
            return engine.refresh(Discovery.configured(self._settings).read_topology())
        except (Broken, ConfigError):  # the interfaces cannot be read, or a configured rail is gone
            return False

    def is_usable(self, node: KnownNode) -> bool:
        """Return whether the node has an engine that is not in cooldown."""
        revision, until_ns = self._cooldowns.get(node.node_id, (0, 0))
        return bool(node.transfer) and (revision != node.revision or until_ns <= self._clock_ns())

    def failed(self, node: KnownNode) -> None:
        """Start a cooldown: the node's engine could not be reached."""
        self._cooldowns[node.node_id] = node.revision, self._clock_ns() + int(COOLDOWN_S * 1e9)
        self.forget(node.node_id)

    def peer(self, node: KnownNode) -> "Peer":
        """The node as a peer of the engine.

        Raises Unreachable: no common transport, or a malformed description. Raises as `engine`.
        """
        known = self._peers.get(node.node_id)
        if known is not None and known[0] == node.transfer:
            return known[1]
        engine = self.engine
        try:
            peer = engine.connect(node.transfer)
        except ProtocolError as error:
            raise Unreachable(f"the transfer engine of node {node.name} cannot be used: {error}") from None
        with self._lock:
            self._peers[node.node_id] = node.transfer, peer
            # A master without a durable catalog may have given the node another id meanwhile.
            is_left = known is not None and all(other is not known[1] for _, other in self._peers.values())
        if known is not None and is_left:
            engine.disconnect(known[1])
        return peer

    def region(self, peer: "Peer", description: bytes) -> "PeerRegion":
        """Import an exported region. Raises Unreachable for a malformed description or one of another release. Raises
        as `engine`."""
        try:
            return self.engine.import_region(peer, description)
        except ProtocolError as error:
            raise Unreachable(f"a region of {peer.name} cannot be used: {error}") from None

    def missing(self, slabs: Sequence[SlabId]) -> list[SlabId]:
        """The distinct slabs that the node has not exported yet."""
        return list(dict.fromkeys(slab for slab in slabs if self.slab(slab) is None))

    def slab(self, slab: SlabId) -> "PeerRegion | None":
        epoch, shown = self._slabs.get(slab.node_id, (slab.epoch, {}))
        return shown.get(slab.slab) if epoch == slab.epoch else None

    def add(self, slab: SlabId, region: "PeerRegion") -> None:
        """Keep an exported slab. Slabs of the node's earlier processes are dropped, and beyond MAX_SLABS the oldest:
        nodes do not report freed slabs."""
        with self._lock:
            epoch, shown = self._slabs.get(slab.node_id, (slab.epoch, {}))
            if epoch != slab.epoch or slab.node_id not in self._slabs:
                shown = {}
                self._slabs[slab.node_id] = slab.epoch, shown
            elif len(shown) >= MAX_SLABS and slab.slab not in shown:
                del shown[next(iter(shown))]
            shown[slab.slab] = region

    def forget(self, node_id: int) -> None:
        """Drop the slabs of a node."""
        with self._lock:
            self._slabs.pop(node_id, None)

    def close(self) -> None:
        """Close the engine. A second close is a no-op."""
        with self._lock:
            self._is_closed = True
            engine, self._engine = self._engine, None
            self._peers.clear()
            self._slabs.clear()
        if engine is not None:
            engine.close()


log = logging.getLogger("kvstore.client")

TOPOLOGY_WORK_BYTES: Final = 1 << 30
"""Weight of creating an engine or scanning links, which take milliseconds: never on an event loop."""


class EngineCopies:
    """Transfers of gets and puts through the engine. Threads and tasks of a client share it."""

    def __init__(self, daemons: ClusterConnections, remote: RemoteMemory, registry: Registry, counters: ClientCounters) -> None:
        self.remote = remote
        self.registry = registry
        self._daemons = daemons
        self._counters = counters

    def peer_of(self, node: KnownNode) -> "Operation[Peer]":
        """A remote node as a peer of the engine. Raises Unreachable; ConfigError for settings that cannot be met."""
        if not self.remote.is_started:
            yield RunInThreadEffect(lambda: self.remote.engine, TOPOLOGY_WORK_BYTES)
        return self.remote.peer(node)

    def move(self, node: KnownNode, copies: "Sequence[Copy]", deadline: Deadline) -> Operation[None]:
        """Run copies from or to a node.

        Raises Unreachable for any failure of the engine. Raises DeadlineExceeded and starts a cooldown, so that later
        calls do not wait in vain.
        """
        try:
            yield TransferEffect(self.remote.engine, self.registry.named(copies), deadline)
        except DeadlineExceeded:
            self.remote.failed(node)
            raise
        except (Unavailable, Fenced, Denied, ProtocolError) as error:
            raise Unreachable(f"the transfer engine cannot move values of node {node.name}: {error}") from None
        if (call := CALL.get()) is not None:
            call.is_moved_by_engine = True
        self._counters.add(engine_bytes=sum(size_bytes for _, _, size_bytes in copies))

    def failed(self, node: KnownNode, error: KVStoreError, deadline: Deadline) -> Operation[None]:
        """Handle an unusable engine: start a cooldown, unless this host's links have changed. Then refresh the node
        table."""
        log.warning("the transfer engine of node %s is unusable, its values are sent by message: %s", node.name, error)
        if (yield RunInThreadEffect(self.remote.refresh, TOPOLOGY_WORK_BYTES)):
            self.remote.forget(node.node_id)
        else:
            self.remote.failed(node)
        yield from self._daemons.refresh_nodes(deadline)

    def show_slabs(self, channel: AnyChannel, node: KnownNode, slabs: Sequence[int], deadline: Deadline) -> "Operation[list[PeerRegion]]":
        """Regions of a remote node's slabs, in order. Raises StaleHandle, Unreachable."""
        peer = yield from self.peer_of(node)
        ids = [SlabId(node.node_id, channel.welcome.epoch, slab) for slab in slabs]
        missing = self.remote.missing(ids)
        for start in range(0, len(missing), MAX_FDS):
            part = missing[start : start + MAX_FDS]
            answer: ExportSlabsReply = yield RequestEffect(channel, ExportSlabs([slab.slab for slab in part]), ExportSlabsReply, deadline)
            if len(answer.regions) != len(part) or not all(answer.regions):
                raise StaleHandle(f"node {node.node_id} named a slab that it does not have")
            for slab, description in zip(part, answer.regions, strict=True):
                self.remote.add(slab, self.remote.region(peer, description))
        found = [self.remote.slab(slab) for slab in ids]
        if None in found:
            raise StaleHandle(f"a slab of node {node.node_id} is gone")
        return [region for region in found if region is not None]
