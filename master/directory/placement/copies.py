"""Copies that the master has nodes make of its own accord: what is on its way, where there is room for more, and who refused. Sans-I/O.

It chooses nothing: drains.py and targets.py say which blocks go where, as far as this has room; replication.py keeps the orders.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvstore.master.directory.directory_parts import DirectoryParts
from kvstore.master.directory.membership.members import NodeMember
from kvstore.master.directory.membership.node_load import shares
from kvstore.master.directory.placement.replication import ReplicaPlanner

FULL_SHARE: Final = 0.05
"""Of its capacity a node keeps free: slots of one size are of no use to another, and copies are not to have others' blocks leave."""
REFUSED_NS: Final = 2_000_000_000
"""For so long a node counts as full to which a copy was ordered that did not arrive."""
LOOK_COST: Final = 8
"""Rows of a pace as which a block counts that is looked at by itself: some ten microseconds, where a row of a column takes next to none."""


@dataclass(frozen=True, slots=True)
class CopyLimits:
    """How much is on its way at once, over all nodes, and how many rows are looked at in one step: nobody else is served meanwhile."""

    blocks: int = 4096
    bytes: int = 256 << 20
    rows: int = 20_000


class CopyOrder(NamedTuple):
    """What a node is to fetch from another: for NodeFrames.replicate."""

    tenant: str
    keys: list[bytes]
    node_id: int
    source_node_id: int


class _Copy(NamedTuple):
    source_node_id: int
    size_bytes: int


_Where = tuple[str, bytes, int]
"""Tenant, key and receiving node."""


class CopyBatcher:
    """What is on its way for one purpose. A step: `begin`, then `add` as often as `is_busy` and `room` allow, then `take_orders`. Not
    thread-safe."""

    def __init__(self, parts: DirectoryParts, replication: ReplicaPlanner, pace: CopyLimits, *, full_share: float = FULL_SHARE) -> None:
        """`full_share` of its capacity a node keeps free for others than these."""
        self._rows, self._tenants, self._members, self._replication = parts.rows, parts.tenants, parts.members, replication
        self.pace = pace
        self._full_share = full_share
        self._room: dict[int, int] | None = None
        self._now_ns = 0
        self._copies: dict[_Where, _Copy] = {}
        self._bytes = 0
        self._full_until_ns: dict[int, int] = {}
        self._orders: dict[tuple[str, int, int], list[bytes]] = {}

    def begin(self, now_ns: int) -> list[tuple[str, bytes]]:
        """Forget what has arrived or will not. Tenant and key of what was forgotten."""
        over = [where for where in self._copies if not self._replication.is_under_way(*where)]
        for where in over:
            self._end(where, now_ns)
        self._room, self._now_ns = None, now_ns
        return [(tenant, key) for tenant, key, _node_id in over]

    @property
    def room(self) -> dict[int, int]:
        """Bytes that nodes can still take; nodes that take no blocks, or refused lately, are not in it. Counted when it is first asked for
        in a step: most have nothing to copy."""
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
        """As much is on its way as may be."""
        return len(self._copies) >= self.pace.blocks or self._bytes >= self.pace.bytes

    def add(self, tenant: str, key: bytes, size_bytes: int, *, node_id: int, source_node_id: int) -> None:
        """Have the node fetch the block, for which it has room."""
        self.room[node_id] -= size_bytes
        self._copies[tenant, key, node_id] = _Copy(source_node_id, size_bytes)
        self._bytes += size_bytes
        self._orders.setdefault((tenant, node_id, source_node_id), []).append(key)

    def take_orders(self) -> list[CopyOrder]:
        """What was added since the last call. To be ordered before the next `begin`, which forgets what is not."""
        orders, self._orders = self._orders, {}
        return [CopyOrder(tenant, keys, node_id, source) for (tenant, node_id, source), keys in orders.items()]

    def count_from(self, node_id: int) -> int:
        """Blocks on their way from that node."""
        return sum(copy.source_node_id == node_id for copy in self._copies.values())

    def _end(self, where: _Where, now_ns: int) -> None:
        """A node that did not take a block that is still there has no room for now."""
        self._bytes -= self._copies.pop(where).size_bytes
        tenant, key, node_id = where
        owner = self._tenants.get(tenant)
        holders: Sequence[int] = self._rows.readable_at(owner, key) if owner is not None else ()
        if holders and node_id not in holders:
            self._full_until_ns[node_id] = now_ns + REFUSED_NS


class CopyReceivers:
    """The nodes that copies may go to in one step of `copying`. Not thread-safe."""

    def __init__(self, copying: CopyBatcher, nodes: Mapping[int, NodeMember]) -> None:
        self._copying, self._nodes = copying, nodes
        self._share: dict[int, float] = {}
        self._most_bytes: int | None = None
        """The largest room at the first choice, which only gets smaller in a step."""
        self.looked_at = 0
        """Nodes that were looked at one by one."""

    def choose(self, size_bytes: int, *, has: Collection[int], hosts: Collection[str], last: Collection[int]) -> int:
        """A node with room that is none of `has`; of another host than `hosts` if there is one, then one of `last`, then the one with most
        room for how busy it is. 0: none has room. O(1) where nobody has, and where one of `last` is as good as any."""
        room = self._copying.room
        if self._most_bytes is None:
            self._most_bytes = max((room.get(node_id, 0) for node_id in self._nodes), default=0)
            self._share = shares(self._nodes.values())
        if size_bytes > self._most_bytes:
            return 0
        fitting = [node for node in self._fitting(last, has, size_bytes) if node.host not in hosts]
        if not fitting:
            self.looked_at += len(self._nodes)
            fitting = self._fitting(self._nodes, has, size_bytes)
        best = max(
            fitting,
            key=lambda node: (node.host not in hosts, node.node_id in last, self._share[node.node_id] * room[node.node_id]),
            default=None,
        )
        return best.node_id if best is not None else 0

    def _fitting(self, node_ids: Collection[int], has: Collection[int], size_bytes: int) -> list[NodeMember]:
        room, nodes = self._copying.room, self._nodes
        return [nodes[one] for one in node_ids if one in nodes and one not in has and room.get(one, 0) >= size_bytes]
