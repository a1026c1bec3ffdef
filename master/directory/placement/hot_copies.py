"""Copies of hot blocks: a block that hosts without a copy read often gets further replicas, until it cools. Sans-I/O;
`now_ns` is passed in.

Nodes report their most read blocks, and the reads by other hosts (reads.py): a host with a copy reads that one, so
only the other reads can be spread. In rounds, a bounded part of one in each step, the reads of all nodes are summed.
A block gets a copy for each `reads_per_s`, up to the limit, one after another, at nodes with free space (copies.py).
It loses them one by one as its reads fall below half of that: the copies lose their protection, and their nodes
evict them first (last_replica.py). This state is in memory only; after a failover the copies are replicas like
others."""

import heapq
import random
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import Final

from kvstore.master.directory.bounds import HotCopyLimits
from kvstore.master.directory.directory_parts import DirectoryParts
from kvstore.master.directory.index.holders import HINT
from kvstore.master.directory.index.keys import NO_ROW
from kvstore.master.directory.membership.members import NodeMember
from kvstore.master.directory.membership.node_load import shares
from kvstore.master.directory.membership.reads import BlockHeat
from kvstore.master.directory.placement.copies import CopyBatcher, CopyLimits, CopyOrder
from kvstore.master.directory.placement.replication import ReplicaPlanner
from kvstore.protocol.node_states import ALIVE


@dataclass(slots=True)
class HotBlock:
    """A hot version: `count` nodes besides one are to hold it; 0 when it has cooled. `made_at` are the holders that
    were added for its heat: they keep it while `count` needs them, and evict it first."""

    generation: int
    count: int = 0
    made_at: set[int] = field(default_factory=set)
    not_before_ns: int = 0
    """After a failed copy, no other is ordered before this."""


ROUND_NS: Final = 1_000_000_000
"""Interval of rounds, longer if a round takes longer."""
STEP_COST: Final = 4096
"""Work of a round in one step, where summing up one node's count of a block costs 1: two milliseconds."""
COST_OF_COOL, COST_OF_WARM, COST_OF_CHOICE = 8, 8, 8
"""Cost of checking if a block has cooled, of checking a hot one for missing copies, and of choosing a receiver (plus
1 for each node)."""
MAX_HOT: Final = 1 << 16
"""Hot blocks, or blocks with hot copies; beyond this none becomes hot. About 30 MB. Nodes report a third as many."""
RETRY_NS: Final = 30_000_000_000
"""Delay before a block is copied again after a failed copy: its tenant's quota there is used up, or its node has no
free space."""

_BlockId = tuple[str, bytes]
"""Tenant and key."""


