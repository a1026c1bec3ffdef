"""Membership: the nodes, their stable ids, their state, and the epoch of each registration. Sans-I/O; `now_ns` is
monotonic and passed in.

A node lives from its registration until its connection to the master breaks or its heartbeats stop for the TTL.
Messages of a dead node, or under an older registration, fail with StaleEpoch, and the node registers again.

A node's *removal horizon* is a generation. Blocks up to it may have been removed while the node was unreachable, so
it must drop them when it returns. An unknown node gets the horizon of unknown nodes, since it may be a forgotten
one. writes/removals.py raises horizons."""

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
    NodeRecord,
    UnknownNodesRecord,
)
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import Full, InvalidArgument, StaleEpoch
from kvstore.protocol.message import MAX_TENANT_USES
from kvstore.protocol.node_states import ALIVE, DEAD, NOT_RUNNING, STOPPED, SYNCING


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """Identity and addresses of a node. `instance` differs in every process. `unix` ("" for none) is valid on the
    host with this `host_id`."""

    name: str
    instance: int
    version: str = ""
    host_id: str = ""
    unix: str = ""
    tcp: str = ""
    http: str = ""
    accepts_traces: bool = False
    """It accepts trace messages on its connection."""


@dataclass(slots=True, eq=False)
class NodeMember:
    """A known node. `changed_ns` is the time of its registration, death or stop. STOPPED differs from DEAD only for
    display: its process ended in order."""

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
    """Counters of its host's NICs, as of the last heartbeat."""
    tenants: Sequence[pb.TenantUse] = ()
    slow: Sequence[pb.SlowRequest] = ()
    """Its slowest requests, as last reported."""
    rates: NodeRates = field(default_factory=NodeRates)
    """Measured rates of receiving from other nodes."""
    load: NodeLoad = field(default_factory=NodeLoad)
    description: Description = NO_DESCRIPTION
    """As last reported, also before a restart of the master."""
    revision: int = 0
    """Increases with each change of the description."""
    written_off: bool = False
    """Dead for so long that it is no longer a holder of any block."""
    removal_horizon: int = 0
    """It must drop blocks up to this generation, unless the directory lists it as a holder; 0 for none."""
    drain: str = ""
    """Destination of a drain (records.DRAINS); "" if it is not drained."""
    is_stopping: bool = False
    """Its process has announced its end."""
    is_new: bool = False
    """Its name was unknown when it registered: it is new, or was forgotten."""
    dropped: int = 0
    """Blocks of its inventory that it had to drop, since its last registration."""
    known_blocks: int = 0
    """Blocks that listed it as a holder when it registered."""
    owed: int = 0
    """Removed blocks in its inventory whose drop it has not acknowledged."""

    @property
    def is_live(self) -> bool:
        return self.state not in NOT_RUNNING

    @property
    def takes_blocks(self) -> bool:
        """True if it is live, and neither drained nor stopping."""
        return self.is_live and not self.drain and not self.counters.get("closed", 0)

    @property
    def host(self) -> str:
        """Host part of its TCP address."""
        return self.info.tcp.rpartition(":")[0]

    @property
    def is_settled(self) -> bool:
        """True if it has sent its inventory and dropped all removed blocks: no removed block can return with it."""
        return self.state == ALIVE and not self.owed

    @property
    def free_bytes(self) -> int:
        """Bytes that can be written without eviction, over the healthy tiers, less those granted since. May be
        negative."""
        free_bytes = sum(tier.capacity_bytes - tier.used_bytes - tier.quarantined_bytes for tier in self._healthy())
        return free_bytes - self.reserved_bytes

    @property
    def capacity_bytes(self) -> int:
        return sum(tier.capacity_bytes for tier in self._healthy())

    @property
    def largest_bytes(self) -> int:
        """Capacity of the largest tier: the limit of a value's size."""
        return max((tier.capacity_bytes for tier in self._healthy()), default=0)

    @property
    def dram_bytes(self) -> int:
        return sum(tier.capacity_bytes for tier in self._healthy() if tier.name == "dram")

    def _healthy(self) -> list[pb.TierStatus]:
        return [tier for tier in self.tiers if tier.health == "ok"]


