"""Copies that the master initiates: which are under way, which nodes have free space for more, and which refused.
Sans-I/O.

drains.py, replica_targets.py, hot_copies.py and home_copies.py choose blocks and receivers, within these limits;
replication.py keeps the orders."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvstore.master.directory.directory_parts import DirectoryParts
from kvstore.master.directory.membership.members import NodeMember
from kvstore.master.directory.membership.node_load import shares
from kvstore.master.directory.placement.replication import ReplicaPlanner

FULL_SHARE: Final = 0.05
"""Share of its capacity that a node keeps free. Slots of other sizes are of no use, and a copy must not evict other
blocks."""
REFUSED_NS: Final = 2_000_000_000
"""A node that did not take an ordered copy counts as full for this long."""
CHECK_COST: Final = 8
"""Cost of checking one block, in rows of `CopyLimits.rows`: some ten microseconds, where a row of a column takes
next to none."""


@dataclass(frozen=True, slots=True)
class CopyLimits:
    """Blocks and bytes under way over all nodes, and rows checked in one step, during which the loop serves no
    requests."""

    blocks: int = 4096
    bytes: int = 256 << 20
    rows: int = 20_000


class CopyOrder(NamedTuple):
    """Blocks that a node is to fetch from another: for NodeFrames.replicate."""

    tenant: str
    keys: list[bytes]
    node_id: int
    source_node_id: int


class _Copy(NamedTuple):
    source_node_id: int
    size_bytes: int


_CopyId = tuple[str, bytes, int]
"""Tenant, key and receiving node."""


class CopyBatcher:
    """Copies under way for one purpose. A step: `begin`, then `add` as often as `is_busy` and `room` allow, then
    `take_orders`.

    Not thread-safe."""

    def __init__(
        self,
        parts: DirectoryParts,
        replication: ReplicaPlanner,
        pace: CopyLimits,
        *,
        full_share: float = FULL_SHARE,
        refused_ns: int = REFUSED_NS,
    ) -> None:
        """Receivers keep `full_share` of their capacity free. One that did not keep a copy gets none for `refused_ns`."""
        self._rows, self._tenants, self._members, self._replication = parts.rows, parts.tenants, parts.members, replication
        self.pace = pace
        self._full_share = full_share
        self._refused_ns = refused_ns
        self._room: dict[int, int] | None = None
        self._now_ns = 0
        self._copies: dict[_CopyId, _Copy] = {}
        self._bytes = 0
        self._full_until_ns: dict[int, int] = {}
        self._orders: dict[tuple[str, int, int], list[bytes]] = {}

    def begin(self, now_ns: int) -> list[tuple[str, bytes]]:
        """Drop copies that have arrived or failed; return their tenants and keys."""
        over = [copy_id for copy_id in self._copies if not self._replication.is_under_way(*copy_id)]
        for copy_id in over:
            self._end(copy_id, now_ns)
        self._room, self._now_ns = None, now_ns
        return [(tenant, key) for tenant, key, _node_id in over]

    @property
    def room(self) -> dict[int, int]:
        """Bytes that nodes can still take; without nodes that take no blocks, or refused lately. Computed on first
        use in a step: most steps have nothing to copy."""
        if self._room is None:
            self._room = {
                node.node_id: node.free_bytes - int(self._full_share * node.capacity_bytes)
                for node in self._members.live()
                if node.takes_blocks and self._full_until_ns.get(node.node_id, 0) <= self._now_ns
            }
            for (_tenant, _key, node_id), copy in self._copies.items():
                if node_id in self._room:
                    self._room[node_id] -= copy.size_bytes
        return self._room

    @property
    def is_busy(self) -> bool:
        """True if the limits of copies under way are reached."""
        return len(self._copies) >= self.pace.blocks or self._bytes >= self.pace.bytes

    def add(self, tenant: str, key: bytes, size_bytes: int, *, node_id: int, source_node_id: int) -> None:
        """Have the node, which must have room, fetch the block."""
        self.room[node_id] -= size_bytes
        self._copies[tenant, key, node_id] = _Copy(source_node_id, size_bytes)
        self._bytes += size_bytes
        self._orders.setdefault((tenant, node_id, source_node_id), []).append(key)

    def take_orders(self) -> list[CopyOrder]:
        """Return the orders since the last call. They must be ordered before the next `begin`, which drops copies
        without an order."""
        orders, self._orders = self._orders, {}
        return [CopyOrder(tenant, keys, node_id, source) for (tenant, node_id, source), keys in orders.items()]

    def count_from(self, node_id: int) -> int:
        """Return the number of blocks under way from that node."""
        return sum(copy.source_node_id == node_id for copy in self._copies.values())

    def _end(self, copy_id: _CopyId, now_ns: int) -> None:
        """A node that did not take a block that still exists counts as full for now."""
        self._bytes -= self._copies.pop(copy_id).size_bytes
        tenant, key, node_id = copy_id
        owner = self._tenants.get(tenant)
        holders: Sequence[int] = self._rows.readable_at(owner, key) if owner is not None else ()
        if holders and node_id not in holders:
            self._full_until_ns[node_id] = now_ns + self._refused_ns


class CopyReceivers:
    """Possible receivers of copies in one step of a `CopyBatcher`. Not thread-safe."""

    def __init__(self, batcher: CopyBatcher, nodes: Mapping[int, NodeMember]) -> None:
        self._batcher, self._nodes = batcher, nodes
        self._share: dict[int, float] = {}
        self._most_bytes: int | None = None
        """Largest room at the first choice; it only shrinks within a step."""
        self.checked = 0
        """Nodes that were checked one by one."""

    def choose(self, size_bytes: int, *, has: Collection[int], hosts: Collection[str], last: Collection[int]) -> int:
        """Return a node with room that is not in `has`, 0 if none has. Preferred: another host than `hosts`, then a
        node of `last`, then the most room weighted by load. O(1) if no node has room, or one of `last` is as good as
        any."""
        room = self._batcher.room
        if self._most_bytes is None:
            self._most_bytes = max((room.get(node_id, 0) for node_id in self._nodes), default=0)
            self._share = shares(self._nodes.values())
        if size_bytes > self._most_bytes:
            return 0
        fitting = [node for node in self._fitting(last, has, size_bytes) if node.host not in hosts]
        if not fitting:
            self.checked += len(self._nodes)
            fitting = self._fitting(self._nodes, has, size_bytes)
        best = max(
            fitting,
            key=lambda node: (node.host not in hosts, node.node_id in last, self._share[node.node_id] * room[node.node_id]),
            default=None,
        )
        return best.node_id if best is not None else 0

    def _fitting(self, node_ids: Collection[int], has: Collection[int], size_bytes: int) -> list[NodeMember]:
        room, nodes = self._batcher.room, self._nodes
        return [nodes[one] for one in node_ids if one in nodes and one not in has and room.get(one, 0) >= size_bytes]
