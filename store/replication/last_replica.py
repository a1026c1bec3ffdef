"""Queries to the masters about the next victims: whether other nodes hold them
(store/block_table/replicated_victims.py).

A nearly full node also offers its coldest blocks for spilling ahead of their eviction. The master chooses a node, which
fetches them; they are preferred victims once an answer reports the other replica.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from kvstore.protocol.catalog_messages import QueryVictims
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.session_messages import Flags
from kvstore.store.block_table.block import Block
from kvstore.store.block_table.partition_map import PartitionMap
from kvstore.store.block_table.tier_view import TierView

AHEAD_BLOCKS: Final = 1024
"""Blocks that are to have another replica ahead of eviction: evictions during the copies, at thousands of puts a
second."""

AHEAD_SHARE: Final = 0.25
"""The same as a share of the tier's blocks: warmer ones are not worth a copy."""

MIN_PAUSE_NS: Final = 100_000_000
"""Pause between queries while answers change."""

MAX_PAUSE_NS: Final = 10_000_000_000
"""Upper bound of the pause, which doubles while answers do not change. 1,000 full nodes query 100,000 keys a second."""

SendQuery = Callable[[QueryVictims, Callable[[Flags | KVStoreError], None]], None]
"""Sends a QueryVictims to the master and calls back once."""


class VictimSpiller:
    """Schedule of queries ahead of evictions, for the lowest tier. Not thread-safe: called from the node's loop."""

    def __init__(self, lowest: TierView, *, clock_ns: Callable[[], int]) -> None:
        self._lowest = lowest
        self._clock_ns = clock_ns
        self._at_share = 0.0
        self._pause_ns = MIN_PAUSE_NS
        self._next_ns = 0
        self._elsewhere = 0
        """Blocks of the last query that have another replica."""

    def begin(self, at_share: float) -> None:
        """Spill if less than this share of the tier is free; 0: never."""
        self._at_share, self._pause_ns, self._next_ns, self._elsewhere = at_share, MIN_PAUSE_NS, 0, 0

    @property
    def is_short(self) -> bool:
        """True if the tier is nearly full and spilling is configured."""
        tier = self._lowest.tier
        free_bytes = tier.capacity_bytes - tier.used_bytes - tier.quarantined_bytes
        return free_bytes < self._at_share * tier.capacity_bytes

    @property
    def ahead(self) -> int:
        """Number of coldest blocks that are to have another replica."""
        return min(AHEAD_BLOCKS, max(1, int(AHEAD_SHARE * len(self._lowest))))

    def due_group(self) -> int | None:
        """Return the group to query now, or None."""
        now_ns = self._clock_ns()
        if not self._at_share or now_ns < self._next_ns or not self.is_short:
            return None
        self._next_ns = now_ns + self._pause_ns
        return self._lowest.coldest_group()

    def offered(self, blocks: Sequence[Block]) -> bytes:
        """Return a flag per block: 1 to spill it unless it has another replica. Empty if the tier has space."""
        if not self.is_short:
            return b""
        ahead = self.ahead
        return bytes(at < ahead and not block.is_spilled for at, block in enumerate(blocks))

    def answered(self, flags: bytes) -> None:
        """Adapt the pause to an answer."""
        elsewhere = sum(flags)
        self._pause_ns = MIN_PAUSE_NS if elsewhere != self._elsewhere else min(2 * self._pause_ns, MAX_PAUSE_NS)
        self._elsewhere = elsewhere


class LastReplicaQueries:
    """Victim queries of the node's lowest tier. Not thread-safe: called from the node's loop."""

    def __init__(self, lowest: TierView, partition_map: PartitionMap, *, clock_ns: Callable[[], int]) -> None:
        self._lowest = lowest
        self._partition_map = partition_map
        self._clock_ns = clock_ns
        self._spilling = VictimSpiller(lowest, clock_ns=clock_ns)
        self._links: dict[int, tuple[SendQuery, int]] = {}
        """By partition: the master's query function, and the registration epoch."""
        self._round = 0
        """Incremented with each change of a link; answers to earlier queries are ignored."""

    def link_up(self, ask: SendQuery, epoch: int, partition: int = 0, *, spill_at_share: float = 0.0) -> None:
        """Query the partition's master over a new link. Spill if less than `spill_at_share` of the tier is free; 0:
        never."""
        self.link_down(partition)
        self._links[partition] = ask, epoch
        self._spilling.begin(spill_at_share)

    def link_down(self, partition: int = 0) -> None:
        """Forget all answers."""
        self._links.pop(partition, None)
        self._round += 1
        self._lowest.replicated_victims.forget()

    def step(self) -> None:
        """Send due queries. Called after each round of events."""
        if not self._links:
            return
        for group in self._lowest.replicated_victims.take_due():
            blocks = self._lowest.coldest(group)
            if blocks:
                self._query(group, blocks)
            else:
                self._lowest.replicated_victims.set_answer(group, (), b"", now_ns=self._clock_ns())

    def run_due(self) -> None:
        """Expire answers, and query ahead of evictions if due. Called periodically."""
        self._lowest.replicated_victims.expire(now_ns=self._clock_ns())
        group = self._spilling.due_group() if self._links else None
        if group is None:
            return
        blocks = self._lowest.coldest(group, self._spilling.ahead)
        if blocks and self._lowest.replicated_victims.begin_query(group):
            self._query(group, blocks, then=self._spilling.answered)

    def _query(self, group: int, blocks: list[Block], then: Callable[[bytes], None] = lambda _flags: None) -> None:
        """Query the master of each partition about its keys. Blocks of a partition without a link count as last
        replicas."""
        asked, current = [(block, block.last_access) for block in blocks], self._round
        offered, flags = self._spilling.offered(blocks), bytearray(len(blocks))
        by_partition: dict[int, list[int]] = {}
        for at, block in enumerate(blocks):
            by_partition.setdefault(self._partition_map.of(block.key), []).append(at)
        links = {partition: self._links[partition] for partition in by_partition if partition in self._links}
        left = len(links)

        def answered(of: list[int], reply: Flags | KVStoreError) -> None:
            nonlocal left
            left -= 1
            if current != self._round:
                return
            if isinstance(reply, Flags) and len(reply.flags) == len(of):
                for at, flag in zip(of, reply.flags, strict=True):
                    flags[at] = flag
            if not left:
                finish()

        def finish() -> None:
            self._lowest.replicated_victims.set_answer(group, asked, bytes(flags), now_ns=self._clock_ns())
            then(bytes(flags))

        for partition, (ask, epoch) in links.items():
            of = by_partition[partition]
            spill = bytes(offered[at] for at in of) if offered else b""
            ask(QueryVictims(epoch, blocks[0].tenant, [blocks[at].key for at in of], spill), partial(answered, of))
        if not links:
            finish()
