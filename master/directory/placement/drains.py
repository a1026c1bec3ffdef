"""Draining nodes: what only a node has that is to be stopped, where copies of it go, and when nothing is left. Sans-I/O; `now_ns` is passed
in.

Which nodes are drained is a record, so that a master that restarts goes on. What is left is counted over the sets of holders, of which
there are few, and the rows are walked a slice at a time to order copies of it (replication.py): a bounded amount at once, to the nodes
that have room. What finds none there is to be written to the drained node's own NVMe, if it has one: `mode`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvstore.master.catalogs.interface import Op
from kvstore.master.directory import records
from kvstore.master.directory.directory_parts import DirectoryParts
from kvstore.master.directory.index.holders import HINT
from kvstore.master.directory.membership.members import NodeMember
from kvstore.master.directory.placement.copies import LOOK_COST, CopyBatcher, CopyLimits, CopyOrder
from kvstore.master.directory.placement.replication import ReplicaPlanner
from kvstore.master.directory.records import DRAINS, TO_NVME, TO_PEERS
from kvstore.protocol.catalog_messages import DRAIN_CLOSED, DRAIN_SAVE
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.frames import MAX_VALUE_BYTES
from kvstore.protocol.message import TIER_BITS
from kvstore.protocol.node_states import ALIVE

LOOK_NS: Final = 500_000_000
"""How often what is left is counted."""
NVME: Final = TIER_BITS["nvme"]
WORKING: Final = ("open_puts", "undecided", "publish_backlog")
"""Counters of a node that may still bring blocks of which the directory knows nothing."""


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """See DrainStatus of control.proto."""

    to: str
    is_done: bool
    remaining_blocks: int
    nvme_only_blocks: int
    copying_blocks: int
    lacks_space: bool


@dataclass(slots=True)
class _Drain:
    """Of one node. `left` and `kept` as of the last look."""

    left: int = 0
    kept: int = 0
    is_quiet: bool = False
    """At the last look the node had said all, and nothing that it has can have been missed."""
    lacks_space: bool = False
    """Something has found no room in this walk over the rows, `lacked_room`: in the one before."""
    lacked_room: bool = False
    saves: bool = False
    told: tuple[int, int] = (0, 0)
    """Registration and mode of the last Drain that the node has answered."""


class NodeDrains:
    """See the module. Not thread-safe."""

    def __init__(self, parts: DirectoryParts, replication: ReplicaPlanner, pace: CopyLimits) -> None:
        self._rows, self._tenants, self._members, self._replication = parts.rows, parts.tenants, parts.members, replication
        self._copying = CopyBatcher(parts, replication, pace)
        self._drains: dict[int, _Drain] = {}
        self._wanted: dict[int, int] = {}
        """Sets of holders that are all to be stopped, to rows."""
        self._look_ns = 0
        self._row = 0
        self._target = 0
        """Who got the last block."""
        self._most_bytes = 0
        """No node has more room than this in this step."""

    # --- what operators say ---

    def begin(self, name: str, to: str) -> list[Op]:
        """Drain the node of that name; operations. Raises InvalidArgument: no node has the name, or `to` is none of DRAINS."""
        if to not in DRAINS:
            raise InvalidArgument(f"what a node has goes to one of {', '.join(DRAINS)}, not to {to!r}")
        node = self._named(name)
        if node.drain == to:
            return []
        self._members.set_drain(name, to)
        self._drains.pop(node.node_id, None)
        self._look_ns = 0
        return [records.put_drain(name, to)]

    def cancel(self, name: str) -> list[Op]:
        """It takes blocks again; copies under way go on. Operations. Raises InvalidArgument: no node has the name."""
        node = self._named(name)
        if not node.drain:
            return []
        self._members.set_drain(name, "")
        self._drains.pop(node.node_id, None)
        return [records.delete_drain(name)]

    def progress(self, node: NodeMember) -> DrainProgress | None:
        """None: it is not drained."""
        if not node.drain:
            return None
        drain = self._drains.get(node.node_id, _Drain())
        copying = self._copying.count_from(node.node_id)
        can_stay = node.drain == TO_NVME or drain.lacked_room
        is_done = drain.is_quiet and not drain.left and (can_stay or not drain.kept)
        return DrainProgress(node.drain, is_done, drain.left, drain.kept, copying, drain.lacked_room)

    # --- what nodes are told ---

    def to_tell(self) -> list[tuple[NodeMember, int]]:
        """The drained nodes that have not answered this mode under their registration yet."""
        found = []
        for node in self._members.live():
            if node.drain:
                drain = self._drains.setdefault(node.node_id, _Drain())
                mode = DRAIN_SAVE if drain.saves or node.drain == TO_NVME else DRAIN_CLOSED
                if drain.told != (node.epoch, mode):
                    found.append((node, mode))
        return found

    def told(self, node_id: int, epoch: int, mode: int) -> None:
        """The node has answered, under that registration."""
        drain = self._drains.get(node_id)
        if drain is not None:
            drain.told = (epoch, mode)

    # --- copies ---

    def step(self, now_ns: int) -> list[CopyOrder]:
        """Count what is left, if it is time, and order the next copies."""
        self._copying.begin(now_ns)
        going = {node.node_id: node for node in self._members.live() if node.drain}
        for node_id in self._drains.keys() - going.keys():
            del self._drains[node_id]
        if not going:
            return []
        if now_ns >= self._look_ns:
            self._look_ns = now_ns + LOOK_NS
            self._look(going)
        return self._order(going) if self._wanted else []

    def _look(self, going: dict[int, NodeMember]) -> None:
        """Count what only nodes have that are to be stopped, those that end by a signal among them. What others have yet to say that they
        have is left, and not copied yet: they have just registered, and are about to say."""
        sets = self._rows.sets
        ending = [node.node_id for node in self._members.live() if not node.takes_blocks]
        self._wanted = sets.only_at(ending)
        counts = {node_id: [0, 0] for node_id in going}
        for index, count in sets.only_at(ending, surely=False).items():
            is_kept = any(state & NVME and not state & HINT and node_id in sets.live_nodes for node_id, state in sets[index])
            for node_id, _state in sets[index]:
                if node_id in counts:
                    counts[node_id][is_kept] += count
        for node_id, (left, kept) in counts.items():
            drain = self._drains.setdefault(node_id, _Drain())
            drain.left, drain.kept = left, kept
            drain.is_quiet = _has_said_all(going[node_id])

    def _order(self, going: dict[int, NodeMember]) -> list[CopyOrder]:
        begin = self._row if self._row < len(self._rows) else 0
        end = min(begin + self._copying.pace.rows, len(self._rows))
        if begin == 0:
            self._begin_pass()
        self._most_bytes = MAX_VALUE_BYTES
        is_wanted = np.zeros(max(self._wanted) + 1, bool)
        is_wanted[list(self._wanted)] = True
        held = np.frombuffer(self._rows.holders, np.uint32)[begin:end].copy()  # a view would forbid the column to grow
        found: Sequence[int] = (np.flatnonzero(is_wanted[np.minimum(held, len(is_wanted) - 1)] & (held < len(is_wanted))) + begin).tolist()
        self._row = end
        for looked_at, row in enumerate(found):
            if self._copying.is_busy or looked_at * LOOK_COST >= self._copying.pace.rows:
                self._row = row  # from here on, once some have arrived
                break
            self._order_one(row, going)
        return self._copying.take_orders()

    def _begin_pass(self) -> None:
        """What found no room in the last walk may find some in this one; what is still so at its end is to be written down at its node."""
        for drain in self._drains.values():
            drain.saves |= drain.lacks_space
            drain.lacked_room, drain.lacks_space = drain.lacks_space, False

    def _order_one(self, row: int, going: dict[int, NodeMember]) -> None:
        key, size_bytes = self._rows.keys[row], self._rows.sizes[row]
        tenant = self._tenants.at(self._rows.tenant_indexes[row]).name
        if self._replication.is_ordered(tenant, key):
            return
        source = next((node_id for node_id, state in self._rows.pairs(row) if node_id in going and not state & HINT), None)
        if source is None or going[source].drain != TO_PEERS or going[source].state != ALIVE:
            return
        room = self._copying.room
        if room.get(self._target, 0) < size_bytes <= self._most_bytes:  # else the same one: chains stay together
            self._target = max(room, key=room.__getitem__, default=0)
            self._most_bytes = room.get(self._target, 0)
        if room.get(self._target, 0) < size_bytes:
            self._drains[source].lacks_space = True
            return
        self._copying.add(tenant, key, size_bytes, node_id=self._target, source_node_id=source)

    def _named(self, name: str) -> NodeMember:
        node = self._members.named(name)
        if node is None:
            known = ", ".join(sorted(node.info.name for node in self._members)) or "none"
            raise InvalidArgument(f"there is no node {name!r}; there are: {known}")
        return node


def _has_said_all(node: NodeMember) -> bool:
    """Its last heartbeat says that it takes no blocks, and that nothing is on its way any more into what it has told."""
    is_closed = node.state == ALIVE and bool(node.counters.get("closed", 0))
    return is_closed and not any(node.counters.get(name, 0) for name in WORKING)
