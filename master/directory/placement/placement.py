"""Choice of the node for a new block. Pure: nodes, randomness and time are passed in.

The writer's own node first: then no bytes cross a network. Otherwise a draw weighted by free bytes, so that nodes
fill evenly, and concurrent writers do not all choose the emptiest. Busy nodes have a lower weight (node_load.py), as
have nodes that have just registered."""

import random
from collections.abc import Mapping, Sequence
from typing import Final

from kvstore.master.directory.membership.members import NodeMember
from kvstore.master.directory.membership.node_load import shares
from kvstore.protocol.errors import InvalidArgument, Unavailable
from kvstore.protocol.settings import format_size

FULL_SHARE: Final = 0.05
"""Share of its capacity that a full node counts as free: it can evict, and its cold blocks are as good victims as
others'."""
CHAIN_SHARE: Final = 0.125
"""Share of its capacity that a batch may put on one node beyond its free bytes: chains stay together."""
MIN_RAMP: Final = 0.01
"""Weight factor of a node that has just registered: not 0, since it may be the only one."""


def place(
    sizes: Sequence[int], nodes: Sequence[NodeMember], *, local_node: int, slow_start_ns: int, rng: random.Random, now_ns: int
) -> list[int]:
    """Return a node id for each size, from `nodes`, which are all live. `local_node` (0: none) is used if its DRAM can
    hold the value.

    Raises:

        Unavailable: no nodes are given.
        InvalidArgument: a value is larger than the largest tier of every node."""
    if not nodes:
        raise Unavailable("no node is registered that could take the blocks")
    largest_bytes = max(node.largest_bytes for node in nodes)
    if sizes and max(sizes) > largest_bytes:
        raise InvalidArgument(f"a value of {format_size(max(sizes))} is larger than any node's largest tier ({format_size(largest_bytes)})")
    local = next((node for node in nodes if node.node_id == local_node), None)
    local_bytes = local.dram_bytes if local else 0
    placed: list[int] = []
    weights: dict[int, float] = {}
    current, room_bytes = nodes[0], 0.0
    for size in sizes:
        if local and size <= local_bytes:
            placed.append(local.node_id)
            continue
        if size > room_bytes:
            weights = weights or _weights(nodes, slow_start_ns, now_ns)
            current = _draw(size, nodes, weights, rng)
            room_bytes = max(size, current.free_bytes, CHAIN_SHARE * current.capacity_bytes)
            room_bytes = min(room_bytes, max(size, current.largest_bytes))
        placed.append(current.node_id)
        room_bytes -= size
    return placed


def _draw(size: int, nodes: Sequence[NodeMember], weights: Mapping[int, float], rng: random.Random) -> NodeMember:
    fitting = [node for node in nodes if node.largest_bytes >= size]
    return rng.choices(fitting, [weights[node.node_id] for node in fitting])[0]


def _weights(nodes: Sequence[NodeMember], slow_start_ns: int, now_ns: int) -> dict[int, float]:
    share = shares(nodes)
    return {node.node_id: share[node.node_id] * _weight(node, slow_start_ns, now_ns) for node in nodes}


def _weight(node: NodeMember, slow_start_ns: int, now_ns: int) -> float:
    return float(max(0, node.free_bytes) + FULL_SHARE * node.capacity_bytes + 1) * ramp(node, slow_start_ns, now_ns)


def ramp(node: NodeMember, slow_start_ns: int, now_ns: int) -> float:
    """Return the weight factor of a node, below 1 for `slow_start_ns` after its registration."""
    age_ns = now_ns - node.changed_ns
    return max(MIN_RAMP, min(1.0, age_ns / slow_start_ns)) if slow_start_ns else 1.0
