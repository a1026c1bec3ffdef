"""Copies of blocks between nodes: orders under way, and which arrived copies become visible. Sans-I/O; `now_ns` is
passed in.

An order lasts until its node reports, and is in memory only. A copy becomes visible only under a current order, of
the block's current generation. An order ends with the block's removal, and a restarted master has none. So a copy
never restores a block that was removed or replaced meanwhile. This module moves no bytes and sends nothing."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvstore.master.catalogs.interface import Change
from kvstore.master.directory.directory_parts import DirectoryParts
from kvstore.master.directory.index.holders import with_holder
from kvstore.master.directory.index.keys import NO_ROW
from kvstore.master.directory.index.tenants import Tenant
from kvstore.master.directory.membership.members import NodeMember
from kvstore.master.directory.placement.commands import NodeCommands
from kvstore.protocol.catalog_messages import COPY_REPLICA, CopyBlocks, CopyResult
from kvstore.protocol.errors import InvalidArgument, Unavailable
from kvstore.protocol.frames import MAX_BATCH
from kvstore.protocol.message import TIER_BITS

ORDER_TTL_S: Final = 60.0
"""An order without a report expires after this: the node lost it, or is too busy for the copy to be useful."""
SPARE_ENDS: Final = 1024
MAX_ORDERS: Final = 1 << 18
"""Blocks under way at once, over all nodes: about 100 MB of memory. More are not ordered."""


class _OrderedCopy(NamedTuple):
    """A block that a node shall fetch: its generation, and the node's registration."""

    generation: int
    epoch: int
    expires_ns: int


_CopyId = tuple[str, bytes, int]
"""Tenant, key and receiving node of an order."""


@dataclass(frozen=True, slots=True)
class EnteredReplica:
    """Result of a node's report. `flags` by key (1: it is a holder now); `ops` need no wait; `commands` are sent
    after the flags."""

    flags: bytearray
    commands: NodeCommands
    ops: list[Change]


