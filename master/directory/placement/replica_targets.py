"""Replica targets: how many nodes are to hold a block, and the copies made for it. Sans-I/O; `now_ns` is passed in.

A target is a record, durable until the block is removed. Copies are ordered when a target is set, and again when
nodes join or die, or a client repeats the request; a bounded number at once (copies.py). A replica that a full node
evicted is not restored before that: it would displace another one. Replicas are at different hosts if possible."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kvstore.master.catalogs.interface import Change
from kvstore.master.directory import records
from kvstore.master.directory.directory_parts import DirectoryParts
from kvstore.master.directory.index.holders import HINT
from kvstore.master.directory.membership.members import NodeMember
from kvstore.master.directory.placement.copies import CHECK_COST, CopyBatcher, CopyLimits, CopyOrder, CopyReceivers
from kvstore.master.directory.placement.replication import ReplicaPlanner
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.message import MAX_REPLICAS, REPLICAS_NO_BLOCK, REPLICAS_NO_NODES, REPLICAS_PENDING, REPLICAS_REACHED
from kvstore.protocol.node_states import ALIVE

PAUSE_NS: Final = 1_000_000_000
"""Delay before a block that found no room is checked again."""
NO_ROOM_COST: Final = 2 * CHECK_COST
"""Additional cost of a block without room: it is checked repeatedly while the caches are full."""

_BlockId = tuple[str, bytes]
"""Tenant and key."""


class TargetResult(NamedTuple):
    """A flag a key (REPLICAS_...), and operations."""

    flags: bytes
    ops: list[Change]


class ReplicaTargets:
    """Blocks with a replica target, and their missing copies. Not thread-safe."""

    def __init__(self, parts: DirectoryParts, replication: ReplicaPlanner, pace: CopyLimits, *, patience_ns: int) -> None:
        """A node that died less than `patience_ns` ago may return with its blocks: its replicas still count."""
        self._rows, self._tenants, self._members, self._replication = parts.rows, parts.tenants, parts.members, replication
        self._batcher = CopyBatcher(parts, replication, pace)
        self._patience_ns = patience_ns
        self._due: OrderedDict[_BlockId, None] = OrderedDict()
        """Blocks to be checked next."""
        self._no_room: OrderedDict[_BlockId, int] = OrderedDict()
        """Blocks that found no room, and when they are checked again, if no others are due."""
        self._walk: Iterator[_BlockId] = iter(())
        """Walk over all targets."""
        self._seen: frozenset[tuple[int, int, str]] = frozenset()
        """Counted nodes at the begin of the walk, with registrations and states."""
        self._last: frozenset[int] = frozenset()
        """Receivers of the last block: chains stay together, and holder sets stay few."""
        self._ordered: set[_BlockId] = set()
        """Blocks with copies ordered in this step."""

    def ask(self, tenant: str, keys: Sequence[bytes], count: int) -> TargetResult:
        """Raise the target of these blocks to `count`; return which have it now. Unreadable blocks get no target.
        Raises InvalidArgument for a count out of range."""
        if not 1 <= count <= MAX_REPLICAS:
            raise InvalidArgument(f"a block has 1 to {MAX_REPLICAS} replicas, not {count}")
        owner = self._tenants.lookup(tenant)
        accepting = self._accepting()
        flags, ops = bytearray(), list[Change]()
        there: dict[int, int] = {}  # by holder set: the number of confirmed, staying holders
        for key, row in zip(keys, owner.rows.find(keys).tolist(), strict=True):
            if not self._rows.sets.live[self._rows.holders[row]]:
                flags.append(REPLICAS_NO_BLOCK)
                continue
            if count > owner.targets.get(key, 1):
                owner.targets[key] = count
                ops.append(records.put_target(owner.prefix, key, count))
                self._due[tenant, key] = None
            held = self._rows.holders[row]
            if held not in there:
                there[held] = sum(node_id in accepting and not state & HINT for node_id, state in self._rows.pairs(row))
            is_there, may_be = there[held] >= count, len(accepting) >= count
            flags.append(REPLICAS_REACHED if is_there else REPLICAS_PENDING if may_be else REPLICAS_NO_NODES)
            if not is_there and may_be and (tenant, key) not in self._no_room and not self._replication.is_ordered(tenant, key):
                self._due[tenant, key] = None  # a replica was evicted since: without a check a waiting client would time out
        return TargetResult(bytes(flags), ops)

    def recheck(self, tenant: str, key: bytes) -> None:
        """Check the block again: it may have lost replicas other than by eviction."""
        if key in self._tenants.lookup(tenant).targets:
            self._due[tenant, key] = None

    def step(self, now_ns: int, *, is_periodic: bool = True) -> list[CopyOrder]:
        """Order the next copies. Checks blocks whose copies arrived or failed. Blocks without room, and all targets
        after nodes joined or died, are checked in ticks only: requests are many, and each would do a full step of
        them."""
        batcher = self._batcher
        self._due.update(dict.fromkeys(batcher.begin(now_ns)))
        accepting = self._accepting()
        receivers = CopyReceivers(batcher, accepting)
        counted = {node.node_id: node for node in self._members if not node.drain and self._counts(node, now_ns)}
        seen = frozenset((node.node_id, node.epoch, node.state) for node in counted.values())
        if seen != self._seen:
            self._seen = seen
            self._walk = self._all()
        self._ordered.clear()
        cost = 0
        while cost + receivers.checked < batcher.pace.rows and not batcher.is_busy:
            block_id = self._next(now_ns) if self._due or is_periodic else None
            if block_id is None:
                break
            cost += CHECK_COST
            if block_id in self._ordered:
                continue
            self._no_room.pop(block_id, None)
            if not self._check_block(block_id, accepting, counted, receivers):
                self._no_room[block_id] = now_ns + PAUSE_NS
                cost += NO_ROOM_COST
        return batcher.take_orders()

    def _next(self, now_ns: int) -> _BlockId | None:
        if self._due:
            return self._due.popitem(last=False)[0]
        block_id = next(self._walk, None)
        if block_id is None and self._no_room and next(iter(self._no_room.values())) <= now_ns:
            return self._no_room.popitem(last=False)[0]
        return block_id

    def _accepting(self) -> dict[int, NodeMember]:
        return {node.node_id: node for node in self._members.live() if node.takes_blocks and node.state == ALIVE}

    def _all(self) -> Iterator[_BlockId]:
        """Yield all targets, by tenant."""
        for tenant in list(self._tenants):
            for key in list(tenant.targets):
                yield tenant.name, key

    def _counts(self, node: NodeMember, now_ns: int) -> bool:
        """Return True if the node's replicas count: it takes blocks, or died only recently."""
        return node.takes_blocks or (not node.is_live and now_ns < node.changed_ns + self._patience_ns)

    def _check_block(
        self, block_id: _BlockId, accepting: dict[int, NodeMember], counted: dict[int, NodeMember], receivers: CopyReceivers
    ) -> bool:
        """Order the missing copies of a block. Return False if no node has room for one."""
        name, key = block_id
        owner = self._tenants.lookup(name)
        row = owner.rows.get(key)
        pairs = self._rows.pairs(row)
        sources = [node_id for node_id, state in pairs if not state & HINT and node_id in self._rows.sets.live_nodes]
        if key not in owner.targets or not sources or self._replication.is_removed(owner, key, row):
            return True
        has = {node_id for node_id, state in pairs if node_id in counted and not (state & HINT and node_id in accepting)}
        has |= accepting.keys() & self._replication.receivers(name, key)
        chosen: set[int] = set()
        has_room = True
        for _ in range(owner.targets[key] - len(has)):
            there = has.union(sources)
            if accepting.keys() <= there:
                break  # too few nodes: once one joins, all targets are walked
            hosts = {node.host for node_id in there if (node := self._members.get(node_id)) is not None}
            node_id = receivers.choose(self._rows.sizes[row], has=there, hosts=hosts, last=self._last)
            if not node_id:
                has_room = False
                break
            has.add(node_id)
            chosen.add(node_id)
            self._batcher.add(name, key, self._rows.sizes[row], node_id=node_id, source_node_id=sources[0])
        if chosen:
            self._last = frozenset(chosen)
            self._ordered.add(block_id)
        return has_room
