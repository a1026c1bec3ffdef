"""The nodes: their stable ids, who is alive, and the epoch of each registration. Sans-I/O; `now_ns` is monotonic and passed in.

A node lives from its registration until its link to the master breaks or its heartbeats stop for the TTL; what a node says under
an older registration than its last, or while it counts as dead, is refused with StaleEpoch, and it registers again.

A node's *floor* is a generation: what the node has up to it may have been removed while it was away, so it must drop that when it
returns. A node that is not known gets the strangers' floor, since it may be one that was forgotten. Removals say when floors rise.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.master.catalogs.interface import Op
from kvstore.master.directory import records
from kvstore.master.directory.membership.node_load import NodeLoad, NodeRates
from kvstore.master.directory.records import (
    MAX_DESCRIPTION_BYTES,
    MAX_NAME_BYTES,
    NO_DESCRIPTION,
    Description,
    GuestsRecord,
    NodeRecord,
)
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import Full, InvalidArgument, StaleEpoch
from kvstore.protocol.message import MAX_TENANT_USES
from kvstore.protocol.node_states import ALIVE, DEAD, NOT_RUNNING, STOPPED, SYNCING


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """Who a node is. `instance` differs in every process; `unix` ("" for none) works where it is the socket of that `host_id`."""

    name: str
    instance: int
    version: str = ""
    host_id: str = ""
    unix: str = ""
    tcp: str = ""
    http: str = ""
    accepts_traces: bool = False
    """Trace messages, over its link."""


@dataclass(slots=True, eq=False)
class NodeMember:
    """A node that was ever seen. `changed_ns` is when it registered, died or stopped. A stopped one is as dead as others, but for what
    operators are told: its process ended in an orderly way."""

    node_id: int
    info: NodeInfo
    state: str = DEAD
    epoch: int = 0
    changed_ns: int = 0
    heartbeat_ns: int = 0
    reserved_bytes: int = 0
    """Granted since the last heartbeat, so not yet in `tiers`."""
    tiers: Sequence[pb.TierStatus] = ()
    counters: Mapping[str, int] = field(default_factory=dict)
    links: Sequence[pb.LinkFlow] = ()
    """What its host's NICs have carried, as of the last heartbeat."""
    tenants: Sequence[pb.TenantUse] = ()
    slow: Sequence[pb.SlowRequest] = ()
    """The slowest requests there, as it told last."""
    rates: NodeRates = field(default_factory=NodeRates)
    """At which it received from other nodes lately, as it measured."""
    load: NodeLoad = field(default_factory=NodeLoad)
    description: Description = NO_DESCRIPTION
    """As the node last said, before a restart of the master too."""
    revision: int = 0
    """Rises with each change of the description."""
    written_off: bool = False
    """Dead for so long that it is no longer counted as a holder of anything."""
    floor: int = 0
    """What it has up to this generation must go, unless the directory lists it there; 0 for nothing."""
    drain: str = ""
    """Where what only it has is to go (records.DRAINS), for it is to be stopped; "": it is not."""
    is_stopping: bool = False
    """Its process has announced its end."""
    is_new: bool = False
    """No node of this name was known when it registered: it is new, or was forgotten."""
    dropped: int = 0
    """Blocks of its inventory that had to go, since its last registration."""
    known_blocks: int = 0
    """That it was thought to have when it registered."""
    owed: int = 0
    """Removed blocks that its inventory named, and that it has not said to have dropped."""

    @property
    def is_live(self) -> bool:
        return self.state not in NOT_RUNNING

    @property
    def takes_blocks(self) -> bool:
        """It lives, and is neither drained nor about to end."""
        return self.is_live and not self.drain and not self.counters.get("closed", 0)

    @property
    def host(self) -> str:
        """Where others reach it."""
        return self.info.tcp.rpartition(":")[0]

    @property
    def is_settled(self) -> bool:
        """It has told its inventory, and dropped what was removed: nothing that is gone can come back with it any more."""
        return self.state == ALIVE and not self.owed

    @property
    def free_bytes(self) -> int:
        """Bytes that can be written without eviction, over the healthy tiers, less what was granted since. May be negative."""
        free_bytes = sum(tier.capacity_bytes - tier.used_bytes - tier.quarantined_bytes for tier in self._healthy())
        return free_bytes - self.reserved_bytes

    @property
    def capacity_bytes(self) -> int:
        return sum(tier.capacity_bytes for tier in self._healthy())

    @property
    def largest_bytes(self) -> int:
        """The capacity of the largest tier: no larger value can be kept."""
        return max((tier.capacity_bytes for tier in self._healthy()), default=0)

    @property
    def dram_bytes(self) -> int:
        return sum(tier.capacity_bytes for tier in self._healthy() if tier.name == "dram")

    def _healthy(self) -> list[pb.TierStatus]:
        return [tier for tier in self.tiers if tier.health == "ok"]