class ReplicaPlanner:
    """Orders of copies under way. Not thread-safe."""

    def __init__(self, parts: DirectoryParts) -> None:
        self._rows, self._tenants, self._members, self._record_policy = parts.rows, parts.tenants, parts.members, parts.record_policy
        self._master_epoch = parts.master_epoch
        self._orders: dict[_CopyId, _OrderedCopy] = {}
        self._nodes: dict[tuple[str, bytes], list[int]] = {}
        """Receivers of each block."""
        self._expiry: deque[tuple[_CopyId, _OrderedCopy]] = deque()
        """All orders by expiry, and stale entries."""

    def __len__(self) -> int:
        return len(self._orders)

    def plan(
        self, tenant: str, keys: Sequence[bytes], *, node_id: int, source_node_id: int, now_ns: int, reason: int = COPY_REPLICA
    ) -> list[CopyBlocks]:
        """Order, for node `node_id` and in the order of `keys`, the blocks that the source holds and the node neither
        holds nor awaits. `reason` is one of COPY_...; the node counts by it.

        Raises InvalidArgument (from a node to itself), Unavailable (one of them is not alive, or the node takes no
        blocks); nothing is ordered then."""
        if node_id == source_node_id:
            raise InvalidArgument(f"node {node_id} has no need of copies of its own blocks: name another source")
        node, source = self._live(node_id), self._live(source_node_id)
        if not node.takes_blocks:
            raise Unavailable(f"node {node_id} is to be stopped and takes no blocks")
        self.expire(now_ns)
        expires_ns = now_ns + int(ORDER_TTL_S * 1e9)
        of_namespace: dict[str, list[tuple[bytes, int]]] = {}
        owner = self._tenants.get(tenant)
        if owner is None:
            return []
        for key in keys:
            row = owner.rows.get(key, NO_ROW)
            order = _OrderedCopy(self._rows.generations[row], node.epoch, expires_ns)
            if self._is_wanted(owner, key, row, node_id, source_node_id) and self._add((tenant, key, node_id), order):
                of_namespace.setdefault(self._rows.version(row).namespace, []).append((key, row))
        return [
            self._message(tenant, namespace, source, wanted[begin : begin + MAX_BATCH], reason)
            for namespace, wanted in of_namespace.items()
            for begin in range(0, len(wanted), MAX_BATCH)
        ]

    def is_removed(self, owner: Tenant, key: bytes, row: int) -> bool:
        """True if the block is being removed, or was: nodes may not have acknowledged the drop. It is not copied."""
        return key in owner.removing or self._rows.generations[row] <= owner.removed.get(key, 0)

    def is_ordered(self, tenant: str, key: bytes) -> bool:
        """True if a copy of the block is under way, to any node."""
        return (tenant, key) in self._nodes

    def receivers(self, tenant: str, key: bytes) -> Sequence[int]:
        """Return the nodes to which a copy of the block is under way."""
        return self._nodes.get((tenant, key), ())

    def is_under_way(self, tenant: str, key: bytes, node_id: int) -> bool:
        """True if a copy of the block is under way to that node."""
        return (tenant, key, node_id) in self._orders

    def answered(self, node_id: int, message: CopyBlocks, flags: bytes | None) -> None:
        """Apply the node's response to a Copy: end the orders that it refuses; all of them without a response
        (None)."""
        for key, generation, flag in zip(message.keys, message.generations, flags or bytes(len(message.keys)), strict=True):
            if not flag:
                self._end((message.tenant, key, node_id), generation)

    def enter(self, node_id: int, message: CopyResult) -> EnteredReplica:
        """Make the node a holder of blocks that arrived under a current order. Immediate, since the catalog has these
        blocks already.

        Raises StaleEpoch: the registration is over, and its orders with it."""
        node = self._members.check(node_id, message.epoch)
        entered = EnteredReplica(bytearray(len(message.keys)), NodeCommands(self._master_epoch), [])
        owner = self._tenants.get(message.tenant)
        if owner is None:
            return entered
        for index, (key, generation, arrived) in enumerate(zip(message.keys, message.generations, message.arrived, strict=True)):
            order = self._end((message.tenant, key, node_id), generation)
            row = owner.rows.get(key, NO_ROW)
            pairs = self._rows.pairs(row)
            if arrived and order is not None and order.epoch == node.epoch and pairs and self._rows.generations[row] == generation:
                self._rows.set_holders(row, with_holder(pairs, node_id, TIER_BITS["dram"]))
                entered.flags[index] = 1
                entered.ops.extend(self._record_policy.ops(owner, key))
                if key in owner.pins:
                    entered.commands.set_pinned(node_id, owner, key, pinned=True)
        return entered

    def cancel(self, tenant: Tenant, key: bytes) -> None:
        """End the block's orders, since it is being removed: copies that arrive later are refused."""
        for node_id in self._nodes.pop((tenant.name, key), ()):
            del self._orders[tenant.name, key, node_id]

    def end_orders_of_node(self, node_id: int) -> None:
        """End the node's orders, since its registration is over. O(orders)."""
        for copy_id in [copy_id for copy_id in self._orders if copy_id[2] == node_id]:
            self._end(copy_id, self._orders[copy_id].generation)

    def expire(self, now_ns: int) -> None:
        """End orders whose time is over."""
        while self._expiry:
            copy_id, order = self._expiry[0]
            if self._orders.get(copy_id) is order:
                if order.expires_ns > now_ns:
                    break
                self._end(copy_id, order.generation)
            self._expiry.popleft()
        if len(self._expiry) > 2 * len(self._orders) + SPARE_ENDS:  # stale entries behind a current one
            self._expiry = deque(one for one in self._expiry if self._orders.get(one[0]) is one[1])

    def check_integrity(self) -> None:
        """Assert that every order is found by its block and will expire. For tests; O(orders)."""
        assert {(*block, node_id) for block, nodes in self._nodes.items() for node_id in nodes} == set(self._orders)
        assert all(nodes for nodes in self._nodes.values())
        assert set(self._orders.items()) <= set(self._expiry)

    def _live(self, node_id: int) -> NodeMember:
        node = self._members.get(node_id)
        if node is None or not node.is_live:
            raise Unavailable(f"node {node_id} is not alive: no blocks can be copied from or to it")
        return node

    def _is_wanted(self, owner: Tenant, key: bytes, row: int, node_id: int, source_node_id: int) -> bool:
        holders = [holder for holder, _state in self._rows.pairs(row)]
        return source_node_id in holders and node_id not in holders and not self.is_removed(owner, key, row)

    def _message(self, tenant: str, namespace: str, source: NodeMember, wanted: Sequence[tuple[bytes, int]], reason: int) -> CopyBlocks:
        versions = [self._rows.version(row) for _key, row in wanted]
        return CopyBlocks(
            self._master_epoch,
            tenant,
            namespace,
            source.node_id,
            source.info.host_id,
            source.info.unix,
            source.info.tcp,
            [key for key, _row in wanted],
            [version.size for version in versions],
            [version.checksum for version in versions],
            [version.generation for version in versions],
            [version.parent for version in versions],
            [source.description.transfer] if source.description.transfer else [],
            reason=reason,
        )

    def _add(self, copy_id: _CopyId, order: _OrderedCopy) -> bool:
        """Return False if there is a current order, or too many. An order of a former registration or version is
        replaced."""
        former = self._orders.get(copy_id)
        if former is not None and former[:2] == order[:2]:
            return False
        if former is not None:
            self._end(copy_id, former.generation)
        if len(self._orders) >= MAX_ORDERS:
            return False
        self._orders[copy_id] = order
        self._nodes.setdefault(copy_id[:2], []).append(copy_id[2])
        self._expiry.append((copy_id, order))
        return True

    def _end(self, copy_id: _CopyId, generation: int) -> _OrderedCopy | None:
        """End and return the order of this generation, None if there is none."""
        order = self._orders.get(copy_id)
        if order is None or order.generation != generation:
            return None
        del self._orders[copy_id]
        nodes = self._nodes[copy_id[:2]]
        nodes.remove(copy_id[2])
        if not nodes:
            del self._nodes[copy_id[:2]]
        return order
