"""Replica targets: how many nodes a block is to be at, and which copies are made for it. Sans-I/O; `now_ns` is passed in.

A target is a record beside the block's: it outlives the master, and ends with the block. Copies are ordered when a target is set, and
again when nodes come or go or somebody asks again, a bounded amount at once (copies.py). A replica that its node evicted for want of
room is not made anew before that: it would have another one leave. Never two at one host where there is a choice.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kvstore.master.catalogs.interface import Change
from kvstore.master.directory import records
from kvstore.master.directory.directory_parts import DirectoryParts
from kvstore.master.directory.index.holders import HINT
from kvstore.master.directory.membership.members import NodeMember
from kvstore.master.directory.placement.copies import LOOK_COST, CopyBatcher, CopyLimits, CopyOrder, CopyReceivers
from kvstore.master.directory.placement.replication import ReplicaPlanner
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.message import MAX_REPLICAS, REPLICAS_NO_BLOCK, REPLICAS_NO_NODES, REPLICAS_PENDING, REPLICAS_REACHED
from kvstore.protocol.node_states import ALIVE

PAUSE_NS: Final = 1_000_000_000
"""Before what has found no room is looked at again."""
NO_ROOM_COST: Final = 2 * LOOK_COST
"""As so much more counts what has found no room: it comes again and again, where a cache is full for ever."""

_Where = tuple[str, bytes]
"""Tenant and key."""


class TargetResult(NamedTuple):
    """A flag a key (REPLICAS_...), and operations."""

    flags: bytes
    ops: list[Change]


class ReplicaTargets:
    """See the module. Not thread-safe."""

    def __init__(self, parts: DirectoryParts, replication: ReplicaPlanner, pace: CopyLimits, *, patience_ns: int) -> None:
        """A node that died less than `patience_ns` ago may be back with what it had: it is not missed yet."""
        self._rows, self._tenants, self._members, self._replication = parts.rows, parts.tenants, parts.members, replication
        self._copying = CopyBatcher(parts, replication, pace)
        self._patience_ns = patience_ns
        self._due: OrderedDict[_Where, None] = OrderedDict()
        """To be looked at next."""
        self._no_room: OrderedDict[_Where, int] = OrderedDict()
        """What has found no room, and from when on it is looked at again: when there is nothing else to look at."""
        self._walk: Iterator[_Where] = iter(())
        """Over all targets."""
        self._seen: frozenset[tuple[int, int, str]] = frozenset()
        """The nodes that counted when the walk was begun, their registrations and states."""
        self._last: frozenset[int] = frozenset()
        """Who got the block before: chains stay together, and there are few sets of holders."""
        self._ordered: set[_Where] = set()
        """What copies were ordered of in this step."""

    def ask(self, tenant: str, keys: Sequence[bytes], count: int) -> TargetResult:
        """Have these blocks be at `count` nodes, or more if more were asked for before: where they are now. Those that cannot be read get
        no target. Raises InvalidArgument: a count out of range."""
        if not 1 <= count <= MAX_REPLICAS:
            raise InvalidArgument(f"a block has 1 to {MAX_REPLICAS} replicas, not {count}")
        owner = self._tenants.asked(tenant)
        takers = self._takers()
        flags, ops = bytearray(), list[Change]()
        there: dict[int, int] = {}  # of each set of holders, how many have the block and stay
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
                there[held] = sum(node_id in takers and not state & HINT for node_id, state in self._rows.pairs(row))
            is_there, may_be = there[held] >= count, len(takers) >= count
            flags.append(REPLICAS_REACHED if is_there else REPLICAS_PENDING if may_be else REPLICAS_NO_NODES)
            if not is_there and may_be and (tenant, key) not in self._no_room and not self._replication.is_ordered(tenant, key):
                self._due[tenant, key] = None  # one was evicted since, say: who waits for it would do so in vain
        return TargetResult(bytes(flags), ops)

    def look_again(self, tenant: str, key: bytes) -> None:
        """The block may be at fewer nodes than it was, and nobody has evicted it."""
        if key in self._tenants.asked(tenant).targets:
            self._due[tenant, key] = None

    def step(self, now_ns: int, *, is_tick: bool = True) -> list[CopyOrder]:
        """Order the next copies. What has arrived or failed since the last step is looked at again. What found no room, and all targets
        when nodes have come or gone, are looked at in ticks only: requests are many, and each would look at a whole pace of them."""
        copying = self._copying
        self._due.update(dict.fromkeys(copying.begin(now_ns)))
        takers = self._takers()
        receivers = CopyReceivers(copying, takers)
        counted = {node.node_id: node for node in self._members if not node.drain and self._counts(node, now_ns)}
        seen = frozenset((node.node_id, node.epoch, node.state) for node in counted.values())
        if seen != self._seen:
            self._seen = seen
            self._walk = self._all()
        self._ordered.clear()
        cost = 0
        while cost + receivers.looked_at < copying.pace.rows and not copying.is_busy:
            where = self._next(now_ns) if self._due or is_tick else None
            if where is None:
                break
            cost += LOOK_COST
            if where in self._ordered:
                continue
            self._no_room.pop(where, None)
            if not self._look_at(where, takers, counted, receivers):
                self._no_room[where] = now_ns + PAUSE_NS
                cost += NO_ROOM_COST
        return copying.take_orders()

    def _next(self, now_ns: int) -> _Where | None:
        if self._due:
            return self._due.popitem(last=False)[0]
        where = next(self._walk, None)
        if where is None and self._no_room and next(iter(self._no_room.values())) <= now_ns:
            return self._no_room.popitem(last=False)[0]
        return where

    def _takers(self) -> dict[int, NodeMember]:
        return {node.node_id: node for node in self._members.live() if node.takes_blocks and node.state == ALIVE}

    def _all(self) -> Iterator[_Where]:
        """All that there are now, tenant by tenant."""
        for tenant in list(self._tenants):
            for key in list(tenant.targets):
                yield tenant.name, key

    def _counts(self, node: NodeMember, now_ns: int) -> bool:
        """What it had is not missed: it takes blocks, tells its inventory just now, or may yet be back."""
        return node.takes_blocks or (not node.is_live and now_ns < node.changed_ns + self._patience_ns)

    def _look_at(self, where: _Where, takers: dict[int, NodeMember], counted: dict[int, NodeMember], receivers: CopyReceivers) -> bool:
        """Order what the block lacks. False: no node has room for it."""
        name, key = where
        owner = self._tenants.asked(name)
        row = owner.rows.get(key)
        pairs = self._rows.pairs(row)
        sources = [node_id for node_id, state in pairs if not state & HINT and node_id in self._rows.sets.live_nodes]
        if key not in owner.targets or not sources or self._replication.is_removed(owner, key, row):
            return True
        has = {node_id for node_id, state in pairs if node_id in counted and not (state & HINT and node_id in takers)}
        has |= takers.keys() & self._replication.receivers(name, key)
        chosen: set[int] = set()
        has_room = True
        for _ in range(owner.targets[key] - len(has)):
            there = has.union(sources)
            if takers.keys() <= there:
                break  # there are not as many nodes: once there are, all is walked over
            hosts = {node.host for node_id in there if (node := self._members.get(node_id)) is not None}
            node_id = receivers.choose(self._rows.sizes[row], has=there, hosts=hosts, last=self._last)
            if not node_id:
                has_room = False
                break
            has.add(node_id)
            chosen.add(node_id)
            self._copying.add(name, key, self._rows.sizes[row], node_id=node_id, source_node_id=sources[0])
        if chosen:
            self._last = frozenset(chosen)
            self._ordered.add(where)
        return has_room
