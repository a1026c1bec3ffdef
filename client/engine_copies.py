"""How a client has its transfer engine copy from and to nodes of other hosts, and what becomes of a node whose engine fails. Sans-I/O: see
effects.py."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvstore.client.daemons import Daemons
from kvstore.client.effects import AnyChannel, Ask, Move, Operation, Work
from kvstore.client.registered import Registry
from kvstore.client.remote import RemoteMemory, SlabId
from kvstore.client.routes import KnownNode
from kvstore.client.stats import Counters
from kvstore.protocol.errors import DeadlineExceeded, Denied, Fenced, KVStoreError, ProtocolError, StaleHandle, Unavailable, Unreachable
from kvstore.protocol.node_messages import RegionList, Regions
from kvstore.rpc.blocking_socket import MAX_FDS
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.tracing import CALL

if TYPE_CHECKING:
    from kvstore.transfer.paths.batch import Copy
    from kvstore.transfer.paths.peer import Peer, PeerRegion

log = logging.getLogger("kvstore.client")

TOPOLOGY_WORK_BYTES: Final = 1 << 30
"""Making an engine and looking at the host's links takes milliseconds: never on an event loop."""


class EngineCopies:
    """The transfer engine's side of gets and puts. Threads and tasks of a client share it."""

    def __init__(self, daemons: Daemons, remote: RemoteMemory, registry: Registry, counters: Counters) -> None:
        self.remote = remote
        self.registry = registry
        self._daemons = daemons
        self._counters = counters

    def peer_of(self, node: KnownNode) -> "Operation[Peer]":
        """A node of another host as the transfer engine's peer. Raises Unreachable, and ConfigError for settings that cannot be met."""
        if not self.remote.is_started:
            yield Work(lambda: self.remote.engine, TOPOLOGY_WORK_BYTES)
        return self.remote.peer(node)

    def move(self, node: KnownNode, copies: "Sequence[Copy]", deadline: Deadline) -> Operation[None]:
        """Have the transfer engine make these copies from or to a node. Raises Unreachable: it cannot, whatever the reason; and
        DeadlineExceeded: that node's engine is left alone for a while then, or every call would wait for it in vain."""
        try:
            yield Move(self.remote.engine, self.registry.named(copies), deadline)
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
        if (yield Work(self.remote.refresh, TOPOLOGY_WORK_BYTES)):
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
            answer: RegionList = yield Ask(channel, Regions([slab.slab for slab in part]), RegionList, deadline)
            if len(answer.regions) != len(part) or not all(answer.regions):
                raise StaleHandle(f"node {node.node_id} named a slab that it does not have")
            for slab, description in zip(part, answer.regions, strict=True):
                self.remote.add(slab, self.remote.region(peer, description))
        found = [self.remote.slab(slab) for slab in ids]
        if None in found:
            raise StaleHandle(f"a slab of node {node.node_id} is gone")
        return [region for region in found if region is not None]
