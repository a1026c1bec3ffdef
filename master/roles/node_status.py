"""What `kvstore status` shows of a node, of all that its master knows."""

import dataclasses
from functools import lru_cache
from typing import Any

from kvstore.master.directory.draining import Progress
from kvstore.master.directory.membership import Member
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import ProtocolError
from kvstore.transfer.description import unpack_engine


def node_status(node: Member, blocks: int, drain: Progress | None, now_ns: int) -> pb.NodeStatus:
    """What `kvstore status` shows of a node."""
    tiers: list[Any] = list(node.tiers)
    tenants: list[Any] = list(node.tenants)
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
        tiers=tiers,
        tenants=tenants,
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


def node_topology(node: Member, now_ns: int) -> pb.NodeTopology:
    """A node's host, and what its NICs have carried as of its last heartbeat."""
    links: list[Any] = list(node.links)
    age_s = (now_ns - node.heartbeat_ns) / 1e9 if node.heartbeat_ns else 0.0
    return pb.NodeTopology(name=node.info.name, state=node.state, topology=node.description.topology, links=links, links_age_s=age_s)


@lru_cache(maxsize=1024)
def transports(transfer: bytes) -> tuple[str, ...]:
    """The transports and rails of a node's engine, from its own description; nothing for one that has none, or one we cannot read."""
    try:
        agents = unpack_engine(transfer).agents if transfer else ()
    except ProtocolError:
        return ()
    return tuple(f"{agent.transport} {agent.rail.device}".rstrip() for agent in agents)
