"""The transfer engine's side of a client: one engine, made at its first use, with nodes of other hosts as its peers. Sans-I/O: see
effects.py.

A node whose engine cannot be reached (a firewall between, say) is asked for its values in messages for a while: slower, but it works.
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


REST_S: Final = 10.0
"""How long a node's engine that could not be reached is left alone."""

MAX_SLABS: Final = MAX_BATCH
"""Of one node: a batch names no more."""


class SlabId(NamedTuple):
    """`epoch` tells one process of a node from the next: slab ids begin anew."""

    node_id: int
    epoch: int
    slab: int


class RemoteMemory:
    """See the module. Thread-safe; owns the engine."""

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
        self._resting: dict[int, tuple[int, int]] = {}
        """(revision of its description, until when in ns) by node: a description that has changed is worth another try."""
        self._slabs: dict[int, tuple[int, dict[int, PeerRegion]]] = {}
        """By node: its process's epoch, and the slabs that it has shown, in that order."""

    @property
    def engine(self) -> "TransferEngine":
        """The engine, made now if need be: some milliseconds. Raises ConfigError for settings that cannot be met, Unreachable where the
        system does not tell its network interfaces, Closed."""
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
        """Look at this host's links again: True if the engine has other ways now. Some milliseconds."""
        from kvstore.transfer.topology.discovery import Discovery

        engine = self._engine
        if engine is None:
            return False
        try:
            return engine.refresh(Discovery.configured(self._settings).read_topology())
        except (Broken, ConfigError):  # the system does not tell, or a rail of the settings is gone
            return False

    def is_usable(self, node: KnownNode) -> bool:
        """Whether the node has an engine that has not failed lately."""
        revision, until_ns = self._resting.get(node.node_id, (0, 0))
        return bool(node.transfer) and (revision != node.revision or until_ns <= self._clock_ns())

    def failed(self, node: KnownNode) -> None:
        """Its engine could not be reached: leave it alone for a while."""
        self._resting[node.node_id] = node.revision, self._clock_ns() + int(REST_S * 1e9)
        self.forget(node.node_id)

    def peer(self, node: KnownNode) -> "Peer":
        """The node as the engine's peer. Raises Unreachable: no transport is common to both, or the node's description is malformed; and
        as `engine`."""
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
            # By a master without a lasting catalog it may have been named under another id meanwhile.
            is_left = known is not None and all(other is not known[1] for _, other in self._peers.values())
        if known is not None and is_left:
            engine.disconnect(known[1])
        return peer

    def region(self, peer: "Peer", description: bytes) -> "PeerRegion":
        """A region as its node showed it. Raises Unreachable: the description is malformed, or another release's; and as `engine`."""
        try:
            return self.engine.import_region(peer, description)
        except ProtocolError as error:
            raise Unreachable(f"a region of {peer.name} cannot be used: {error}") from None

    def missing(self, slabs: Sequence[SlabId]) -> list[SlabId]:
        """Which of these slabs the node has still to show, each once."""
        return list(dict.fromkeys(slab for slab in slabs if self.slab(slab) is None))

    def slab(self, slab: SlabId) -> "PeerRegion | None":
        epoch, shown = self._slabs.get(slab.node_id, (slab.epoch, {}))
        return shown.get(slab.slab) if epoch == slab.epoch else None

    def add(self, slab: SlabId, region: "PeerRegion") -> None:
        """The node has shown a slab. Those of its earlier processes are forgotten, and of this one those shown longest ago, once they are
        more than MAX_SLABS: nobody tells which the node has given up since."""
        with self._lock:
            epoch, shown = self._slabs.get(slab.node_id, (slab.epoch, {}))
            if epoch != slab.epoch or slab.node_id not in self._slabs:
                shown = {}
                self._slabs[slab.node_id] = slab.epoch, shown
            elif len(shown) >= MAX_SLABS and slab.slab not in shown:
                del shown[next(iter(shown))]
            shown[slab.slab] = region

    def forget(self, node_id: int) -> None:
        """The slabs of a node are to be shown anew."""
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
"""Making an engine and looking at the host's links takes milliseconds: never on an event loop."""


class EngineCopies:
    """The transfer engine's side of gets and puts. Threads and tasks of a client share it."""

    def __init__(self, daemons: ClusterConnections, remote: RemoteMemory, registry: Registry, counters: ClientCounters) -> None:
        self.remote = remote
        self.registry = registry
        self._daemons = daemons
        self._counters = counters

    def peer_of(self, node: KnownNode) -> "Operation[Peer]":
        """A node of another host as the transfer engine's peer. Raises Unreachable, and ConfigError for settings that cannot be met."""
        if not self.remote.is_started:
            yield RunInThreadEffect(lambda: self.remote.engine, TOPOLOGY_WORK_BYTES)
        return self.remote.peer(node)

    def move(self, node: KnownNode, copies: "Sequence[Copy]", deadline: Deadline) -> Operation[None]:
        """Have the transfer engine make these copies from or to a node. Raises Unreachable: it cannot, whatever the reason; and
        DeadlineExceeded: that node's engine is left alone for a while then, or every call would wait for it in vain."""
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
        """A node's engine could not be used: leave it alone for a while, unless there is another way by now: this host's links have
        changed, or the master knows of a change of the node's."""
        log.warning("values of node %s go by message: %s", node.name, error)
        if (yield RunInThreadEffect(self.remote.refresh, TOPOLOGY_WORK_BYTES)):
            self.remote.forget(node.node_id)
        else:
            self.remote.failed(node)
        yield from self._daemons.refresh_nodes(deadline)

    def show_slabs(self, channel: AnyChannel, node: KnownNode, slabs: Sequence[int], deadline: Deadline) -> "Operation[list[PeerRegion]]":
        """These slabs of a node of another host, in order, as the transfer engine reads them. Raises StaleHandle, Unreachable."""
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
