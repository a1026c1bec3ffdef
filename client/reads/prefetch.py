"""Prefetch of blocks into this host's node. Sans-I/O: see effects.py."""

from collections.abc import Sequence
from typing import Final

from kvstore.client.connections.cluster_connections import ClusterConnections
from kvstore.client.core.effects import Operation
from kvstore.protocol.errors import Unavailable
from kvstore.protocol.node_messages import TO_DRAM, TO_LOCAL, Prefetch
from kvstore.protocol.session_messages import Count
from kvstore.rpc.deadline import Deadline

TARGETS: Final = {"local": TO_LOCAL, "dram": TO_DRAM}
"""Wire value of `to`."""


def prefetch(daemons: ClusterConnections, keys: Sequence[bytes], to: str, deadline: Deadline) -> Operation[int]:
    """Have the local node prefetch the blocks; return how many it has queued. The preferred node is asked, or another
    one of this host while that is draining. Raises Unavailable: no node is on this host, or it does not answer."""
    if not keys:
        return 0
    nodes = daemons.nodes
    if not nodes.local():
        yield from daemons.refresh_nodes(deadline)
    local = nodes.local()
    if not local:
        raise Unavailable("no storage node is on this host: blocks are prefetched into the node of the caller's host")
    node = next((one for one in local if one.node_id not in nodes.closed), local[0])
    connection, reply = yield from daemons.begin(node.route, Prefetch(list(keys), TARGETS[to]), Count, deadline)
    connection.release()
    return reply.value
