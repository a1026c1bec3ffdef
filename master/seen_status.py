"""What a caller sees of the cluster: an operator all of it, anybody else who is known where it is and that it works, and no totals."""

from kvstore.protocol import control_pb2 as pb
from kvstore.security.identity import Identity


def as_seen_by(identity: Identity, status: pb.StatusReply) -> pb.StatusReply:
    """`status` without what tells of other tenants' work: sizes, numbers of blocks, counters, rates, where the catalog is."""
    if identity.operates:
        return status
    return pb.StatusReply(
        version=status.version,
        epoch=status.epoch,
        uptime_s=status.uptime_s,
        catalog_health=status.catalog_health,
        name=status.name,
        role=status.role,
        owner=status.owner if status.HasField("owner") else None,
        nodes=[
            pb.NodeStatus(
                node_id=node.node_id,
                name=node.name,
                host_id=node.host_id,
                unix=node.unix,
                tcp=node.tcp,
                version=node.version,
                state=node.state,
                heartbeat_age_s=node.heartbeat_age_s,
                transports=node.transports,
            )
            for node in status.nodes
        ],
    )
