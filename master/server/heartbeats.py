"""Heartbeats: that a node lives, and what it tells of itself each time, over its link."""

from collections.abc import Callable

from google.protobuf.message import DecodeError

from kvstore.master.directory.membership.reads import NamespaceLastRead
from kvstore.master.server.owner_parts import OwnerParts
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import KVStoreError, ProtocolError, Unavailable

Newer = Callable[[int, int], tuple[pb.Quotas | None, pb.RetiredNamespaces | None]]
"""What a node is told that has the quotas and the retired namespaces of these versions; None: they are the ones in force, or partition 0
tells them."""


def parse(body: bytes) -> pb.HeartbeatRequest:
    """Raises ProtocolError."""
    try:
        return pb.HeartbeatRequest.FromString(body)
    except DecodeError as error:
        raise ProtocolError("the heartbeat cannot be read") from error


class Heartbeats:
    """What they tell goes to the directory; what must be durable of it, to the committer. The loop is the only caller."""

    def __init__(self, owner: OwnerParts, newer: Newer) -> None:
        """`newer`: see Newer."""
        self._directory, self._committer, self._links = owner.directory, owner.committer, owner.links
        self._master_epoch = owner.master_epoch
        self._newer = newer
        self._why_over: KVStoreError | None = None

    def end(self, why: KVStoreError) -> None:
        """This master owns the partition no longer, and may not know who does: each heartbeat is refused from now on, so that its node
        looks for another master."""
        self._why_over = why

    def take(self, said: pb.HeartbeatRequest, now_ns: int) -> pb.HeartbeatReply:
        """Of a node whose name has been checked. Raises StaleEpoch (the registration is not the newest), InvalidArgument, and Unavailable
        after the end."""
        if self._why_over is not None:
            raise Unavailable(f"this master is cut off from its catalog, which another one may own by now: {self._why_over}")
        directory, node_id, epoch = self._directory, said.node_id, said.registration_epoch
        if said.stopped:
            self._committer.commit(directory.stopping(node_id, epoch))
            return pb.HeartbeatReply(master_epoch=self._master_epoch)
        directory.heartbeat(node_id, epoch, list(said.tiers), dict(said.counters), now_ns, tenants=list(said.tenants))
        topology = said.topology if said.HasField("topology") else None
        transfer = said.transfer if said.HasField("transfer") else None
        if topology is not None or transfer is not None:
            self._committer.commit(directory.describe(node_id, epoch, topology=topology, transfer=transfer))
        directory.measured(node_id, epoch, said.rates, now_ns)
        directory.carried(node_id, epoch, list(said.links))
        if said.HasField("slow"):
            directory.slowed(node_id, epoch, list(said.slow.requests))
        directory.last_reads.take((NamespaceLastRead(one.tenant, one.namespace, one.age_s) for one in said.reads), now_ns)
        if said.hot:
            directory.heat.take(node_id, said.hot, now_ns)
        quotas, retired = self._newer(said.quotas_version, said.retired_version)
        hot_blocks = directory.heat.ask(node_id, len(self._links), now_ns)
        return pb.HeartbeatReply(master_epoch=self._master_epoch, hot_blocks=hot_blocks, quotas=quotas, retired=retired)
