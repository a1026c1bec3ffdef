"""Drains of nodes that are to be stopped: counts the blocks that only they hold, and copies these to other nodes.
Sans-I/O; `now_ns` is passed in.

Drains are records, so a restarted master continues them. The remaining blocks are counted over the holder sets,
which are few. The rows are walked in slices to order copies (replication.py): a bounded number at once, to nodes
with free space. Blocks for which none has space are written to the drained node's own NVMe, if it has one (`mode`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvstore.master.catalogs.interface import Op
from kvstore.master.directory import records
from kvstore.master.directory.directory_parts import DirectoryParts
from kvstore.master.directory.index.holders import HINT
from kvstore.master.directory.membership.members import NodeMember
from kvstore.master.directory.placement.copies import CHECK_COST, CopyBatcher, CopyLimits, CopyOrder
from kvstore.master.directory.placement.replication import ReplicaPlanner
from kvstore.master.directory.records import DRAINS, TO_NVME, TO_PEERS
from kvstore.protocol.catalog_messages import DRAIN_CLOSED, DRAIN_SAVE
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.frames import MAX_VALUE_BYTES
from kvstore.protocol.message import TIER_BITS
from kvstore.protocol.node_states import ALIVE

COUNT_INTERVAL_NS: Final = 500_000_000
"""Interval at which the remaining blocks are counted."""
NVME: Final = TIER_BITS["nvme"]
WORKING: Final = ("open_puts", "undecided", "publish_backlog")
"""Counters of a node that may still report blocks unknown to the directory."""


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
    """State of one drain. `left` and `kept` as of the last count."""

    left: int = 0
    kept: int = 0
    is_quiet: bool = False
    """At the last count the node had reported all its blocks."""
    lacks_space: bool = False
    """A block found no free space in this walk over the rows; `lacked_room`: in the one before."""
    lacked_room: bool = False
    saves: bool = False
    acknowledged: tuple[int, int] = (0, 0)
    """Registration and mode of the last Drain that the node has acknowledged."""


class NodeDrains:
    """Drains of a cluster's nodes. Not thread-safe."""

    def __init__(self, parts: DirectoryParts, replication: ReplicaPlanner, pace: CopyLimits) -> None:
        self._rows, self._tenants, self._members, self._replication = parts.rows, parts.tenants, parts.members, replication
        self._batcher = CopyBatcher(parts, replication, pace)
        self._drains: dict[int, _Drain] = {}
        self._wanted: dict[int, int] = {}
        """Holder sets that are only at stopping nodes, to rows."""
        self._count_ns = 0
        self._row = 0
        self._target = 0
        """Receiver of the last block."""
        self._most_bytes = 0
        """Upper bound of all nodes' room in this step."""

    # --- operators' requests ---

    def begin(self, name: str, to: str) -> list[Op]:
        """Drain the node; return operations. Raises InvalidArgument: no such node, or `to` is not in DRAINS."""
        if to not in DRAINS:
            raise InvalidArgument(f"{to!r} is not a destination of a drain: use one of {', '.join(DRAINS)}")
        node = self._named(name)
        if node.drain == to:
            return []
        self._members.set_drain(name, to)
        self._drains.pop(node.node_id, None)
        self._count_ns = 0
        return [records.put_drain(name, to)]

    def cancel(self, name: str) -> list[Op]:
        """Cancel the drain: the node takes blocks again, and copies under way continue. Return operations. Raises
        InvalidArgument: no such node."""
        node = self._named(name)
        if not node.drain:
            return []
        self._members.set_drain(name, "")
        self._drains.pop(node.node_id, None)
        return [records.delete_drain(name)]

    def progress(self, node: NodeMember) -> DrainProgress | None:
        """Return the drain's progress, None if the node is not drained."""
        if not node.drain:
            return None
        drain = self._drains.get(node.node_id, _Drain())
        copying = self._batcher.count_from(node.node_id)
        can_stay = node.drain == TO_NVME or drain.lacked_room
        is_done = drain.is_quiet and not drain.left and (can_stay or not drain.kept)
        return DrainProgress(node.drain, is_done, drain.left, drain.kept, copying, drain.lacked_room)

    # --- commands to nodes ---

    def unacknowledged(self) -> list[tuple[NodeMember, int]]:
        """Return the drained nodes that have not acknowledged their mode under their registration, with the mode."""
        found = []
        for node in self._members.live():
            if node.drain:
                drain = self._drains.setdefault(node.node_id, _Drain())
                mode = DRAIN_SAVE if drain.saves or node.drain == TO_NVME else DRAIN_CLOSED
                if drain.acknowledged != (node.epoch, mode):
                    found.append((node, mode))
        return found

    def acknowledged(self, node_id: int, epoch: int, mode: int) -> None:
        """Record that the node has acknowledged the mode, under that registration."""
        drain = self._drains.get(node_id)
        if drain is not None:
            drain.acknowledged = (epoch, mode)

    # --- copies ---

    def step(self, now_ns: int) -> list[CopyOrder]:
        """Count the remaining blocks, if it is time, and order the next copies."""
        self._batcher.begin(now_ns)
        going = {node.node_id: node for node in self._members.live() if node.drain}
        for node_id in self._drains.keys() - going.keys():
            del self._drains[node_id]
        if not going:
            return []
        if now_ns >= self._count_ns:
            self._count_ns = now_ns + COUNT_INTERVAL_NS
            self._count_left(going)
        return self._order(going) if self._wanted else []

    def _count_left(self, going: dict[int, NodeMember]) -> None:
        """Count the blocks that only stopping nodes hold, also those stopped by a signal. Blocks with hints at other
        nodes count as left, but are not copied yet: those nodes have just registered, and are about to confirm them."""
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
            drain.is_quiet = _has_reported_all(going[node_id])

    def _order(self, going: dict[int, NodeMember]) -> list[CopyOrder]:
        begin = self._row if self._row < len(self._rows) else 0
        end = min(begin + self._batcher.pace.rows, len(self._rows))
        if begin == 0:
            self._begin_pass()
        self._most_bytes = MAX_VALUE_BYTES
        is_wanted = np.zeros(max(self._wanted) + 1, bool)
        is_wanted[list(self._wanted)] = True
        held = np.frombuffer(self._rows.holders, np.uint32)[begin:end].copy()  # the column cannot grow while numpy views it
        found: Sequence[int] = (np.flatnonzero(is_wanted[np.minimum(held, len(is_wanted) - 1)] & (held < len(is_wanted))) + begin).tolist()
        self._row = end
        for checked, row in enumerate(found):
            if self._batcher.is_busy or checked * CHECK_COST >= self._batcher.pace.rows:
                self._row = row  # continue here once copies have arrived
                break
            self._order_one(row, going)
        return self._batcher.take_orders()

    def _begin_pass(self) -> None:
        """Begin a walk over the rows. Nodes with blocks that found no room in the last walk are to write them to
        their NVMe."""
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
        room = self._batcher.room
        if room.get(self._target, 0) < size_bytes <= self._most_bytes:  # else keep the receiver: chains stay together
            self._target = max(room, key=room.__getitem__, default=0)
            self._most_bytes = room.get(self._target, 0)
        if room.get(self._target, 0) < size_bytes:
            self._drains[source].lacks_space = True
            return
        self._batcher.add(tenant, key, size_bytes, node_id=self._target, source_node_id=source)

    def _named(self, name: str) -> NodeMember:
        node = self._members.named(name)
        if node is None:
            known = ", ".join(sorted(node.info.name for node in self._members)) or "none"
            raise InvalidArgument(f"there is no node {name!r}; there are: {known}")
        return node


def _has_reported_all(node: NodeMember) -> bool:
    """Return True if the node's last heartbeat reports that it takes no blocks and has no reports under way."""
    is_closed = node.state == ALIVE and bool(node.counters.get("closed", 0))
    return is_closed and not any(node.counters.get(name, 0) for name in WORKING)
