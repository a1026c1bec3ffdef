"""Spilled blocks: the coldest blocks of a nearly full node are copied to a node with free space, and evicted at the
full node first. Sans-I/O; `now_ns` is passed in.

A node offers its coldest blocks when it asks which of them others keep (last_replica.py). Of those that no other
node keeps, copies are ordered, a bounded number at once (copies.py), to nodes that keep a share of their capacity
free. The receiver keeps an arrived copy; the source, when it asks again, may evict the block. This state is kept
while the source holds the block, too; the receiver knows its own spilled blocks, and does not offer them again."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvstore.master.directory.directory_parts import DirectoryParts
from kvstore.master.directory.index.holders import HINT
from kvstore.master.directory.index.keys import NO_ROW
from kvstore.master.directory.membership.members import NodeMember
from kvstore.master.directory.placement.copies import CHECK_COST, CopyBatcher, CopyLimits, CopyOrder, CopyReceivers
from kvstore.master.directory.placement.replication import ReplicaPlanner
from kvstore.protocol.node_states import ALIVE


class SpilledBlock(NamedTuple):
    """The node that received the block, and the one that spilled it."""

    node_id: int
    source_node_id: int


MAX_OFFERED: Final = 1 << 16
"""Offered blocks queued; further ones are offered again later."""
MAX_GUESTS: Final = 1 << 18
"""Known spilled blocks, the newest ones: of older ones the generation selects the keeper. About 60 MB."""
CHECKED_GUESTS: Final = 256
"""Spilled blocks that a step checks for being at their source."""


class SpilledBlocks:
    """Offers, copies under way and spilled blocks. Not thread-safe."""

    def __init__(
        self,
        parts: DirectoryParts,
        replication: ReplicaPlanner,
        guests: OrderedDict[tuple[str, bytes], SpilledBlock],
        pace: CopyLimits,
        *,
        free_share: float,
    ) -> None:
        """A receiver keeps `free_share` of its capacity free; 0 turns spilling off. `guests` is filled here, and
        read by LastReplicas."""
        self._rows, self._tenants, self._members, self._replication = parts.rows, parts.tenants, parts.members, replication
        self._batcher = CopyBatcher(parts, replication, pace, full_share=free_share)
        self._free_share = free_share
        self.guests = guests
        self._offers: OrderedDict[tuple[str, bytes], int] = OrderedDict()
        """Tenant and key to the node that offers the block; the oldest first."""
        self._under_way: dict[tuple[str, bytes], SpilledBlock] = {}
        self._last: frozenset[int] = frozenset()
        """Receiver of the last block: chains stay together, and holder sets stay few."""
        self.spilled_blocks = 0
        """Since this master owns the catalog, as `spilled_bytes`."""
        self.spilled_bytes = 0

    @property
    def at_share(self) -> float:
        """A node offers blocks when less than this share of its lowest tier is free; 0: never. Half of the share
        that receivers keep free, so that none is short of space for received blocks."""
        return self._free_share / 2

    def offered(self, node_id: int, tenant: str, keys: Sequence[bytes], spill: bytes, kept: bytes) -> None:
        """Queue the blocks that the node offers (1 in `spill`), but for those that others keep (1 in `kept`)."""
        if not self._free_share:
            return
        for key, is_offered, is_kept in zip(keys, spill, kept, strict=True):
            if is_offered and not is_kept and len(self._offers) < MAX_OFFERED:
                self._offers[tenant, key] = node_id

    def step(self, now_ns: int) -> list[CopyOrder]:
        """Order the next copies."""
        for block_id in self._batcher.begin(now_ns):
            self._ended(block_id)
        self._drop_stale()
        if not self._offers:
            return []
        accepting = {node.node_id: node for node in self._members.live() if node.takes_blocks and node.state == ALIVE}
        receivers = CopyReceivers(self._batcher, accepting)
        cost = 0
        while self._offers and not self._batcher.is_busy and cost + receivers.checked < self._batcher.pace.rows:
            cost += CHECK_COST
            block_id, source = self._offers.popitem(last=False)
            self._check_block(block_id, source, accepting, receivers)
        return self._batcher.take_orders()

    def _ended(self, block_id: tuple[str, bytes]) -> None:
        """A copy has arrived, or failed."""
        guest, owner = self._under_way.pop(block_id), self._tenants.get(block_id[0])
        node = self._members.get(guest.node_id)
        row = owner.rows.get(block_id[1], NO_ROW) if owner is not None else NO_ROW
        if node is None or guest.node_id not in dict(self._rows.pairs(row)):
            return
        size_bytes = self._rows.sizes[row]
        node.reserved_bytes += size_bytes  # until its next heartbeat says so
        self.spilled_blocks += 1
        self.spilled_bytes += size_bytes
        self.guests.pop(block_id, None)
        if len(self.guests) >= MAX_GUESTS:
            self.guests.popitem(last=False)
        self.guests[block_id] = guest

    def _drop_stale(self) -> None:
        """Drop spilled blocks that are gone at their source or receiver."""
        for _ in range(min(CHECKED_GUESTS, len(self.guests))):
            block_id, guest = self.guests.popitem(last=False)
            owner = self._tenants.get(block_id[0])
            holders = dict(self._rows.pairs(owner.rows.get(block_id[1], NO_ROW))) if owner is not None else {}
            if {guest.node_id, guest.source_node_id} <= holders.keys():
                self.guests[block_id] = guest  # to the end of the queue

    def _check_block(self, block_id: tuple[str, bytes], source: int, accepting: dict[int, NodeMember], receivers: CopyReceivers) -> None:
        """Order a copy, unless other nodes keep the block by now. If no node has room, the source will offer it
        again."""
        tenant, key = block_id
        owner = self._tenants.get(tenant)
        row = owner.rows.get(key, NO_ROW) if owner is not None else NO_ROW
        holders, node = dict(self._rows.pairs(row)), self._members.get(source)
        if owner is None or node is None or not node.is_live or holders.get(source, HINT) & HINT:
            return
        others = sum(node_id in accepting and node_id != source and not state & HINT for node_id, state in holders.items())
        if others >= owner.targets.get(key, 1) or self._replication.is_ordered(tenant, key):
            return
        receiver = receivers.choose(self._rows.sizes[row], has=holders, hosts=(node.host,), last=self._last)
        if receiver:
            self._last, self._under_way[block_id] = frozenset((receiver,)), SpilledBlock(receiver, source)
            self._batcher.add(tenant, key, self._rows.sizes[row], node_id=receiver, source_node_id=source)
