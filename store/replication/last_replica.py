"""Queries to the masters about the next victims: whether other nodes hold them
(store/block_table/replicated_victims.py).
"""

from collections.abc import Callable
from functools import partial

from kvstore.protocol.catalog_messages import QueryVictims
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.session_messages import Flags
from kvstore.store.block_table.block import Block
from kvstore.store.block_table.partition_map import PartitionMap
from kvstore.store.block_table.tier_view import TierView

SendQuery = Callable[[QueryVictims, Callable[[Flags | KVStoreError], None]], None]
"""Sends a QueryVictims to the master and calls back once."""


class LastReplicaQueries:
    """Victim queries of the node's lowest tier. Not thread-safe: called from the node's loop."""

    def __init__(self, lowest: TierView, partition_map: PartitionMap, *, clock_ns: Callable[[], int]) -> None:
        self._lowest = lowest
        self._partition_map = partition_map
        self._clock_ns = clock_ns
        self._links: dict[int, tuple[SendQuery, int]] = {}
        """By partition: the master's query function, and the registration epoch."""
        self._round = 0
        """Incremented with each change of a link; answers to earlier queries are ignored."""

    def link_up(self, ask: SendQuery, epoch: int, partition: int = 0) -> None:
        """Query the partition's master over a new link."""
        self.link_down(partition)
        self._links[partition] = ask, epoch

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
        """Expire answers. Called periodically."""
        self._lowest.replicated_victims.expire(now_ns=self._clock_ns())

    def _query(self, group: int, blocks: list[Block]) -> None:
        """Query the master of each partition about its keys. Blocks of a partition without a link count as last
        replicas."""
        asked, current = [(block, block.last_access) for block in blocks], self._round
        flags = bytearray(len(blocks))
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

        for partition, (ask, epoch) in links.items():
            of = by_partition[partition]
            ask(QueryVictims(epoch, blocks[0].tenant, [blocks[at].key for at in of]), partial(answered, of))
        if not links:
            finish()
