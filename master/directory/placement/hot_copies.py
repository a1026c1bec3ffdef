"""Copies of hot blocks: what hosts without a copy read often gets further ones at other nodes, and keeps them until it has cooled.
Sans-I/O; `now_ns` is passed in.

Nodes tell which blocks are read most, and how often from other hosts (reads.py): who has a copy on its own host reads that one, so only the
other reads can be spread. In rounds, a bounded part of one a step, the reads of all nodes are summed up. A block gets a copy for each
`reads_per_s`, up to the limit, one after another, at nodes with room (copies.py); it loses them one by one as it falls below half of
that. Lost is only what protects them: they become spares of their nodes, which leave before anything else there (last_replica.py). What is
known here a master that takes over learns anew; until then the copies are holders like others."""

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
    """`count` nodes are to have this version besides one; 0: it has cooled. `made_at` are those of its holders that got it for its heat:
    they keep it as long as so many are to have it, and are the first to give it up."""

    generation: int
    count: int = 0
    made_at: set[int] = field(default_factory=set)
    not_before_ns: int = 0
    """A node that was to get a copy has not: no other is asked before."""


ROUND_NS: Final = 1_000_000_000
"""From the beginning of one round to that of the next, or longer where there is more to look at."""
STEP_COST: Final = 4096
"""What a step may do of a round, where to sum up a node's count of a block costs 1: two milliseconds."""
COST_OF_COOL, COST_OF_WARM, COST_OF_CHOICE = 8, 8, 8
"""To look whether a block has cooled, whether a hot one lacks copies, and to choose who gets one; that costs 1 more for each node."""
MAX_HOT: Final = 1 << 16
"""Blocks that are hot or have copies of it; beyond that none becomes hot. About 30 MB. Nodes tell of a third as many."""
RETRY_NS: Final = 30_000_000_000
"""Before a block is copied again of which a copy has not arrived: its tenant has all that it may have there, or its node lacks room."""

_Where = tuple[str, bytes]
"""Tenant and key."""