class HotCopies:
    """Hot blocks and the copies made for them. Not thread-safe."""

    def __init__(
        self,
        parts: DirectoryParts,
        replication: ReplicaPlanner,
        block_heat: BlockHeat,
        hot: dict[tuple[str, bytes], HotBlock],
        pace: CopyLimits,
        *,
        spread: HotCopyLimits,
        rng: random.Random,
    ) -> None:
        """`hot` is filled here, and read by LastReplicas."""
        self._rows, self._tenants, self._members, self._replication = parts.rows, parts.tenants, parts.members, replication
        self._block_heat, self._spread, self._rng = block_heat, spread, rng
        self._batcher = CopyBatcher(parts, replication, pace)
        self._hot = hot
        self._under_way: dict[tuple[str, bytes], int] = {}
        """Receiver of a block's next copy."""
        self._round: Iterator[int] | None = None
        self._round_ns = 0
        """Earliest start of the next round."""
        self._now_ns = 0
        self._accepting: dict[int, NodeMember] = {}
        """Possible receivers when the round began; `room` tells which of them still take blocks."""
        self._share: dict[int, float] = {}
        self._chosen = 0
        """Receiver of the last copy in this step: chains stay together."""
        self.copied_blocks = 0
        """Since this master owns the catalog, as `copied_bytes`."""
        self.copied_bytes = 0
        self.hot_blocks = 0
        """Blocks that are to have copies now."""

    @property
    def is_on(self) -> bool:
        return self._spread.copies > 0

    def step(self, now_ns: int) -> list[CopyOrder]:
        """Order the next copies."""
        if not self.is_on:
            return []
        self._block_heat.request_reports(now_ns)
        for block_id in self._batcher.begin(now_ns):
            self._ended(block_id, now_ns)
        self._now_ns, self._chosen = now_ns, 0
        if self._round is None and now_ns >= self._round_ns:
            self._round, self._round_ns = self._round_parts(now_ns), now_ns + ROUND_NS
        left = STEP_COST
        while self._round is not None and left > 0:
            cost = next(self._round, None)
            if cost is None:
                self._round = None
            else:
                left -= cost
        return self._batcher.take_orders()

    def check_integrity(self) -> None:
        """Assert that the limits hold, and each copy under way is of a known block. For tests."""
        assert len(self._hot) <= MAX_HOT
        assert all(0 <= block.count <= self._spread.copies for block in self._hot.values())
        assert self.hot_blocks == sum(block.count > 0 for block in self._hot.values())
        assert self._under_way.keys() <= self._hot.keys()

    def _ended(self, block_id: _BlockId, now_ns: int) -> None:
        """A copy has arrived, or failed."""
        node_id, block = self._under_way.pop(block_id), self._hot[block_id]
        node, row = self._members.get(node_id), self._row(block_id)
        if node is None or node_id not in dict(self._rows.pairs(row)):
            block.not_before_ns = now_ns + RETRY_NS
            return
        size_bytes = self._rows.sizes[row]
        node.reserved_bytes += size_bytes  # until its next heartbeat counts them
        block.made_at.add(node_id)
        self.copied_blocks += 1
        self.copied_bytes += size_bytes

    def _round_parts(self, now_ns: int) -> Iterator[int]:
        """Run a round, in parts; yields the cost of each."""
        self._accepting = {node.node_id: node for node in self._members.live() if node.takes_blocks and node.state == ALIVE}
        self._share = shares(self._accepting.values())
        rates: dict[_BlockId, float] = {}
        for tenant, key, reads_per_s in self._block_heat.remote_reads(now_ns):
            rates[tenant, key] = rates.get((tenant, key), 0.0) + reads_per_s
            yield 1
        for block_id in list(self._hot):
            self._cool(block_id, rates.get(block_id, 0.0))
            yield COST_OF_COOL
        hot = list[tuple[float, _BlockId]]()
        for block_id, rate in rates.items():
            if rate >= self._spread.reads_per_s:
                heapq.heappush(hot, (-rate, block_id))
            yield 1
        while hot:  # the hottest first, and so parents before their children
            rate, block_id = heapq.heappop(hot)
            yield COST_OF_WARM + self._warm(block_id, -rate)

    def _cool(self, block_id: _BlockId, rate: float) -> None:
        """Lower the block's count to its reads, and drop it when it has neither heat nor copies."""
        block, row = self._hot[block_id], self._row(block_id)
        is_there = self._rows.generations[row] == block.generation
        self._count(block, min(block.count, int(2 * rate / self._spread.reads_per_s)) if is_there else 0)
        block.made_at &= dict(self._rows.pairs(row)).keys() if is_there else set()
        if not block.count and not block.made_at and block_id not in self._under_way:
            del self._hot[block_id]

    def _warm(self, block_id: _BlockId, rate: float) -> int:
        """Order a copy of a hot block if it lacks one. Return the cost besides the check."""
        row = self._row(block_id)
        pairs, generation = self._rows.pairs(row), self._rows.generations[row]
        sources = [node_id for node_id, state in pairs if not state & HINT and node_id in self._rows.sets.live_nodes]
        block = self._hot.get(block_id)
        if block is None and sources and len(self._hot) < MAX_HOT:
            block = self._hot[block_id] = HotBlock(generation)
        if block is None or not sources or block.generation != generation:
            return 0  # a new version: the block is dropped in the next round
        self._count(block, max(block.count, min(self._spread.copies, int(rate / self._spread.reads_per_s))))
        if self._batcher.is_busy or self._now_ns < block.not_before_ns or self._replication.is_ordered(*block_id):
            return 0
        if sum(node_id in self._accepting for node_id in sources) > block.count:
            return 0
        node_id = self._choose({node_id for node_id, _state in pairs}, self._near(block_id[0], row), self._rows.sizes[row])
        if node_id:
            self._chosen = self._under_way[block_id] = node_id
            self._batcher.add(*block_id, self._rows.sizes[row], node_id=node_id, source_node_id=sources[0])
        return COST_OF_CHOICE + len(self._accepting)

    def _count(self, block: HotBlock, count: int) -> None:
        self.hot_blocks += (count > 0) - (block.count > 0)
        block.count = count

    def _row(self, block_id: _BlockId) -> int:
        owner = self._tenants.get(block_id[0])
        return owner.rows.get(block_id[1], NO_ROW) if owner is not None else NO_ROW

    def _near(self, tenant: str, row: int) -> Set[int]:
        """Nodes with hot copies of its parent."""
        parent = self._hot.get((tenant, self._rows.version(row).parent))
        return parent.made_at if parent is not None else set()

    def _choose(self, has: Set[int], near: Set[int], size_bytes: int) -> int:
        """Return a node with room, 0 if none has. Preferred: another host, then a node with copies of its chain;
        else drawn by room and load."""
        room = self._batcher.room
        fitting = [node for node_id, node in self._accepting.items() if node_id not in has and room.get(node_id, 0) >= size_bytes]
        hosts = {node.host for node_id in has if (node := self._members.get(node_id)) is not None}
        best = [node for node in fitting if node.host not in hosts] or fitting
        if not best:
            return 0
        for together in (near, {self._chosen}):
            found = [node.node_id for node in best if node.node_id in together]
            if found:
                return found[0]
        [drawn] = self._rng.choices(best, [self._share[node.node_id] * room[node.node_id] for node in best])
        return drawn.node_id