class Membership:
    """Known nodes by id and name. Not thread-safe."""

    def __init__(self, *, wall_ns: int, node_ttl_ns: int, max_live: int, max_absent: int) -> None:
        """Registration epochs start above `wall_ns`, so that none repeats one of a former master.

        A new node beyond `max_live` is refused; `excess_dead` returns the dead ones beyond `max_absent`."""
        self._next_epoch = wall_ns + 1
        self._node_ttl_ns = node_ttl_ns
        self._max_live = max_live
        self._max_absent = max_absent
        self._last_node_id = 0
        self._unknown_horizon = 0
        self._by_id: dict[int, NodeMember] = {}
        self._by_name: dict[str, NodeMember] = {}
        self._drains: dict[str, str] = {}
        """Drained nodes by name: a drain's record may be read before its node's."""

    def __iter__(self) -> Iterator[NodeMember]:
        return iter(self._by_id.values())

    def get(self, node_id: int) -> NodeMember | None:
        return self._by_id.get(node_id)

    def named(self, name: str) -> NodeMember | None:
        return self._by_name.get(name)

    def live(self) -> list[NodeMember]:
        return [node for node in self._by_id.values() if node.is_live]

    def remember(self, record: NodeRecord, now_ns: int) -> None:
        """Add a node from the catalog: dead until it registers."""
        self._add(NodeMember(record.node_id, NodeInfo(record.name, 0), changed_ns=now_ns, removal_horizon=record.removal_horizon))

    def load_unknown_nodes(self, record: UnknownNodesRecord) -> None:
        """Load the catalog's record about unknown nodes."""
        self._unknown_horizon = record.removal_horizon
        self._last_node_id = max(self._last_node_id, record.last_node_id)

    def set_drain(self, name: str, to: str) -> None:
        """Set the drain of a node, "" for none. The node need not be known yet."""
        if to:
            self._drains[name] = to
        else:
            self._drains.pop(name, None)
        node = self._by_name.get(name)
        if node is not None:
            node.drain = to

    def set_stopped(self, name: str) -> None:
        """Load that the node's process ended in order."""
        node = self._by_name.get(name)
        if node is not None:
            node.state, node.is_stopping = STOPPED, True

    def stopping(self, node_id: int, epoch: int) -> NodeMember:
        """Mark that the node's process is about to end. Raises StaleEpoch."""
        node = self.check(node_id, epoch)
        node.is_stopping = True
        return node

    def register(
        self, info: NodeInfo, tiers: Sequence[pb.TierStatus], now_ns: int, description: Description = NO_DESCRIPTION, *, node_id: int = 0
    ) -> tuple[NodeMember, bool]:
        """Return the node, under a new epoch and SYNCING, and True if its name was unknown.

        A new node gets the id `node_id`, which must be unused, or the next one (0). The same process may register
        again. Raises InvalidArgument if another live process has the name, or name or description is too long; Full
        for a new name when `max_live` nodes live."""
        if not 1 <= len(info.name.encode()) <= MAX_NAME_BYTES:
            raise InvalidArgument(f"a node's name is 1 to {MAX_NAME_BYTES} bytes long")
        _check(description)
        node, is_new = self._by_name.get(info.name), False
        if node is None:
            self._check_limit(info.name)
            node, is_new = self._add(NodeMember(node_id or self._last_node_id + 1, info, removal_horizon=self._unknown_horizon)), True
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
        """Return the live node. Raises StaleEpoch if `epoch` is not its current registration, or it counts as dead."""
        node = self._by_id.get(node_id)
        if node is None or node.epoch != epoch or not node.is_live:
            raise StaleEpoch(f"node {node_id} sent a message of registration {epoch}, which is over: it must register again")
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
        """Record a heartbeat with the node's state. Raises StaleEpoch, InvalidArgument; nothing has changed then."""
        node = self.check(node_id, epoch)
        if len(tenants) > MAX_TENANT_USES:
            raise InvalidArgument(f"a node reported {len(tenants)} tenants: at most {MAX_TENANT_USES} are allowed")
        node.tiers, node.counters, node.tenants = tiers, counters, tenants
        node.heartbeat_ns, node.reserved_bytes = now_ns, 0
        node.load.update(counters, now_ns)

    def describe(self, node_id: int, epoch: int, *, topology: bytes | None, transfer: bytes | None) -> tuple[NodeMember, Description]:
        """Replace parts of the node's description (None: unchanged). Return the node and its former description.

        Raises StaleEpoch, InvalidArgument."""
        node = self.check(node_id, epoch)
        old = node.description
        new = Description(old.topology if topology is None else topology, old.transfer if transfer is None else transfer)
        _check(new)
        self._set_description(node, new)
        return node, old

    def disconnected(self, node_id: int, epoch: int, now_ns: int) -> bool:
        """The connection of registration `epoch` broke. Return True if the node died of it; False if it has
        registered again."""
        node = self._by_id.get(node_id)
        if node is None or node.epoch != epoch or not node.is_live:
            return False
        _end(node, now_ns)
        return True

    def expire(self, now_ns: int) -> list[NodeMember]:
        """Return the nodes that died of silence."""
        silent = [node for node in self.live() if node.heartbeat_ns + self._node_ttl_ns <= now_ns]
        for node in silent:
            _end(node, now_ns)
        return silent

    def write_off(self, now_ns: int, after_ns: int) -> list[NodeMember]:
        """Return the nodes that have been dead for `after_ns`; each once a death."""
        found = [
            node for node in self._by_id.values() if not node.is_live and not node.written_off and node.changed_ns + after_ns <= now_ns
        ]
        for node in found:
            node.written_off = True
        return found

    def excess_dead(self) -> list[NodeMember]:
        """Return the dead nodes beyond `max_absent`, those that died first. A node known only from the catalog
        counts once it is written off: after a failover all nodes have yet to register."""
        dead = [node for node in self._by_id.values() if not node.is_live and (node.epoch or node.written_off)]
        excess = len(dead) - self._max_absent
        return sorted(dead, key=lambda node: node.changed_ns)[:excess] if excess > 0 else []

    def forget(self, name: str) -> NodeMember:
        """Forget the dead node `name`: if it returns it is unknown, and gets another id.

        Raises InvalidArgument: no such node, or it is alive."""
        node = self._by_name.get(name)
        if node is None:
            known = ", ".join(sorted(self._by_name)) or "none"
            raise InvalidArgument(f"there is no node {name!r}; there are: {known}")
        if node.is_live:
            raise InvalidArgument(f"node {name!r} is alive, at {node.info.tcp or node.info.unix}: stop it before it is forgotten")
        del self._by_name[name], self._by_id[node.node_id]
        self._drains.pop(name, None)
        return node

    def raise_horizons(self, generation: int) -> list[Op]:
        """Set the horizon of every unsettled node, and of unknown nodes, to `generation`; return catalog operations."""
        away = [node for node in self._by_id.values() if not node.is_settled]
        for node in away:
            node.removal_horizon = generation
        return [
            self.raise_unknown_horizon(generation),
            *(records.put_node(node.info.name, node.node_id, node.removal_horizon) for node in away),
        ]

    def raise_unknown_horizon(self, generation: int) -> Op:
        self._unknown_horizon = generation
        return records.put_unknown_nodes(generation, self._last_node_id)

    def clear_horizons(self) -> list[Op]:
        """Clear the horizons of settled nodes; return catalog operations."""
        settled = [node for node in self._by_id.values() if node.removal_horizon and node.is_settled]
        for node in settled:
            node.removal_horizon = 0
        return [records.put_node(node.info.name, node.node_id, 0) for node in settled]

    def _set_description(self, node: NodeMember, description: Description) -> None:
        if description != node.description:
            node.description, node.revision = description, self._next()

    def _next(self) -> int:
        self._next_epoch += 1
        return self._next_epoch - 1

    def _check_limit(self, name: str) -> None:
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
