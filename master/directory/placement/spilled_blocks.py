"""Spilled blocks: the coldest blocks of a node that is nearly full are copied to a node with free space, and are evicted there first.
Sans-I/O; `now_ns` is passed in.

A node offers its coldest blocks as it asks which of them others keep (last_replica.py). Of those that nobody else keeps copies are ordered,
a bounded amount at once (copies.py), to nodes that keep a share of their capacity free all the same. A copy that has arrived is a guest
there, which that node keeps: so the one that was short of room is told, when it asks again, that the block may leave first. Which
blocks are guests is known here only as long as their source has them, too; the receiver knows its own, and offers none of them again."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvstore.master.directory.directory_parts import DirectoryParts
from kvstore.master.directory.index.holders import HINT
from kvstore.master.directory.index.keys import NO_ROW
from kvstore.master.directory.membership.members import NodeMember
from kvstore.master.directory.placement.copies import LOOK_COST, CopyBatcher, CopyLimits, CopyOrder, CopyReceivers
from kvstore.master.directory.placement.replication import ReplicaPlanner
from kvstore.protocol.node_states import ALIVE


class SpilledBlock(NamedTuple):
    """The node that took the block, and the one that spilled it."""

    node_id: int
    source_node_id: int


MAX_OFFERED: Final = 1 << 16
"""Blocks that wait to be looked at: what is beyond is offered again."""
MAX_GUESTS: Final = 1 << 18
"""Guests that are known, the newest: of an older one the block's generation says who keeps it. About 60 MB."""
TIDIED_GUESTS: Final = 256
"""Guests that a step looks at for whether their source still has them."""


class SpilledBlocks:
    """See the module. Not thread-safe."""

    def __init__(
        self,
        parts: DirectoryParts,
        replication: ReplicaPlanner,
        guests: OrderedDict[tuple[str, bytes], SpilledBlock],
        pace: CopyLimits,
        *,
        free_share: float,
    ) -> None:
        """`free_share` of its capacity a receiver keeps free; 0: nothing is spilled. `guests` is filled here, and read by LastCopies."""
        self._rows, self._tenants, self._members, self._replication = parts.rows, parts.tenants, parts.members, replication
        self._copying = CopyBatcher(parts, replication, pace, full_share=free_share)
        self._free_share = free_share
        self.guests = guests
        self._offers: OrderedDict[tuple[str, bytes], int] = OrderedDict()
        """Tenant and key to the node that would spill the block; the oldest first."""
        self._under_way: dict[tuple[str, bytes], SpilledBlock] = {}
        self._last: frozenset[int] = frozenset()
        """Who got the block before: chains stay together, and there are few sets of holders."""
        self.spilled_blocks = 0
        """Since this master owns the catalog, as the next."""
        self.spilled_bytes = 0

    @property
    def at_share(self) -> float:
        """With less than this share of its lowest tier free a node is to offer what it would spill, 0: never. Half of what receivers keep
        free, so that none of them is short of room for what it took."""
        return self._free_share / 2

    def offered(self, node_id: int, tenant: str, keys: Sequence[bytes], spill: bytes, kept: bytes) -> None:
        """The node would spill those of its blocks that have a 1 in `spill`, unless others keep them (1 in `kept`)."""
        if not self._free_share:
            return
        for key, is_offered, is_kept in zip(keys, spill, kept, strict=True):
            if is_offered and not is_kept and len(self._offers) < MAX_OFFERED:
                self._offers[tenant, key] = node_id

    def step(self, now_ns: int) -> list[CopyOrder]:
        """Order the next copies."""
        for where in self._copying.begin(now_ns):
            self._ended(where)
        self._tidy()
        if not self._offers:
            return []
        takers = {node.node_id: node for node in self._members.live() if node.takes_blocks and node.state == ALIVE}
        receivers = CopyReceivers(self._copying, takers)
        cost = 0
        while self._offers and not self._copying.is_busy and cost + receivers.looked_at < self._copying.pace.rows:
            cost += LOOK_COST
            where, source = self._offers.popitem(last=False)
            self._look_at(where, source, takers, receivers)
        return self._copying.take_orders()

    def _ended(self, where: tuple[str, bytes]) -> None:
        """A copy has arrived, or will not."""
        guest, owner = self._under_way.pop(where), self._tenants.get(where[0])
        node = self._members.get(guest.node_id)
        row = owner.rows.get(where[1], NO_ROW) if owner is not None else NO_ROW
        if node is None or guest.node_id not in dict(self._rows.pairs(row)):
            return
        size_bytes = self._rows.sizes[row]
        node.reserved_bytes += size_bytes  # until its next heartbeat says so
        self.spilled_blocks += 1
        self.spilled_bytes += size_bytes
        self.guests.pop(where, None)
        if len(self.guests) >= MAX_GUESTS:
            self.guests.popitem(last=False)
        self.guests[where] = guest

    def _tidy(self) -> None:
        """Forget the guests that are their blocks' only copies by now, or are gone."""
        for _ in range(min(TIDIED_GUESTS, len(self.guests))):
            where, guest = self.guests.popitem(last=False)
            owner = self._tenants.get(where[0])
            holders = dict(self._rows.pairs(owner.rows.get(where[1], NO_ROW))) if owner is not None else {}
            if {guest.node_id, guest.source_node_id} <= holders.keys():
                self.guests[where] = guest  # as the last to be looked at again

    def _look_at(self, where: tuple[str, bytes], source: int, takers: dict[int, NodeMember], receivers: CopyReceivers) -> None:
        """Order a copy, unless others keep the block by now, or nobody has room for it: then it is offered again."""
        tenant, key = where
        owner = self._tenants.get(tenant)
        row = owner.rows.get(key, NO_ROW) if owner is not None else NO_ROW
        holders, node = dict(self._rows.pairs(row)), self._members.get(source)
        if owner is None or node is None or not node.is_live or holders.get(source, HINT) & HINT:
            return
        others = sum(node_id in takers and node_id != source and not state & HINT for node_id, state in holders.items())
        if others >= owner.targets.get(key, 1) or self._replication.is_ordered(tenant, key):
            return
        receiver = receivers.choose(self._rows.sizes[row], has=holders, hosts=(node.host,), last=self._last)
        if receiver:
            self._last, self._under_way[where] = frozenset((receiver,)), SpilledBlock(receiver, source)
            self._copying.add(tenant, key, self._rows.sizes[row], node_id=receiver, source_node_id=source)
