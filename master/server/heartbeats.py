"""Handler of nodes' heartbeats: liveness, load and changes of a node's description."""

from collections.abc import Callable

from google.protobuf.message import DecodeError

from kvstore.master.directory.membership.reads import NamespaceLastRead
from kvstore.master.server.owner_parts import OwnerParts
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import KVStoreError, ProtocolError, Unavailable

Newer = Callable[[int, int], tuple[pb.Quotas | None, pb.RetiredNamespaces | None]]
"""Returns the quotas and retired namespaces for a node that has these versions; None for current ones, and in other
partitions than partition 0, which sends them."""


def parse(body: bytes) -> pb.HeartbeatRequest:
    """Raises ProtocolError."""
    try:
        return pb.HeartbeatRequest.FromString(body)
    except DecodeError as error:
        raise ProtocolError("the heartbeat is not a valid HeartbeatRequest") from error


class Heartbeats:
    """Applies heartbeats to the directory, and commits changed records. The loop is the only caller."""

    def __init__(self, owner: OwnerParts, newer: Newer) -> None:
        """`newer`: see Newer. Counts `reuse_reports` and `reuse_refused`."""
        self._directory, self._committer, self._connections = owner.directory, owner.committer, owner.connections
        self._master_epoch = owner.master_epoch
        self._counters = owner.counters
        self._newer = newer
        self._why_over: KVStoreError | None = None

    def end(self, why: KVStoreError) -> None:
        """The epoch is over: refuse each heartbeat from now on, so that its node looks for another master."""
        self._why_over = why

    def take(self, request: pb.HeartbeatRequest, now_ns: int) -> pb.HeartbeatReply:
        """Apply a heartbeat, whose node has been checked. Raises StaleEpoch (not the current registration),
        InvalidArgument, and Unavailable after the end."""
        if self._why_over is not None:
            raise Unavailable(f"this master is cut off from its catalog, which another one may own by now: {self._why_over}")
        directory, node_id, epoch = self._directory, request.node_id, request.registration_epoch
        if request.stopped:
            self._committer.commit(directory.stopping(node_id, epoch))
            return pb.HeartbeatReply(master_epoch=self._master_epoch)
        directory.heartbeat(node_id, epoch, list(request.tiers), dict(request.counters), now_ns, tenants=list(request.tenants))
        topology = request.topology if request.HasField("topology") else None
        transfer = request.transfer if request.HasField("transfer") else None
        if topology is not None or transfer is not None:
            self._committer.commit(directory.describe(node_id, epoch, topology=topology, transfer=transfer))
        directory.set_rates(node_id, epoch, request.rates, now_ns)
        directory.set_links(node_id, epoch, list(request.links))
        if request.HasField("slow"):
            directory.set_slow_requests(node_id, epoch, list(request.slow.requests))
        directory.last_reads.take((NamespaceLastRead(one.tenant, one.namespace, one.age_s) for one in request.reads), now_ns)
        if request.hot:
            directory.block_heat.take(node_id, request.hot, now_ns)
        reuse = None
        if request.HasField("reuse"):
            reuse = directory.cluster_reuse.take(node_id, request.reuse)
            counters = self._counters
            counters["reuse_reports"] += 1
            counters["reuse_refused"] = directory.cluster_reuse.refused
        quotas, retired = self._newer(request.quotas_version, request.retired_version)
        hot_blocks = directory.block_heat.blocks_to_report(node_id, len(self._connections), now_ns)
        return pb.HeartbeatReply(master_epoch=self._master_epoch, hot_blocks=hot_blocks, quotas=quotas, retired=retired, reuse=reuse)
