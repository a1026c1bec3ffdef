"""State of a master as messages of the control plane: nodes, weight versions, and a status filtered for its caller."""

import dataclasses
from functools import lru_cache
from typing import Final

from kvstore.master.directory.membership.members import NodeMember
from kvstore.master.directory.placement.drains import DrainProgress
from kvstore.master.directory.weights import RetiredNamespaces, WeightsTable, is_private
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import ProtocolError
from kvstore.security.identity import Identity
from kvstore.transfer.description import unpack_engine


def node_status(node: NodeMember, blocks: int, drain: DrainProgress | None, now_ns: int) -> pb.NodeStatus:
    """Return a node's row of `kvstore status`."""
    return pb.NodeStatus(
        node_id=node.node_id,
        name=node.info.name,
        host_id=node.info.host_id,
        unix=node.info.unix,
        tcp=node.info.tcp,
        http=node.info.http,
        version=node.info.version,
        state=node.state,
        registration_epoch=node.epoch,
        heartbeat_age_s=(now_ns - node.heartbeat_ns) / 1e9 if node.heartbeat_ns else 0.0,
        blocks=blocks,
        tiers=node.tiers,
        tenants=node.tenants,
        counters=dict(node.counters),
        transports=transports(node.description.transfer),
        rates=[
            pb.PeerRate(
                node_id=node_id,
                bytes_per_s=rate.bytes_per_s,
                basis_bytes=rate.basis_bytes,
                age_s=(now_ns - rate.measured_ns) / 1e9,
            )
            for node_id, rate in node.rates.fresh(now_ns).items()
        ],
        drain=pb.DrainStatus(**dataclasses.asdict(drain)) if drain is not None else None,
    )


def node_topology(node: NodeMember, now_ns: int) -> pb.NodeTopology:
    """Return a node's host topology, and its NICs' counters as of the last heartbeat."""
    age_s = (now_ns - node.heartbeat_ns) / 1e9 if node.heartbeat_ns else 0.0
    return pb.NodeTopology(name=node.info.name, state=node.state, topology=node.description.topology, links=node.links, links_age_s=age_s)


@lru_cache(maxsize=1024)
def transports(transfer: bytes) -> tuple[str, ...]:
    """Return the transports and rails of a node's transfer engine; empty if its description is missing or
    unreadable."""
    try:
        agents = unpack_engine(transfer).agents if transfer else ()
    except ProtocolError:
        return ()
    return tuple(f"{agent.transport} {agent.rail.device}".rstrip() for agent in agents)


PART_ROWS: Final = 256
"""Rows of a message: 2 MiB with the longest texts."""


def retired_message(retired: RetiredNamespaces) -> pb.RetiredNamespaces:
    tenants = [pb.TenantRetiredNamespaces(tenant=tenant, namespaces=found) for tenant, found in retired.namespaces.items()]
    return pb.RetiredNamespaces(version=retired.version, tenants=tenants)


def table_messages(table: WeightsTable, tenant: str | None, now_ns: int) -> list[pb.WeightsTable]:
    """Return versions and namespaces of a tenant, or of all (None), in messages within gRPC's limit."""
    versions = [
        pb.WeightsVersion(
            tenant=key.weights.tenant,
            base=key.weights.base,
            version=key.version,
            adapter=key.weights.adapter,
            salt=key.weights.salt,
            users=row.last_users,
            is_used=bool(row.users),
            is_retired=table.is_retired(key),
            used_age_s=table.used_age_s(row, now_ns),
            namespaces=len(row.namespaces),
            is_durable=not is_private(key.version),
        )
        for key, row in table.of(tenant)
    ]
    namespaces = [
        pb.KnownNamespace(tenant=owner, form=pb.NamespaceForm(id=id, form=one.form))
        for (owner, id), one in table.namespaces.items()
        if tenant is None or owner == tenant
    ]
    return [
        *(pb.WeightsTable(versions=versions[at : at + PART_ROWS]) for at in range(0, len(versions), PART_ROWS)),
        *(pb.WeightsTable(namespaces=namespaces[at : at + PART_ROWS]) for at in range(0, len(namespaces), PART_ROWS)),
    ]


def as_seen_by(identity: Identity, status: pb.StatusReply) -> pb.StatusReply:
    """Return `status`, for other callers than operators without other tenants' activity: sizes, block counts,
    counters, rates, the catalog."""
    if identity.is_admin:
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