class Membership:
    """The nodes by id. Not thread-safe."""

    def __init__(self, *, wall_ns: int, node_ttl_ns: int, max_live: int, max_absent: int) -> None:
        """Registration epochs count from `wall_ns`, the wall clock or what is above it, so that none repeats one of a former master's.

        A new node beyond `max_live` is refused; of the dead ones `max_absent` are kept (`surplus`).
        """
        self._next_epoch = wall_ns + 1
        self._node_ttl_ns = node_ttl_ns
        self._max_live = max_live
        self._max_absent = max_absent
        self._last_node_id = 0
        self._strangers_floor = 0
        self._by_id: dict[int, NodeMember] = {}
        self._by_name: dict[str, NodeMember] = {}
        self._drains: dict[str, str] = {}
        """Of the nodes that are drained, by name: a record may be read before that of its node."""

    def __iter__(self) -> Iterator[NodeMember]:
        return iter(self._by_id.values())

    def get(self, node_id: int) -> NodeMember | None:
        return self._by_id.get(node_id)

    def named(self, name: str) -> NodeMember | None:
        return self._by_name.get(name)

    def live(self) -> list[NodeMember]:
        return [node for node in self._by_id.values() if node.is_live]

    def remember(self, record: NodeRecord, now_ns: int) -> None:
        """A node known from the catalog: dead until it registers."""
        self._add(NodeMember(record.node_id, NodeInfo(record.name, 0), changed_ns=now_ns, floor=record.floor))

    def remember_strangers(self, record: GuestsRecord) -> None:
        """What the catalog says of nodes that it does not know."""
        self._strangers_floor = record.floor
        self._last_node_id = max(self._last_node_id, record.last_node_id)

    def set_drain(self, name: str, to: str) -> None:
        """The node of that name is drained, "": no more. It need not be known yet."""
        if to:
            self._drains[name] = to
        else:
            self._drains.pop(name, None)
        node = self._by_name.get(name)
        if node is not None:
            node.drain = to

    def set_stopped(self, name: str) -> None:
        """The process of the node of that name has ended in an orderly way, as the catalog has it."""
        node = self._by_name.get(name)
        if node is not None:
            node.state, node.is_stopping = STOPPED, True

    def stopping(self, node_id: int, epoch: int) -> NodeMember:
        """The node's process announces its end. Raises StaleEpoch."""
        node = self.check(node_id, epoch)
        node.is_stopping = True
        return node

    def register(
        self, info: NodeInfo, tiers: Sequence[pb.TierStatus], now_ns: int, description: Description = NO_DESCRIPTION, *, node_id: int = 0
    ) -> tuple[NodeMember, bool]:
        """The node, under a new epoch and SYNCING; whether its name was seen for the first time.

        A new one has the id `node_id`, which no other has, or the next one (0). The same process registers again freely. Raises
        InvalidArgument when another live process has the name, for a name that is empty or over MAX_NAME_BYTES, or a description over
        MAX_DESCRIPTION_BYTES; Full for a new name when `max_live` nodes live."""
        if not 1 <= len(info.name.encode()) <= MAX_NAME_BYTES:
            raise InvalidArgument(f"a node's name is 1 to {MAX_NAME_BYTES} bytes long")
        _check(description)
        node, is_new = self._by_name.get(info.name), False
        if node is None:
            self._check_room(info.name)
            node, is_new = self._add(NodeMember(node_id or self._last_node_id + 1, info, floor=self._strangers_floor)), True
        elif node.is_live and node.info.instance != info.instance:
            raise InvalidArgument(f"a live node already has the name {info.name!r}, at {node.info.tcp or node.info.unix}: choose another")
        node.info, node.tiers, node.state, node.counters, node.tenants = info, tiers, SYNCING, {}, ()
        node.slow = ()
        node.epoch = self._next()
        self._set_description(node, description)
        node.changed_ns = node.heartbeat_ns = now_ns
        node.reserved_bytes, node.written_off, node.owed, node.load = 0, False, 0, NodeLoad()
        node.is_stopping, node.is_new, node.dropped = False, is_new, 0
        return node, is_new

    def check(self, node_id: int, epoch: int) -> NodeMember:
        """The live node. Raises StaleEpoch when `epoch` is not its last registration's, or it counts as dead."""
        node = self._by_id.get(node_id)
        if node is None or node.epoch != epoch or not node.is_live:
            raise StaleEpoch(f"node {node_id} speaks under registration {epoch}, which is over: it must register again")
        return node

    def heartbeat(
        self,
        node_id: int,
        epoch: int,
        tiers: Sequence[pb.TierStatus],
        counters: Mapping[str, int],
        now_ns: int,
        *,
        tenants: Sequence[pb.TenantUse] = (),
    ) -> None:
        """The node lives, and this is how full it is. Raises StaleEpoch, InvalidArgument; nothing has changed."""
        node = self.check(node_id, epoch)
        if len(tenants) > MAX_TENANT_USES:
            raise InvalidArgument(f"a node tells of {len(tenants)} tenants: at most {MAX_TENANT_USES}")
        node.tiers, node.counters, node.tenants = tiers, counters, tenants
        node.heartbeat_ns, node.reserved_bytes = now_ns, 0
        node.load.told(counters, now_ns)

    def describe(self, node_id: int, epoch: int, *, topology: bytes | None, transfer: bytes | None) -> tuple[NodeMember, Description]:
        """The node says these parts of its description anew (None: not this one): the node, and what it said before.

        Raises StaleEpoch, InvalidArgument.
        """
        node = self.check(node_id, epoch)
        old = node.description
        new = Description(old.topology if topology is None else topology, old.transfer if transfer is None else transfer)
        _check(new)
        self._set_description(node, new)
        return node, old

    def disconnected(self, node_id: int, epoch: int, now_ns: int) -> bool:
        """The link of registration `epoch` broke; whether the node died of it (not if it has registered again since)."""
        node = self._by_id.get(node_id)
        if node is None or node.epoch != epoch or not node.is_live:
            return False
        _end(node, now_ns)
        return True

    def expire(self, now_ns: int) -> list[NodeMember]:
        """The nodes that died of silence by now."""
        silent = [node for node in self.live() if node.heartbeat_ns + self._node_ttl_ns <= now_ns]
        for node in silent:
            _end(node, now_ns)
        return silent

    def write_off(self, now_ns: int, after_ns: int) -> list[NodeMember]:
        """The nodes that have been dead for `after_ns` by now, each told once a death."""
        found = [
            node for node in self._by_id.values() if not node.is_live and not node.written_off and node.changed_ns + after_ns <= now_ns
        ]
        for node in found:
            node.written_off = True
        return found

    def surplus(self) -> list[NodeMember]:
        """The dead nodes beyond `max_absent`, those that died first. Of a node that was only read of nobody knows whether it is away: it
        counts once it is written off, for all nodes have yet to register with an owner that has just taken over."""
        dead = [node for node in self._by_id.values() if not node.is_live and (node.epoch or node.written_off)]
        excess = len(dead) - self._max_absent
        return sorted(dead, key=lambda node: node.changed_ns)[:excess] if excess > 0 else []

    def forget(self, name: str) -> NodeMember:
        """The dead node `name` is known no more: should it come back, it is a stranger, with another id.

        Raises InvalidArgument: no node has the name, or it is alive.
        """
        node = self._by_name.get(name)
        if node is None:
            known = ", ".join(sorted(self._by_name)) or "none"
            raise InvalidArgument(f"there is no node {name!r}; there are: {known}")
        if node.is_live:
            raise InvalidArgument(f"node {name!r} is alive, at {node.info.tcp or node.info.unix}: stop it before it is forgotten")
        del self._by_name[name], self._by_id[node.node_id]
        self._drains.pop(name, None)
        return node

    def raise_floors(self, generation: int) -> list[Op]:
        """The floor of every node that is not settled, strangers too, is `generation` from now on; operations for the catalog."""
        away = [node for node in self._by_id.values() if not node.is_settled]
        for node in away:
            node.floor = generation
        return [self.raise_strangers_floor(generation), *(records.put_node(node.info.name, node.node_id, node.floor) for node in away)]

    def raise_strangers_floor(self, generation: int) -> Op:
        self._strangers_floor = generation
        return records.put_strangers(generation, self._last_node_id)

    def clear_floors(self) -> list[Op]:
        """Nodes that are settled need no floor any more; operations for the catalog."""
        settled = [node for node in self._by_id.values() if node.floor and node.is_settled]
        for node in settled:
            node.floor = 0
        return [records.put_node(node.info.name, node.node_id, 0) for node in settled]

    def _set_description(self, node: NodeMember, description: Description) -> None:
        if description != node.description:
            node.description, node.revision = description, self._next()

    def _next(self) -> int:
        self._next_epoch += 1
        return self._next_epoch - 1

    def _check_room(self, name: str) -> None:
        live_count = len(self.live())
        if live_count >= self._max_live:
            raise Full(f"there are {live_count} live nodes, as many as max_nodes allows: {name!r} cannot join")

    def _add(self, node: NodeMember) -> NodeMember:
        self._last_node_id = max(self._last_node_id, node.node_id)
        node.drain = self._drains.get(node.info.name, "")
        self._by_id[node.node_id] = self._by_name[node.info.name] = node
        return node


def _end(node: NodeMember, now_ns: int) -> None:
    node.state, node.changed_ns = STOPPED if node.is_stopping else DEAD, now_ns


def _check(description: Description) -> None:
    if max(map(len, description)) > MAX_DESCRIPTION_BYTES:
        sizes = " and ".join(str(len(part)) for part in description)
        raise InvalidArgument(f"a node's topology and transfer description have at most {MAX_DESCRIPTION_BYTES} bytes each, not {sizes}")