class HotCopies:
    """See the module. Not thread-safe."""

    def __init__(
        self,
        parts: DirectoryParts,
        replication: ReplicaPlanner,
        heat: BlockHeat,
        hot: dict[tuple[str, bytes], HotBlock],
        pace: CopyLimits,
        *,
        spread: HotCopyLimits,
        rng: random.Random,
    ) -> None:
        """`hot` is filled here, and read by LastCopies."""
        self._rows, self._tenants, self._members, self._replication = parts.rows, parts.tenants, parts.members, replication
        self._heat, self._spread, self._rng = heat, spread, rng
        self._copying = CopyBatcher(parts, replication, pace)
        self._hot = hot
        self._under_way: dict[tuple[str, bytes], int] = {}
        """The node that is to get the next copy of a block."""
        self._round: Iterator[int] | None = None
        self._round_ns = 0
        """When the next round may begin."""
        self._now_ns = 0
        self._takers: dict[int, NodeMember] = {}
        """When the round began; which of them still take blocks is seen by who has room."""
        self._share: dict[int, float] = {}
        self._chosen = 0
        """Who got the last copy in this step: chains stay together."""
        self.copied_blocks = 0
        """Since this master owns the catalog, as the next."""
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
        self._heat.want(now_ns)
        for where in self._copying.begin(now_ns):
            self._ended(where, now_ns)
        self._now_ns, self._chosen = now_ns, 0
        if self._round is None and now_ns >= self._round_ns:
            self._round, self._round_ns = self._look_around(now_ns), now_ns + ROUND_NS
        left = STEP_COST
        while self._round is not None and left > 0:
            cost = next(self._round, None)
            if cost is None:
                self._round = None
            else:
                left -= cost
        return self._copying.take_orders()

    def check_integrity(self) -> None:
        """Assert that no more is known than may be, and that what is on its way is for blocks that are known. For tests."""
        assert len(self._hot) <= MAX_HOT
        assert all(0 <= block.count <= self._spread.copies for block in self._hot.values())
        assert self.hot_blocks == sum(block.count > 0 for block in self._hot.values())
        assert self._under_way.keys() <= self._hot.keys()

    def _ended(self, where: _Where, now_ns: int) -> None:
        """A copy has arrived, or will not."""
        node_id, block = self._under_way.pop(where), self._hot[where]
        node, row = self._members.get(node_id), self._row(where)
        if node is None or node_id not in dict(self._rows.pairs(row)):
            block.not_before_ns = now_ns + RETRY_NS
            return
        size_bytes = self._rows.sizes[row]
        node.reserved_bytes += size_bytes  # until its next heartbeat says so
        block.made_at.add(node_id)
        self.copied_blocks += 1
        self.copied_bytes += size_bytes

    def _look_around(self, now_ns: int) -> Iterator[int]:
        """A round, a part at a time: what that has cost."""
        self._takers = {node.node_id: node for node in self._members.live() if node.takes_blocks and node.state == ALIVE}
        self._share = shares(self._takers.values())
        rates: dict[_Where, float] = {}
        for tenant, key, reads_per_s in self._heat.far_reads(now_ns):
            rates[tenant, key] = rates.get((tenant, key), 0.0) + reads_per_s
            yield 1
        for where in list(self._hot):
            self._cool(where, rates.get(where, 0.0))
            yield COST_OF_COOL
        hot = list[tuple[float, _Where]]()
        for where, rate in rates.items():
            if rate >= self._spread.reads_per_s:
                heapq.heappush(hot, (-rate, where))
            yield 1
        while hot:  # the hottest first, and so parents before their children
            rate, where = heapq.heappop(hot)
            yield COST_OF_WARM + self._warm(where, -rate)

    def _cool(self, where: _Where, rate: float) -> None:
        """Take off what it is read too seldom for, and forget what has neither heat nor copies."""
        block, row = self._hot[where], self._row(where)
        is_there = self._rows.generations[row] == block.generation
        self._count(block, min(block.count, int(2 * rate / self._spread.reads_per_s)) if is_there else 0)
        block.made_at &= dict(self._rows.pairs(row)).keys() if is_there else set()
        if not block.count and not block.made_at and where not in self._under_way:
            del self._hot[where]

    def _warm(self, where: _Where, rate: float) -> int:
        """It is hot: have it at as many nodes as are to have it. What was done besides looking."""
        row = self._row(where)
        pairs, generation = self._rows.pairs(row), self._rows.generations[row]
        sources = [node_id for node_id, state in pairs if not state & HINT and node_id in self._rows.sets.live_nodes]
        block = self._hot.get(where)
        if block is None and sources and len(self._hot) < MAX_HOT:
            block = self._hot[where] = HotBlock(generation)
        if block is None or not sources or block.generation != generation:
            return 0  # what was put anew is forgotten in the next round
        self._count(block, max(block.count, min(self._spread.copies, int(rate / self._spread.reads_per_s))))
        if self._copying.is_busy or self._now_ns < block.not_before_ns or self._replication.is_ordered(*where):
            return 0
        if sum(node_id in self._takers for node_id in sources) > block.count:
            return 0
        node_id = self._choose({node_id for node_id, _state in pairs}, self._near(where[0], row), self._rows.sizes[row])
        if node_id:
            self._chosen = self._under_way[where] = node_id
            self._copying.add(*where, self._rows.sizes[row], node_id=node_id, source_node_id=sources[0])
        return COST_OF_CHOICE + len(self._takers)

    def _count(self, block: HotBlock, count: int) -> None:
        self.hot_blocks += (count > 0) - (block.count > 0)
        block.count = count

    def _row(self, where: _Where) -> int:
        owner = self._tenants.get(where[0])
        return owner.rows.get(where[1], NO_ROW) if owner is not None else NO_ROW

    def _near(self, tenant: str, row: int) -> Set[int]:
        """Where the copies of its parent are."""
        parent = self._hot.get((tenant, self._rows.version(row).parent))
        return parent.made_at if parent is not None else set()

    def _choose(self, has: Set[int], near: Set[int], size_bytes: int) -> int:
        """A node with room, of another host if there is one, beside what its chain has there if it can be; else drawn, by room and for how
        busy it is. 0: none has room."""
        room = self._copying.room
        fitting = [node for node_id, node in self._takers.items() if node_id not in has and room.get(node_id, 0) >= size_bytes]
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
